"""Embedding rows: one for each id of the tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dschat.models.weights import full_shape

logger = logging.getLogger(__name__)


def grow_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add embedding rows for new tokens; models with spare rows keep them.

    transformers initialises new rows around the mean of the old ones. They are drawn from torch's initial seed, equal
    on all ranks, because ZeRO-3 keeps each rank's partition of its own copy.
    """
    rows = full_shape(model.get_input_embeddings().weight)[0]
    needed = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
    if needed <= rows:
        return
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(torch.initial_seed())
        model.resize_token_embeddings(needed)
    logger.info("%d embedding rows added for new tokens: %d in all", needed - rows, needed)


def require_embedding_rows(
    model: PreTrainedModel, tables: list[torch.nn.Module], tokenizer: PreTrainedTokenizerBase, path: str | Path
) -> None:
    """Raise if the tokenizer has ids beyond the embedding rows, which would be a device error or go unnoticed."""
    largest = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1) - 1
    for table in tables:
        weight = getattr(table, "weight", None)
        if weight is not None and largest >= full_shape(weight)[0]:
            raise ValueError(
                f"{path}: the tokenizer has ids up to {largest}, but the {type(table).__name__} of a "
                f"{type(model).__name__} has {full_shape(weight)[0]} rows and does not grow: "
                "use the tokenizer that the model was trained with."
            )
