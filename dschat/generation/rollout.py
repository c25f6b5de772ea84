"""What a generation returns: prompts and responses in one rectangle, with masks built from lengths."""

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
        logprobs: [B, T] float32, log-prob of each token under the distribution that was sampled (greedy: under the
            model's own); 0 where response_mask is False.
        ended: [B] bool, True where the response ended by an EOS, False where max_new_tokens cut it.
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

    def responses(self) -> list[list[int]]:
        """The response of each row as ids, EOS included, padding left out."""
        lengths = self.response_mask.sum(dim=1).tolist()
        rows = self.sequences[:, self.prompt_length :].tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def left_pad(prompts: Sequence[Sequence[int]], *, pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-align prompts of mixed lengths.

    Args:
        prompts: non-empty lists of ids.
        pad_token_id: fills the left; it may equal any real token, since the mask comes from the lengths.
        device: where the result is put.

    Returns:
        ids: [B, P] long. mask: [B, P] bool, True on prompt tokens.

    Raises:
        ValueError: there is no prompt, or one of them is empty.
    """
    empty = [index for index, prompt in enumerate(prompts) if len(prompt) == 0]
    if not prompts or empty:
        what = f"prompts {empty[:8]} hold no token" if empty else "the list of prompts is empty"
        raise ValueError(
            f"{what}, but a model predicts from at least one token: "
            "leave such prompts out, or begin each with the BOS token."
        )
    lengths = torch.tensor([len(prompt) for prompt in prompts])  # [B]
    longest = int(lengths.max())
    rows = [[pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    ids = torch.tensor(rows, dtype=torch.long)  # [B, P]
    mask = torch.arange(longest) >= (longest - lengths).unsqueeze(1)  # [B, P]
    return ids.to(device), mask.to(device)
