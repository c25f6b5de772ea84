"""Worker of the contenders `ours`: runs the programs' own training code on the case of a JSON file.

Steps 1 and 2 (sft, rm, dpo): engine, batches and optimizer step of dschat.runs.fit, with the objectives of
training/step*/main.py. Step 3 (grpo, ppo): the trainer that its main.py builds, one iteration after another as
dschat.rlhf.training_loop runs them. Logging, checkpoints and data preparation are left out.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from datasets import Dataset  # noqa: E402
from transformers import PreTrainedTokenizerBase  # noqa: E402
from worker_channel import Channel  # noqa: E402

from dschat import arguments  # noqa: E402
from dschat.data.collators import collate_preferences, collate_sft  # noqa: E402
from dschat.data.datasets import DataSplits  # noqa: E402
from dschat.data.micro_batches import limit_of  # noqa: E402
from dschat.distributed import launch  # noqa: E402
from dschat.models.causal_lm import TokenLogprobs, load_causal_lm, load_tokenizer  # noqa: E402
from dschat.models.scalar_head import TokenScores, load_scalar_head  # noqa: E402
from dschat.preference.objective import RESPONSE_LOGPROBS, preference_objective  # noqa: E402
from dschat.preference.reference_logprobs import with_reference_logprobs  # noqa: E402
from dschat.rewards.weighted_sum import parse_reward  # noqa: E402
from dschat.rlhf.collector import RolloutCollector  # noqa: E402
from dschat.rlhf.experience import MinibatchShuffle, MiniDataset  # noqa: E402
from dschat.rlhf.schedule import rlhf_schedule  # noqa: E402
from dschat.runs.fit import Objective, build_engine, forward_tokens, schedule, share, train_step  # noqa: E402
from dschat.runs.network_loading import load_network  # noqa: E402
from dschat.runs.throughput import trained_model  # noqa: E402

NEVER = 10**6  # seconds without progress, and optimizer steps: a worker mostly waits
SETTINGS = {"sft": arguments.SFTSettings, "rm": arguments.RewardModelSettings, "dpo": arguments.PreferenceSettings}


def main() -> None:
    channel = Channel()
    case = channel.case
    launch.join(seed=case["seed"], collective_timeout=NEVER)
    tokenizer = load_tokenizer(case["model"], trust_remote_code=False)
    build = rl_turn if case["kind"] in ("grpo", "ppo") else supervised_turn
    turn = build(case, tokenizer, channel)
    channel.ready("" if not (missing := missing_flags(case)) else f"no flag {', '.join(missing)} in this version")
    while channel.start_turn():
        turn()
        channel.end_turn()


def supervised_turn(case: dict, tokenizer: PreTrainedTokenizerBase, channel: Channel) -> Callable[[], None]:
    """Set up sft, rm or dpo; returns the function that runs a turn, one epoch over the case's rows."""
    settings = supervised_settings(case)
    scalar = case["kind"] == "rm"
    load = partial(
        load_network, load_model=load_scalar_head if scalar else load_causal_lm,
        wrapper=TokenScores if scalar else TokenLogprobs, settings=settings, tokenizer=tokenizer,
    )  # fmt: skip
    rows = supervised_rows(case)
    objective = OBJECTIVES[case["kind"]](settings, tokenizer.pad_token_id)
    if case["kind"] == "dpo":
        splits = DataSplits(train=rows, eval=rows.select([]), report=None)
        rows = with_reference_logprobs(
            splits, objective, response_logprobs=RESPONSE_LOGPROBS["preference"],
            load=partial(load, path=case["model"], frozen=True), path=case["model"],
            folder=settings.run.output_dir, settings=settings,
        ).train  # fmt: skip
    engine = build_engine(load, counting(objective, channel), settings, total_steps=NEVER)
    batches, _ = schedule(rows, settings)
    limit = limit_of(engine.module, rows=settings.model.per_device_train_batch_size,
                     max_tokens=settings.devices.max_tokens_per_micro_batch)  # fmt: skip
    lengths, trained = forward_tokens(rows), trained_model(engine, limit)
    done = 0

    def turn() -> None:
        nonlocal done
        for step in range(done, done + case["steps"]):
            parts = share(lengths, batches.step(step), limit)
            train_step(engine, counting(objective, channel), rows, parts, trained)
        done += case["steps"]

    return turn


def supervised_settings(case: dict) -> arguments.OneModelSettings:
    settings = SETTINGS[case["kind"]]
    rows = 1 if case["kind"] == "sft" else 2  # sequences per row
    model = arguments.PolicyArguments if case["kind"] == "dpo" else arguments.ModelArguments
    return settings(
        model=model(
            model_name_or_path=case["model"], max_seq_len=case["columns"], learning_rate=case["learning_rate"],
            per_device_train_batch_size=case["micro_batch"] // rows, zero_stage=case["zero_stage"],
        ),
        optimizer=optimizer_arguments(case), devices=device_arguments(case),
        run=arguments.RunArguments(output_dir=case["folder"], seed=case["seed"], max_steps=NEVER),
    )  # fmt: skip


