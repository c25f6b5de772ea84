"""The rows being decoded: what the model has seen of them and where each stands."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat.generation.kv_cache import new_cache
from dschat.tensors import position_ids


def takes(model: PreTrainedModel, name: str) -> bool:
    """Whether the model's forward has an argument of this name."""
    return name in inspect.signature(model.forward).parameters


class LiveRows:
    """R sequences in flight, with the key-value cache of all of them.

    Attributes:
        cache: None where the model takes none; every forward then runs all columns again.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor, mask: Tensor, *, max_new_tokens: int) -> None:
        """Take left-padded prompts ids [R, P] long and mask [R, P] bool."""
        self.model = model
        self.takes_positions = takes(model, "position_ids")
        self.takes_logits_to_keep = takes(model, "logits_to_keep")
        columns = ids.shape[1] + max_new_tokens
        self.cache = new_cache(model.config, limit=columns) if takes(model, "past_key_values") else None
        self.width = ids.shape[1]  # columns the model has seen, or sees next
        # Long, not bool: custom model code often computes with the mask.
        self.mask = torch.cat([mask, mask.new_ones(len(ids), max_new_tokens)], dim=1).long()  # [R, P+T]
        self.positions = position_ids(mask)  # [R, columns of the next forward]
        self.ids = ids  # [R, columns of the next forward]

    def next_logits(self) -> Tensor:
        """Run the columns that are new to the model; return the logits after the last one, [R, V]."""
        inputs = {"input_ids": self.ids, "attention_mask": self.mask[:, : self.width], "return_dict": True}
        if self.takes_positions:
            inputs["position_ids"] = self.positions
        if self.takes_logits_to_keep:
            inputs["logits_to_keep"] = 1
        if self.cache is None:
            return self.model(**inputs, use_cache=False).logits[:, -1]
        return self.model(**inputs, past_key_values=self.cache, use_cache=True).logits[:, -1]

    def append(self, tokens: Tensor) -> None:
        """Give each row its next token [R]; the next forward runs it (all columns again where there is no cache)."""
        new_ids, new_positions = tokens.unsqueeze(1), self.positions[:, -1:] + 1  # [R, 1]
        if self.cache is None:
            new_ids = torch.cat([self.ids, new_ids], dim=1)
            new_positions = torch.cat([self.positions, new_positions], dim=1)
        self.ids, self.positions, self.width = new_ids, new_positions, self.width + 1

    def select(self, index: Tensor) -> None:
        """Keep the rows at index [R'] long, in that order; an index may repeat, which copies the row."""
        self.ids, self.positions, self.mask = self.ids[index], self.positions[index], self.mask[index]
        if self.cache is not None:
            self.cache.reorder_cache(index)
