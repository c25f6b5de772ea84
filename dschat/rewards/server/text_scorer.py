"""Scores conversations given as text, as the reward server receives them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.collators import collate_sft
from dschat.models.scalar_head import TokenScores
from dschat.rewards.reward_model import conversation_ids
from dschat.rewards.server.score_request import ScoreRequest


class TextScorer:
    """Tokenises and scores conversations as RewardModel does.

    Args:
        model: network of a saved classifier, on its device.
        max_tokens: longer conversations are truncated on the left.
    """

    def __init__(self, model: TokenScores, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int) -> None:
        self.model, self.tokenizer, self.max_tokens = model.eval(), tokenizer, max_tokens
        self.device = next(model.parameters()).device

    def encode(self, request: ScoreRequest) -> list[Tensor]:
        """Token ids of each conversation, as int32: a fifth of a list's memory while queued.

        Raises: ValueError if the chat template rejects the messages.
        """
        return [
            torch.tensor(
                conversation_ids(self.tokenizer, chat, response, ended=ended, max_tokens=self.max_tokens),
                dtype=torch.int32,
            )
            for chat, response, ended in zip(request.messages, request.responses, request.ended, strict=True)
        ]

    @torch.inference_mode()
    def score(self, rows: Sequence[Tensor]) -> list[float]:
        """The score of each row of ids."""
        features = [{"input_ids": ids.tolist(), "loss_mask": [False] * len(ids)} for ids in rows]
        batch = collate_sft(features, pad_token_id=self.tokenizer.pad_token_id, pad_to_multiple_of=1)
        ids, attention_mask = (batch[name].to(self.device) for name in ("input_ids", "attention_mask"))
        return self.model(ids, attention_mask, whole_sequence=True).tolist()
