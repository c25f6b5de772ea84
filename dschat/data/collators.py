"""Collators: rows → tensors of a micro-batch. Masks come from lengths, never from comparing ids with the pad id.

Pure torch. Masks are bool, True means "counts". An empty list of rows (a rank without work in this micro-batch) gives
one fully masked row of one token, so that the rank can run the same forward as the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

Features = Sequence[Mapping[str, Any]]


def collate_sft(features: Features, *, pad_token_id: int, pad_to_multiple_of: int = 8) -> dict[str, torch.Tensor]:
    """Right-padded conversations.

    Args:
        features: rows with `input_ids` and `loss_mask` (lists of equal length); packed ones with
            `conversation_lengths` too.
        pad_to_multiple_of: S is the longest row rounded up to this; 1 for no rounding.

    Returns:
        input_ids: [B, S] long; attention_mask: [B, S] bool; loss_mask: [B, S] bool, True on trained tokens. Of packed
        rows also packed_positions: [B, S] long, from 0 in each conversation, 0 on padding.
    """
    rows = [feature["input_ids"] for feature in features] or [[pad_token_id]]
    masks = [feature["loss_mask"] for feature in features] or [[False]]
    input_ids, attention_mask = _pad_right(rows, pad_token_id, pad_to_multiple_of)
    loss_mask = torch.zeros_like(attention_mask)
    for i, mask in enumerate(masks):
        loss_mask[i, : len(mask)] = torch.tensor(mask, dtype=torch.bool)
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "loss_mask": loss_mask}
    if features and "conversation_lengths" in features[0]:
        batch["packed_positions"] = torch.zeros_like(input_ids)
        for i, feature in enumerate(features):
            positions = [torch.arange(length) for length in feature["conversation_lengths"]]
            batch["packed_positions"][i, : len(feature["input_ids"])] = torch.cat(positions)
    return batch


def collate_preferences(
    features: Features, *, pad_token_id: int, pad_to_multiple_of: int = 8
) -> dict[str, torch.Tensor]:
    """Pairs for one forward: rows 0..B−1 are the chosen, rows B..2B−1 the rejected, in the same order.

    Args:
        features: rows with `chosen_ids`, `rejected_ids`, `prompt_length` (shared by both), optional `margin`.

    Returns:
        input_ids: [2B, S] long, right-padded; attention_mask: [2B, S] bool; loss_mask: [2B, S] bool, True on the
        response tokens (for DPO); prompt_lengths: [2B] long; margin: [B] float32, 0 where a row has none; ref_logprobs:
        [B, 2] float32, of chosen and rejected under the reference, 0 where a row has none; pair_mask: [B] bool, False
        only for the placeholder row of an empty list.
    """
    pairs = features or [{"chosen_ids": [pad_token_id], "rejected_ids": [pad_token_id], "prompt_length": 1}]
    rows = [pair["chosen_ids"] for pair in pairs] + [pair["rejected_ids"] for pair in pairs]
    input_ids, attention_mask = _pad_right(rows, pad_token_id, pad_to_multiple_of)  # [2B, S]
    prompt_length = torch.tensor([pair["prompt_length"] for pair in pairs] * 2)
    after_prompt = torch.arange(input_ids.shape[1]) >= prompt_length[:, None]  # [2B, S]
    margins = [pair.get("margin") for pair in pairs]
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "loss_mask": attention_mask & after_prompt,
        "prompt_lengths": prompt_length,
        "margin": torch.tensor([0.0 if margin is None else margin for margin in margins], dtype=torch.float32),
        "ref_logprobs": _ref_logprobs(pairs),
        "pair_mask": torch.full((len(pairs),), len(features) > 0),
    }


def collate_unpaired(features: Features, *, pad_token_id: int, pad_to_multiple_of: int = 8) -> dict[str, torch.Tensor]:
    """Unpaired responses, each with a mismatched response for the KL estimate of KTO.

    Args:
        features: rows with `input_ids`, `prompt_length`, `desirable`, and `mismatched_ids`: the same prompt with the
            response of another row.

    Returns:
        input_ids: [B, S] long, right-padded; attention_mask: [B, S] bool; loss_mask: [B, S] bool, True on the response;
        mismatched_ids, mismatched_attention_mask, mismatched_loss_mask: the same of the other response, [B, S'];
        desirable: [B] bool; ref_logprobs: [B, 2] float32, of both responses under the reference, 0 where a row has
        none; row_mask: [B] bool, False only for the placeholder row of an empty list.
    """
    empty = {"input_ids": [pad_token_id], "mismatched_ids": [pad_token_id], "prompt_length": 1, "desirable": False}
    rows = features or [empty]
    prompt_length = torch.tensor([row["prompt_length"] for row in rows])
    batch = {
        "desirable": torch.tensor([row["desirable"] for row in rows]),
        "ref_logprobs": _ref_logprobs(rows),
        "row_mask": torch.full((len(rows),), len(features) > 0),
    }
    for name, prefix in (("input_ids", ""), ("mismatched_ids", "mismatched_")):
        ids, attention_mask = _pad_right([row[name] for row in rows], pad_token_id, pad_to_multiple_of)
        after_prompt = torch.arange(ids.shape[1]) >= prompt_length[:, None]
        batch |= {name: ids, f"{prefix}attention_mask": attention_mask}
        batch[f"{prefix}loss_mask"] = attention_mask & after_prompt
    return batch


def collate_prompts(features: Features) -> dict[str, list]:
    """Prompts for generation, unpadded: the rollout engine pads them.

    Returns:
        prompts: lists of token ids; row_index: ints; messages: chat lists; is_chat: False where the row's prompt is a
        text; rows: dicts of the rows' other columns (inputs of reward functions, such as the true answer).
    """
    return {
        "prompts": [list(feature["input_ids"]) for feature in features],
        "row_index": [int(feature["row_index"]) for feature in features],
        "messages": [json.loads(feature["prompt_text"]) for feature in features],
        "is_chat": [bool(feature.get("is_chat")) for feature in features],
        "rows": [json.loads(feature["row"]) for feature in features],
    }


def _ref_logprobs(rows: Features) -> torch.Tensor:
    """[B, 2] float32; see dschat.preference.reference_logprobs."""
    return torch.tensor([row.get("ref_logprobs") or (0.0, 0.0) for row in rows], dtype=torch.float32)


def _pad_right(
    rows: Sequence[Sequence[int]], pad_token_id: int, pad_to_multiple_of: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of ids → input_ids [B, S] long, attention_mask [B, S] bool."""
    lengths = torch.tensor([len(row) for row in rows])
    width = -(-int(lengths.max()) // pad_to_multiple_of) * pad_to_multiple_of
    input_ids = torch.full((len(rows), width), pad_token_id, dtype=torch.long)  # [B, S]
    for i, row in enumerate(rows):
        input_ids[i, : len(row)] = torch.tensor(row, dtype=torch.long)
    return input_ids, torch.arange(width) < lengths[:, None]
