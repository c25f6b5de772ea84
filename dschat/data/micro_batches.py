"""Micro-batches of a step: cut by a token budget, equally many on all ranks, and forward passes over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dschat.data.token_budget import (
    Prompts,
    balance_over_ranks,
    fewest,
    rows_as_units,
    split_padded,
    split_units,
)
from dschat.distributed.collectives import max_over_ranks
from dschat.models.backbone import TokenNetwork
from dschat.models.packed.rows import prompt_lengths_of, shared_prompts

# Least tokens of a pass without gradients: with fewer, launching operations costs more than their arithmetic.
FORWARD_TOKENS = 8192


@dataclass(frozen=True)
class StepRows:
    """The rows that one rank cuts into micro-batches.

    Attributes:
        lengths: tokens of each row.
        prompts: groups of rows that share a prompt, which counts once.
    """

    lengths: Sequence[int]
    prompts: Prompts = ()


@dataclass(frozen=True, kw_only=True)
class MicroBatchLimit:
    """How many tokens one forward pass reads.

    Attributes:
        rows: rows per device; without max_tokens the budget of a step is rows × its longest row.
        max_tokens: the budget; 0: as above, and at least FORWARD_TOKENS without gradients.
        share_prompts: a prompt counts once for all rows that start with it.
        padded: rows are padded to the longest of their micro-batch, and padding counts.
        quadratic: cost of attention, see dschat.data.token_budget.
    """

    rows: int
    max_tokens: int = 0
    share_prompts: bool = False
    padded: bool = False
    quadratic: float = 0.0

    def budget(self, longest: int, *, gradients: bool = True) -> int:
        """Tokens per micro-batch, for a step whose longest row has `longest`.

        Without gradients no layer's activations are kept, so the default is at least FORWARD_TOKENS.
        """
        return self.max_tokens or max(self.rows * longest, 0 if gradients else FORWARD_TOKENS)

    def step_rows(self, input_ids: Tensor, attention_mask: Tensor, prompt_lengths: Tensor) -> StepRows:
        """Lengths and shared prompts of a step's rows, for `split`; arguments as in packed_rows.shared_prompts."""
        prompts = shared_prompts(input_ids, attention_mask, prompt_lengths) if self.share_prompts else []
        return StepRows(attention_mask.sum(dim=1).tolist(), prompts)

    def fewest(self, rows: StepRows, *, budget: int) -> int:
        """Number of micro-batches that these rows need."""
        if self.padded:
            return len(split_padded(rows.lengths, budget))
        return fewest(rows_as_units(rows.lengths, prompts=rows.prompts, budget=budget), budget)

    def split(self, rows: StepRows, *, budget: int, count: int | None = None) -> list[list[int]]:
        """Row indices of each micro-batch.

        Args:
            count: number of micro-batches, the last ones possibly empty; None: as few as possible.
        """
        if self.padded:
            return split_padded(rows.lengths, budget, count=count)
        units = rows_as_units(rows.lengths, prompts=rows.prompts, budget=budget)
        return split_units(units, budget, count=count, quadratic=self.quadratic)

    def rank_share(self, lengths: Sequence[int], *, rank: int, world_size: int) -> list[list[int]]:
        """One rank's micro-batches of a step whose rows all ranks know; every rank has the same number.

        Args:
            lengths: tokens of the step's rows, of all ranks together.

        Returns: indices into `lengths`; empty lists where a rank has fewer micro-batches than another.
        """
        budget = self.budget(max(lengths))
        shares = balance_over_ranks(lengths, world_size, quadratic=self.quadratic)
        steps = [StepRows([lengths[row] for row in share]) for share in shares]
        count = max(self.fewest(step, budget=budget) for step in steps)
        return [[shares[rank][i] for i in part] for part in self.split(steps[rank], budget=budget, count=count)]


def limit_of(network: TokenNetwork, *, rows: int, max_tokens: int) -> MicroBatchLimit:
    """The limit for a network, which knows whether it needs padding."""
    hidden_size = getattr(network.model.config.get_text_config(), "hidden_size", None)
    return MicroBatchLimit(
        rows=rows, max_tokens=max_tokens, share_prompts=network.backbone.packing.share_prompts,
        padded=not network.backbone.packing.remove_padding,
        # Per token and layer, attention over the L tokens before it costs 2·H·L, the matrix products about 24·H².
        quadratic=1 / (12 * hidden_size) if isinstance(hidden_size, int) else 0.0,
    )  # fmt: skip


@torch.no_grad()
def forward_in_micro_batches(
    engine: nn.Module, rows: Mapping[str, Tensor], *, limit: MicroBatchLimit, **settings: Any
) -> Tensor | tuple[Tensor, ...]:
    """engine(**rows, **settings) in micro-batches, without gradients; the result does not depend on the split.

    Under ZeRO-3 a collective: every rank runs as many forward passes as the rank with the most. A rank that has none
    left repeats its first row and discards the result.

    Args:
        engine: returns a tensor [B, …], or a tuple of such tensors.
        rows: arguments [B, …] with B ≥ 1, split along the first dimension: input_ids, attention_mask, and others. Equal
            prompts count once if they are given by a loss_mask [B, S] or by prompt_lengths [B].
        settings: further arguments of every forward pass.
    """
    step = limit.step_rows(rows["input_ids"], rows["attention_mask"], prompt_lengths_in(rows))
    parts = limit.split(step, budget=limit.budget(max(step.lengths), gradients=False))
    # First, so that all ranks run their collectives in the same order.
    repeated = _forwards_of_other_ranks(engine, len(parts))
    outputs = [engine(**{name: tensor[part] for name, tensor in rows.items()}, **settings) for part in parts]
    for _ in range(repeated):
        engine(**{name: tensor[:1] for name, tensor in rows.items()}, **settings)
    order = torch.tensor([row for part in parts for row in part], device=rows["input_ids"].device)
    if isinstance(outputs[0], tuple):
        return tuple(_in_order(column, order) for column in zip(*outputs, strict=True))
    return _in_order(outputs, order)


def prompt_lengths_in(rows: Mapping[str, Tensor]) -> Tensor:
    """[B] long, 0 where nothing is known of prompts."""
    if "loss_mask" in rows:
        return prompt_lengths_of(rows["loss_mask"], rows["attention_mask"])
    # TokenScores takes them as an argument, TokenLogprobs derives them.
    return rows.get("prompt_lengths", torch.zeros(len(rows["input_ids"]), dtype=torch.long))


def _in_order(parts: Sequence[Tensor], order: Tensor) -> Tensor:
    """The parts concatenated, row i at place order[i]."""
    joined = torch.cat(list(parts))
    return torch.empty_like(joined).index_copy_(0, order, joined)


def _forwards_of_other_ranks(engine: nn.Module, own_passes: int) -> int:
    """Number of forward passes that this rank has fewer than the rank with the most; 0 without ZeRO-3."""
    parameters = list(engine.parameters())
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):  # set by ZeRO-3
        return 0
    return int(max_over_ranks(torch.tensor(own_passes, device=parameters[0].device))) - own_passes
