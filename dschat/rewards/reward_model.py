"""Scores rollouts with a reward model, whose tokenizer may differ from the actor's."""

from __future__ import annotations

from collections.abc import Sequence

import deepspeed
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from dschat.data.chat_template import Message, decode_responses, encode_answer
from dschat.data.collators import collate_sft
from dschat.data.encoding import cut_left
from dschat.data.micro_batches import MicroBatchLimit, forward_in_micro_batches
from dschat.generation import Rollout
from dschat.models.positions import position_limit
from dschat.models.tokenizer import load_tokenizer


def same_tokenization(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    """True if both tokenizers encode every conversation to the same ids."""
    return (
        first.is_fast == second.is_fast
        and first.get_vocab() == second.get_vocab()
        and first.chat_template == second.chat_template
        and first.bos_token_id == second.bos_token_id
        and first.eos_token_id == second.eos_token_id
        and (not first.is_fast or first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str())
    )


def required_positions(
    path: str, actor_path: str, *, tokens: int, add_eot_token: bool = False, trust_remote_code: bool = False
) -> int:
    """Number of tokens that a reward model must have positions for.

    `tokens`, prompt and response, if it reads the actor's ids. With a different tokenizer longer conversations are
    truncated, so two are enough.
    """
    actor = load_tokenizer(actor_path, add_eot_token=add_eot_token, trust_remote_code=trust_remote_code)
    return tokens if same_tokenization(load_tokenizer(path, trust_remote_code=trust_remote_code), actor) else 2


class RewardModel:
    """Scores whole responses with a scalar-head model.

    Args:
        engine: DeepSpeedEngine of TokenScores.
        tokenizer: the reward model's own.
        actor_tokenizer: tokenizer of the rollouts; if it differs, conversations are re-tokenised from their text.
            Those longer than the reward model's maximum are truncated on the left, keeping a BOS.
        limit: tokens per forward pass.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine, *, tokenizer: PreTrainedTokenizerBase,
                 actor_tokenizer: PreTrainedTokenizerBase, limit: MicroBatchLimit):  # fmt: skip
        self.engine, self.tokenizer, self.actor_tokenizer = engine, tokenizer, actor_tokenizer
        self.limit = limit
        self.max_tokens = longest_sequence(engine.module.model.config, tokenizer)
        self.reads_actor_ids = same_tokenization(tokenizer, actor_tokenizer)

    @torch.no_grad()
    def score(self, rollout: Rollout, messages: Sequence[list[Message]]) -> Tensor:
        """[B] float32: the score at the last token of each conversation. A collective under ZeRO-3.

        Args:
            rollout: B rows sampled from the actor.
            messages: the prompts as chat messages, used by a reward model with its own tokenizer.
        """
        if self.reads_actor_ids:
            inputs = {
                "input_ids": rollout.sequences,
                "attention_mask": rollout.attention_mask,
                "prompt_lengths": rollout.prompt_lengths,
            }
        else:
            rows = self._retokenised(rollout, messages)
            batch = collate_sft(rows, pad_token_id=self.tokenizer.pad_token_id, pad_to_multiple_of=1)
            inputs = {name: batch[name].to(self.engine.device) for name in ("input_ids", "attention_mask")}
        return forward_in_micro_batches(self.engine, inputs, whole_sequence=True, limit=self.limit)

    def _retokenised(self, rollout: Rollout, messages: Sequence[list[Message]]) -> list[dict[str, list]]:
        texts = decode_responses(self.actor_tokenizer, rollout.responses())
        rows = []
        for prompt, text, ended in zip(messages, texts, rollout.ended.tolist(), strict=True):
            ids = conversation_ids(self.tokenizer, prompt, text, ended=ended, max_tokens=self.max_tokens)
            rows.append({"input_ids": ids, "loss_mask": [False] * len(ids)})
        return rows


def longest_sequence(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Maximum number of tokens that a reward model supports."""
    # RoBERTa never uses two of its positions; its tokenizer's limit accounts for that.
    return min(position_limit(config)[0] or 2**31, tokenizer.model_max_length)


def conversation_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[Message], response: str, *, ended: bool, max_tokens: int
) -> list[int]:
    """Encode prompt and response with the reward model's chat template, truncated on the left if too long.

    Both are encoded as plain text, even where they contain the text of control tokens.

    Args:
        ended: False if the response was truncated; the token that closes its turn is then omitted.

    Raises: ValueError if the chat template rejects the messages.
    """
    prompt_ids, response_ids = encode_answer(tokenizer, prompt, response)
    ids = prompt_ids + response_ids
    return cut_left(ids if ended else ids[:-1], max_tokens, bos_token_id=tokenizer.bos_token_id)
