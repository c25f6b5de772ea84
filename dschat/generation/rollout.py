"""The result of generation: padded prompts and responses in one tensor, with masks built from lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Rollout:
    """Left-padded prompts followed by right-padded responses.

    Attributes:
        sequences: [B, P+T] long.
        attention_mask: [B, P+T] bool, True on prompt and response tokens.
        response_mask: [B, T] bool, True on response tokens, the EOS that ends a response included.
        logprobs: [B, T] float32, log-prob of each token under the sampling distribution (greedy: under the
            unmodified model distribution); 0 where response_mask is False.
        ended: [B] bool, True where the response ended with an EOS, False where it was truncated at max_new_tokens.
    """

    sequences: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    logprobs: Tensor
    ended: Tensor

    @property
    def prompt_length(self) -> int:
        """P, the number of prompt columns: the longest prompt of the call."""
        return self.sequences.shape[1] - self.response_mask.shape[1]

    @property
    def prompt_lengths(self) -> Tensor:
        """[B] long, tokens of each prompt."""
        return self.attention_mask[:, : self.prompt_length].sum(dim=1)

    def responses(self) -> list[list[int]]:
        """The response token ids of each row, EOS included, without padding."""
        lengths = self.response_mask.sum(dim=1).tolist()
        rows = self.sequences[:, self.prompt_length :].tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def left_pad(prompts: Sequence[Sequence[int]], *, pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Left-pad prompts of different lengths.

    Args:
        prompts: non-empty lists of ids.
        pad_token_id: padding id; it may equal any real token, since the mask is built from the lengths.
        device: of the returned tensors.

    Returns:
        ids: [B, P] long. mask: [B, P] bool, True on prompt tokens.

    Raises:
        ValueError: the list is empty, or a prompt is empty.
    """
    empty = [index for index, prompt in enumerate(prompts) if len(prompt) == 0]
    if not prompts or empty:
        problem = f"prompts {empty[:8]} are empty" if empty else "the list of prompts is empty"
        raise ValueError(
            f"{problem}, but generation needs at least one token: "
            "remove such prompts, or start each with the BOS token."
        )
    lengths = torch.tensor([len(prompt) for prompt in prompts])  # [B]
    longest = int(lengths.max())
    rows = [[pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    ids = torch.tensor(rows, dtype=torch.long)  # [B, P]
    mask = torch.arange(longest) >= (longest - lengths).unsqueeze(1)  # [B, P]
    return ids.to(device), mask.to(device)