def supervised_rows(case: dict) -> Dataset:
    rows = case["rows"]
    if case["kind"] == "sft":
        masks = [[i >= row["prompt_length"] for i in range(row["length"])] for row in rows]
        rows = [row | {"loss_mask": mask} for row, mask in zip(rows, masks, strict=True)]
    return Dataset.from_list(rows)


def sft_objective(settings: arguments.SFTSettings, pad: int) -> Objective:
    program = load_program("step1_supervised_finetuning")
    return Objective(
        collate=partial(collate_sft, pad_token_id=pad), count=lambda batch: batch["loss_mask"].sum(),
        loss_of=program.loss_of, evaluation=program.evaluation,
    )  # fmt: skip


def rm_objective(settings: arguments.RewardModelSettings, pad: int) -> Objective:
    program = load_program("step2_reward_model_finetuning")
    return Objective(
        collate=partial(collate_preferences, pad_token_id=pad), count=lambda batch: batch["pair_mask"].sum(),
        loss_of=partial(program.pairwise, centering_coef=settings.reward_model.centering_coef), evaluation=dict,
    )  # fmt: skip


OBJECTIVES: dict[str, Callable[[Any, int], Objective]] = {
    "sft": sft_objective,
    "rm": rm_objective,
    "dpo": lambda settings, pad: preference_objective(settings.preference, pad_token_id=pad),
}


def counting(objective: Objective, channel: Channel) -> Objective:
    """The objective, which also counts the real tokens of its micro-batches."""

    def collate(rows: list) -> dict:
        batch = objective.collate(rows)
        channel.count(batch["attention_mask"].sum(dim=1))
        return batch

    return dataclasses.replace(objective, collate=collate)


def rl_turn(case: dict, tokenizer: PreTrainedTokenizerBase, channel: Channel) -> Callable[[], None]:
    """Set up grpo or ppo; returns the function that runs a turn of some iterations: rollout, then updates."""
    settings = rl_settings(case)
    prompts = Dataset.from_list([
        row | {"row_index": i, "prompt_text": json.dumps([{"role": "user", "content": str(i)}]), "row": "{}"}
        for i, row in enumerate(case["rows"])
    ])  # fmt: skip
    plan = rlhf_schedule(prompts, settings)
    trainer = load_program("step3_rlhf_finetuning").build_trainer(
        settings, tokenizer, sources=[parse_reward(entry) for entry in settings.rewards.reward], judge=None,
        total_updates=plan.total_updates, updates_per_rollout=plan.updates_per_iteration,
    )  # fmt: skip
    shuffle = MinibatchShuffle(
        minibatch_size=plan.minibatch_size, rank=0, world_size=1, seed=case["seed"], group_size=case["samples"]
    )
    dataset = MiniDataset(shuffle, generation_batches=1, ppo_epochs=1, whiten_advantages=settings.ppo.whiten_advantages)
    collector = RolloutCollector(trainer, dataset, prompts, plan.batches)
    done = 0

    def turn() -> None:
        nonlocal done
        for number in range(done, done + case["steps"]):
            for minibatch in collector.collect(number).minibatches:
                channel.count(minibatch.attention_mask.sum(dim=1))
                trainer.train_rlhf(minibatch)
        done += case["steps"]

    return turn


def rl_settings(case: dict) -> arguments.RLHFSettings:
    reward = f"{Path(__file__).with_name('training_reward.py')}:token_score"
    return arguments.RLHFSettings(
        models=arguments.RLHFModelArguments(
            actor_model_name_or_path=case["model"], actor_learning_rate=case["learning_rate"],
            critic_learning_rate=case["learning_rate"], actor_zero_stage=case["zero_stage"],
            critic_zero_stage=case["zero_stage"],
        ),
        rollouts=arguments.RolloutArguments(
            max_prompt_seq_len=case["columns"], max_answer_seq_len=case["longest"],
            per_device_generation_batch_size=case["sequences"] // case["samples"],
        ),
        ppo=arguments.PPOArguments(
            algorithm=case["kind"], num_samples_per_prompt=case["samples"], kl_coef=case["kl_coef"],
            per_device_training_batch_size=case["micro_batch"],
        ),
        rewards=arguments.RewardArguments(reward=[reward]), optimizer=optimizer_arguments(case),
        devices=device_arguments(case),
        run=arguments.RunArguments(output_dir=case["folder"], seed=case["seed"], max_steps=NEVER),
    )  # fmt: skip


def optimizer_arguments(case: dict) -> arguments.OptimizerArguments:
    steps = case["sequences"] // case["micro_batch"]
    return arguments.OptimizerArguments(lr_scheduler_type="constant", gradient_accumulation_steps=steps)


def device_arguments(case: dict) -> arguments.DeviceArguments:
    known = {field.name for field in dataclasses.fields(arguments.DeviceArguments)}
    flags = {name: value for name, value in case["flags"].items() if name in known}
    return arguments.DeviceArguments(dtype=case["dtype"], **flags)


def missing_flags(case: dict) -> list[str]:
    """Flags of the case that this version of the suite does not have."""
    known = {field.name for field in dataclasses.fields(arguments.DeviceArguments)}
    return [f"--{name}" for name in case["flags"] if name not in known]


def load_program(name: str) -> ModuleType:
    """The main.py of a step, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "training" / name / "main.py")
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
