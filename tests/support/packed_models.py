"""Models that can be run without padding and models that cannot, and rows of conversations to pack."""

from __future__ import annotations

import logging

import numpy as np
import torch
import transformers as hf
from tiny_models import CONFIGS, HIDDEN, VOCABULARY, tiny_causal_lm

from dschat.models.backbone import Packing
from dschat.models.causal_lm import TokenLogprobs
from dschat.models.packed.trial import enable_packing

FULL, PADDED = Packing(remove_padding=True, share_prompts=True), Packing()
MODELS = {
    **CONFIGS,
    "mistral with a window": lambda: hf.MistralConfig(**vars(CONFIGS["mistral"]()) | {"sliding_window": 4}),
    "falcon with ALiBi": lambda: hf.FalconConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, initializer_range=0.5, num_hidden_layers=2, num_attention_heads=2,
        alibi=True,
    ),
    "mpt": lambda: hf.MptConfig(vocab_size=VOCABULARY, d_model=HIDDEN, n_layers=2, n_heads=2, initializer_range=0.5),
    "mamba": lambda: hf.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, initializer_range=0.5, num_hidden_layers=2
    ),
}  # fmt: skip


def network_of(name: str) -> TokenLogprobs:
    if name in CONFIGS:
        return TokenLogprobs(tiny_causal_lm(name))
    torch.manual_seed(0)
    return TokenLogprobs(hf.AutoModelForCausalLM.from_config(MODELS[name]()))


def enabled(network, caplog, *, remove_padding: bool = True, share_prompts: bool = True) -> list[str]:
    """Warnings of enable_packing."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="dschat"):
        enable_packing(network, remove_padding=remove_padding, share_prompts=share_prompts)
    return [record.getMessage() for record in caplog.records if record.name.startswith("dschat")]


def conversations(count=7, seed=0):
    """Rows of 2 to 14 tokens, every second or third token trained, never the first."""
    generator = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        ids = generator.integers(VOCABULARY, size=generator.integers(2, 15)).tolist()
        mask = [False, *(j % (2 + i % 2) == 0 for j in range(1, len(ids)))]
        mask[-1] = True
        rows.append({"input_ids": ids, "loss_mask": mask, "length": len(ids)})
    return rows
