"""Tiny random RLHF models: their folders, and engine and trainer built as in step 3."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers as hf
from datasets import Dataset
from tiny_tokenizers import CHATML, make_tokenizer

from dschat import arguments
from dschat.data.batches import rank_share
from dschat.data.chat_template import encode_prompt
from dschat.distributed import collectives, launch
from dschat.models.causal_lm import load_tokenizer
from dschat.rewards.weighted_sum import Rewards, model_paths, parse_reward
from dschat.rlhf.experience import Experience, MinibatchShuffle, MiniDataset
from dschat.rlhf.ppo_trainer import DeepSpeedPPOTrainer
from dschat.rlhf.rlhf_engine import DeepSpeedRLHFEngine
from dschat.rlhf.validation import reward_entries

QUESTIONS = ["What is 2 plus 3?", "Please add 17 and 4.", "a", "Of course", "Is it 21?", "sum", "the sum of 4", "5."]


@contextmanager
def group_of_one() -> Iterator[None]:
    """This process as a run of one rank; resets environment and process group afterwards."""
    before = dict(os.environ)
    try:
        launch.join(seed=0)
        yield
    finally:
        if torch.distributed.is_initialized():
            deepspeed.comm.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def save_models(
    root: Path, family: str = "llama", *, dropout: float = 0.0, head_width: int = 16, tied: bool = False,
    unknown_ids: int = 0,
) -> Path:  # fmt: skip
    """Save root/actor (causal language model) and root/reward (classifier); returns root.

    A sixth of the vocabulary are stop tokens, so that some responses end. Embeddings have over 10,000 weights, so that
    ZeRO-3 partitions them, while all other parameters stay below its persistence threshold.

    Args:
        unknown_ids: number of ids of the models that the tokenizer does not have.
    """
    tokenizer = make_tokenizer(eos="<|im_end|>", pad="<pad>", template=CHATML)
    for seed, (name, auto) in enumerate(
        [("actor", hf.AutoModelForCausalLM), ("reward", hf.AutoModelForSequenceClassification)]
    ):
        config = _config(family, len(tokenizer) + unknown_ids, dropout, head_width)
        config.tie_word_embeddings |= tied
        config.num_labels, config.pad_token_id, config.eos_token_id = 1, tokenizer.pad_token_id, tokenizer.eos_token_id
        torch.manual_seed(seed)
        model = auto.from_config(config)
        if name == "actor":
            model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(10, len(tokenizer), 6)]
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


def _config(family: str, vocabulary: int, dropout: float, head_width: int) -> hf.PreTrainedConfig:
    if family == "gpt2":
        return hf.GPT2Config(
            vocab_size=vocabulary, n_embd=16, n_layer=2, n_head=2, n_positions=96, initializer_range=0.3,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )  # fmt: skip
    if family == "qwen3_moe":
        return hf.Qwen3MoeConfig(
            vocab_size=vocabulary, hidden_size=2 * head_width, moe_intermediate_size=64, num_experts=4,
            num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            head_dim=head_width, max_position_embeddings=96, initializer_range=0.2,
        )  # fmt: skip
    return hf.LlamaConfig(
        vocab_size=vocabulary, hidden_size=2 * head_width, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=96, initializer_range=0.3,
    )  # fmt: skip


def make_trainer(
    root: Path, *, judge: Any = None, updates_per_rollout: int | None = None, **changes: Any
) -> DeepSpeedPPOTrainer:
    """Engine and trainer in fp32; `changes` are fields of any argument group."""
    values = {
        "actor_model_name_or_path": str(root / "actor"), "reward_model_name_or_path": str(root / "reward"),
        "actor_zero_stage": 0, "critic_zero_stage": 0, "actor_learning_rate": 1e-4, "critic_learning_rate": 2e-4,
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "dtype": "fp32", "max_prompt_seq_len": 64,
        "max_answer_seq_len": 6, "per_device_generation_batch_size": 4, "per_device_training_batch_size": 4,
        "temperature": 0.7, "missing_eos_penalty": 0.5, "gamma": 0.9, "kl_coef": 0.2, "reward_clip": 0.4,
    } | changes  # fmt: skip
    groups = []
    for group in (
        arguments.RLHFModelArguments, arguments.RolloutArguments, arguments.PPOArguments,
        arguments.OptimizerArguments, arguments.LoraArguments, arguments.DeviceArguments, arguments.RewardArguments,
        arguments.VLLMArguments,
    ):  # fmt: skip
        own = {name: values.pop(name) for name in group.__dataclass_fields__ if name in values}
        groups.append(group(**own))
    assert not values, values
    models, rollouts, ppo, optimizer, lora, devices, rewards, vllm = groups
    settings = arguments.RLHFSettings(
        models=models, rollouts=rollouts, ppo=ppo, optimizer=optimizer, lora=lora, devices=devices, rewards=rewards,
        vllm=vllm,
    )
    entries = reward_entries(models, rewards)
    engine = DeepSpeedRLHFEngine(
        load_tokenizer(models.actor_model_name_or_path), settings=settings, total_steps=100,
        reward_paths=model_paths(entries),
    )  # fmt: skip
    scores = Rewards(
        [parse_reward(entry) for entry in entries], normalize=rewards.normalize_rewards, models=engine.reward_models
    )
    return DeepSpeedPPOTrainer(
        engine, rollouts=rollouts, ppo=ppo, rewards=scores, seed=3, judge=judge, updates_per_rollout=updates_per_rollout
    )


def relative_distance(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], start: dict[str, torch.Tensor]
) -> float:
    """Distance between actual and expected weights, relative to the distance of the expected update.

    Not compared per weight: Adam takes full steps even on gradients that are pure rounding error.
    """
    assert actual.keys() == expected.keys() == start.keys()
    actual, expected, start = ({name: x.detach() for name, x in w.items()} for w in (actual, expected, start))
    error = sum((actual[name] - expected[name]).double().square().sum() for name in expected)
    update = sum((expected[name] - start[name]).double().square().sum() for name in expected)
    return float((error / update).sqrt())


def prompts_of(trainer: DeepSpeedPPOTrainer, questions: Sequence[str] = QUESTIONS) -> dict[str, list]:
    """These questions as a batch of collate_prompts."""
    messages = [[{"role": "user", "content": question}] for question in questions]
    return {
        "prompts": [encode_prompt(trainer.tokenizer, chat) for chat in messages],
        "row_index": [100 + i for i in range(len(questions))],
        "messages": messages,
        "is_chat": [False] * len(questions),
        "rows": [{"number": i} for i in range(len(questions))],
    }


def eval_rows(trainer: DeepSpeedPPOTrainer, questions: Sequence[str]) -> Dataset:
    """Rows of kind "prompt", whose row_index repeats, as it does in mixtures of sources."""
    prompts = prompts_of(trainer, questions)
    return Dataset.from_list([
        {"input_ids": ids, "row_index": 7, "prompt_text": json.dumps(chat), "row": json.dumps(row), "is_chat": False}
        for ids, chat, row in zip(prompts["prompts"], prompts["messages"], prompts["rows"], strict=True)
    ])  # fmt: skip


def one_iteration(
    trainer: DeepSpeedPPOTrainer, questions: Sequence[str], *, minibatch_size: int, ppo_epochs: int
) -> tuple[list[Experience], list[dict[str, float]]]:
    """One iteration as in step 3: this rank's rollout batches and the metrics of every update."""
    batch = trainer.rollouts.per_device_generation_batch_size
    share = rank_share(
        range(len(questions)), rank=collectives.rank(), world_size=collectives.world_size(), micro_batch_size=batch
    )
    shuffle = MinibatchShuffle(
        minibatch_size=minibatch_size, rank=collectives.rank(), world_size=collectives.world_size(), seed=5,
        group_size=trainer.ppo.num_samples_per_prompt,
    )  # fmt: skip
    dataset = MiniDataset(
        shuffle, generation_batches=len(share), ppo_epochs=ppo_epochs, whiten_advantages=trainer.ppo.whiten_advantages
    )
    parts, minibatches = [], None
    for own_rows in share:
        prompts = prompts_of(trainer, [questions[i] for i in own_rows])
        parts.append(trainer.generate_experience(prompts, sample_ids=own_rows))
        minibatches = dataset.add(parts[-1])
    measured_by_update = trainer.old_logprobs != "recompute"
    return parts, [
        trainer.train_rlhf(minibatch, measure_mismatch=measured_by_update and number == 0)
        for number, minibatch in enumerate(minibatches)
    ]
