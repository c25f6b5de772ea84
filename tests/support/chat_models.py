"""A model whose answers do not end, for tests that stop them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ENDLESS_TOKENS = 65536  # minutes of generation


def write_endless_model(folder: Path, source: Path) -> None:
    """A copy of a small model with an untied head that, decoded greedily, generates no EOS, within 2^20 positions."""
    model = AutoModelForCausalLM.from_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model.config.max_position_embeddings = 1 << 20
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] = 0  # the largest of the other logits is positive
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
