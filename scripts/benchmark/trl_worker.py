"""Worker of the contenders `trl`: TRL's trainers on the case of a JSON file; runs in TRL's own environment.

One call of `train()` lasts for the whole benchmark: a callback waits between optimizer steps for the next request. So
a turn's time has everything that the trainer does per step, and not its start.
"""

from __future__ import annotations

from typing import Any

import torch
import trl
from datasets import Dataset
from training_reward import token_score
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from worker_channel import Channel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ENDLESS = 10**6  # optimizer steps


class Turns(TrainerCallback):
    """Runs turns of some optimizer steps on request, and ends the training when there are no more requests."""

    def __init__(self, channel: Channel, steps: int) -> None:
        self.channel, self.steps = channel, steps

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.channel.ready(f"TRL {trl.__version__}")
        self.wait(control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step % self.steps == 0:
            self.channel.end_turn()
            self.wait(control)

    def wait(self, control: TrainerControl) -> None:
        if not self.channel.start_turn():
            control.should_training_stop = True


def main() -> None:
    channel = Channel()
    case = channel.case
    torch.manual_seed(case["seed"])
    build = {"sft": sft_trainer, "rm": rm_trainer, "dpo": dpo_trainer, "grpo": grpo_trainer}[case["kind"]]
    trainer = build(case, channel)
    trainer.add_callback(Turns(channel, case["steps"]))
    trainer.train()


def sft_trainer(case: dict, channel: Channel) -> Trainer:
    rows = [
        {
            "input_ids": row["input_ids"],
            "completion_mask": [int(i >= row["prompt_length"]) for i in range(row["length"])],
        }
        for row in case["rows"]
    ]
    config = trl.SFTConfig(**common(case), max_length=None, completion_only_loss=True, **case["trl"])
    return counted(trl.SFTTrainer, channel)(
        load(AutoModelForCausalLM, case), args=config, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(case["model"], trust_remote_code=False),
    )  # fmt: skip


def rm_trainer(case: dict, channel: Channel) -> Trainer:
    rows = [{name: row[name] for name in ("chosen_ids", "rejected_ids")} for row in case["rows"]]
    return counted(trl.RewardTrainer, channel)(
        load(AutoModelForSequenceClassification, case, num_labels=1),
        args=trl.RewardConfig(**common(case), max_length=None),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(case["model"], trust_remote_code=False),
    )  # fmt: skip


def dpo_trainer(case: dict, channel: Channel) -> Trainer:
    """The reference log-probs are computed before the first turn, as ours are; the rows are tokenized already."""

    class Tokenized(trl.DPOTrainer):
        def _prepare_dataset(self, dataset: Dataset, *args: Any, **kwargs: Any) -> Dataset:
            return dataset

    rows = []
    for row in case["rows"]:
        n = row["prompt_length"]
        rows.append({
            "prompt_ids": row["chosen_ids"][:n], "chosen_ids": row["chosen_ids"][n:],
            "rejected_ids": row["rejected_ids"][n:],
        })  # fmt: skip
    config = trl.DPOConfig(**common(case), max_length=None, precompute_ref_log_probs=True)
    return counted(Tokenized, channel)(
        load(AutoModelForCausalLM, case), args=config, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(case["model"], trust_remote_code=False),
    )  # fmt: skip


def grpo_trainer(case: dict, channel: Channel) -> Trainer:
    """One rollout per optimizer step. The prompts are texts, which its tokenizer encodes to the case's ids."""

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        channel.count([len(p.split()) + len(ids) for p, ids in zip(prompts, completion_ids, strict=True)])
        return token_score(completion_ids)

    config = trl.GRPOConfig(
        **common(case), num_generations=case["samples"], max_completion_length=case["longest"], temperature=1.0,
        top_k=0, top_p=1.0, beta=case["kl_coef"],
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(case["model"], trust_remote_code=False)
    ids = [row["input_ids"] for row in case["rows"]]
    texts = tokenizer.batch_decode(ids)
    if tokenizer(texts)["input_ids"] != ids:
        raise RuntimeError("the prompts are other ids after decoding and encoding")
    return trl.GRPOTrainer(
        load(AutoModelForCausalLM, case), reward, args=config, train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
    )  # fmt: skip


def common(case: dict) -> dict[str, Any]:
    """Arguments of all trainers: pure bf16 weights as ours, no recomputation, no logging, no checkpoints."""
    rows = 2 if case["kind"] in ("rm", "dpo") else 1  # sequences per row
    return {
        "output_dir": case["folder"], "max_steps": ENDLESS, "per_device_train_batch_size": case["micro_batch"] // rows,
        "gradient_accumulation_steps": case["sequences"] // case["micro_batch"], "seed": case["seed"],
        "learning_rate": case["learning_rate"], "lr_scheduler_type": "constant", "weight_decay": 0.0,
        "adam_beta1": 0.9, "adam_beta2": 0.95, "max_grad_norm": 1.0, "optim": "adamw_torch_fused",
        "gradient_checkpointing": False, "bf16": False, "fp16": False, "use_cpu": case["device"] == "cpu",
        "logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip


def load(auto: Any, case: dict, **more: Any) -> Any:
    return auto.from_pretrained(case["model"], dtype=DTYPES[case["dtype"]], **more, trust_remote_code=False)


def counted(trainer: type[Trainer], channel: Channel) -> type[Trainer]:
    """The trainer, which also counts the real tokens of its micro-batches."""

    class Counted(trainer):
        def training_step(self, model: Any, inputs: dict, *args: Any, **kwargs: Any) -> torch.Tensor:
            if "attention_mask" in inputs:
                channel.count(inputs["attention_mask"].sum(dim=1))
            else:  # flattened: [1, N], positions restart with each sequence
                positions = inputs["position_ids"][0]
                starts = torch.cat([(positions == 0).nonzero()[:, 0], positions.new_tensor([len(positions)])])
                channel.count(starts.diff())
            return super().training_step(model, inputs, *args, **kwargs)

    return Counted


if __name__ == "__main__":
    main()
