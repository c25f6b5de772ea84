"""Fixtures of the step tests: tiny actor and reward model folders, small data files, and readers of outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_tokenizers import make_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
)

from dschat.data.chat_template import ensure_chat_template

GLOBAL_BATCH = 8  # sequences of an optimizer step of SFT, pairs of step 2, prompts of an iteration of PPO


def tiny_llama(architecture: type, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> Any:
    """2 layers of width 32; weights large enough that nothing is nearly uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        num_labels=1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return architecture(config)


def write_materials(folder: Path, other_tokenizer: PreTrainedTokenizerBase) -> None:
    """actor/, reward/ (same tokenizer), other_reward/ (another one), sft.jsonl, pairs.jsonl, prompts.jsonl."""
    tokenizer = make_tokenizer(eos="</s>", pad="<pad>")
    ensure_chat_template(tokenizer)
    actor = tiny_llama(LlamaForCausalLM, tokenizer, seed=0)
    with torch.no_grad():
        actor.lm_head.weight[tokenizer.eos_token_id] *= 4  # so that only some responses end early
    actor.save_pretrained(folder / "actor")
    tokenizer.save_pretrained(folder / "actor")
    for name, own in {"reward": tokenizer, "other_reward": other_tokenizer}.items():
        tiny_llama(LlamaForSequenceClassification, own, seed=1).save_pretrained(folder / name)
        own.save_pretrained(folder / name)
    questions = [f"What is {i} plus {i % 7}?" + " Please." * (i % 4) for i in range(60)]
    answers = ["It is " + "very " * (i % 5) + f"{i + i % 7}." for i in range(60)]
    write_rows(folder / "sft.jsonl", [{"prompt": q, "response": a} for q, a in zip(questions, answers, strict=True)])
    write_rows(folder / "prompts.jsonl", [{"prompt": question} for question in questions])
    pairs = [
        {"prompt": q, "chosen": a, "rejected": "No." + " 7" * (i % 3), "margin": 0.1 * (i % 2)}
        for i, (q, a) in enumerate(zip(questions, answers, strict=True))
    ]
    write_rows(folder / "pairs.jsonl", pairs)


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def flags(step: str, materials: Path, output: Path, *, processes: int = 1, zero: int = 2, accumulation: int = 1,
          **others: Any) -> list[str]:  # fmt: skip
    """The command line of a short run whose global batch does not depend on how it is split.

    Args:
        others: further flags, which override these; None removes a flag.
    """
    share = GLOBAL_BATCH // processes
    values: dict[str, Any] = {
        "output_dir": output,
        "dtype": "fp32",
        "gradient_accumulation_steps": accumulation,
        "data_output_path": materials / "arrow",  # encoded once for all runs
        "eval_fraction": 0.1,
    }
    if step == "ppo":
        values |= {
            "actor_model_name_or_path": materials / "actor",
            "reward_model_name_or_path": materials / "reward",
            "data_path": materials / "prompts.jsonl",
            "max_prompt_seq_len": 24,  # shorter than some prompts
            "max_answer_seq_len": 8,
            "per_device_generation_batch_size": share // 2,
            "generation_batches": 2,
            "per_device_training_batch_size": share // 2 // accumulation,
            "ppo_epochs": 2,
            "actor_learning_rate": 1e-3,
            "critic_learning_rate": 1e-3,
            "actor_zero_stage": zero,
            "critic_zero_stage": zero,
            "missing_eos_penalty": 0.5,
            "max_steps": 2,
        }
    else:
        values |= {
            "model_name_or_path": materials / ("reward" if step == "reward" else "actor"),
            "data_path": materials / ("sft.jsonl" if step == "sft" else "pairs.jsonl"),
            "max_seq_len": 64,
            "per_device_train_batch_size": share // accumulation,
            "per_device_eval_batch_size": 4 // processes,
            "learning_rate": 3e-3,
            "zero_stage": zero,
            "max_steps": 4,
        }
    return [
        word
        for name, value in (values | others).items()
        if value is not None
        for word in (f"--{name}", *map(str, value if isinstance(value, list) else [value]))
    ]


def metrics_of(output: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times, rates and memory."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    timings = ("time", "mfu", "memory_gib", "peak_memory_gib", "tokens_per_second", "update_tokens_per_second",
               "samples_per_second", "update_samples_per_second")  # fmt: skip
    return [
        {name: value for name, value in line.items() if name not in timings and not name.startswith("seconds_")}
        for line in lines
    ]


def weights_of(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model.safetensors")


def assert_loads_with_plain_transformers(step: str, output: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(output)
    auto_class = AutoModelForSequenceClassification if step == "reward" else AutoModelForCausalLM
    model, report = auto_class.from_pretrained(output, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    chat = [{"role": "user", "content": "What is 1 plus 1?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    assert tokenizer.decode(ids[0]).count("What is 1 plus 1?") == 1
    width = 1 if step == "reward" else len(tokenizer)
    assert model(ids).logits.shape[-1] == width
    if step != "reward":
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def assert_same_line(actual: dict, expected: dict, case: object) -> None:
    """Equal up to the rounding of float32 sums in another order."""
    assert actual.keys() == expected.keys(), case
    for name, value in expected.items():
        tolerance = 1e-4 if name == "rollout_logprob_mismatch_max" else 2e-6  # this metric is rounding error alone
        matching = pytest.approx(value, rel=1e-4, abs=tolerance) if not isinstance(value, str) else value
        same = actual[name] == matching
        assert same, f"{case}: {expected['phase']} {expected['step']}: {name} is {actual[name]} and not {value}"
