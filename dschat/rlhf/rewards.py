"""Where scores come from: a reward model, which may read with another tokenizer than the actor's, and judges."""

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.chat_template import decode_responses, encode_conversation
from dschat.data.collators import collate_sft
from dschat.data.encoding import cut_left
from dschat.generation import Rollout

Judge = Callable[[Sequence[str], Sequence[str], Sequence[dict]], Sequence[float]]


def same_text(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """True if both tokenizers turn every conversation into the same ids."""
    return (
        one.is_fast == other.is_fast
        and one.get_vocab() == other.get_vocab()
        and one.chat_template == other.chat_template
        and one.bos_token_id == other.bos_token_id
        and one.eos_token_id == other.eos_token_id
        and (not one.is_fast or one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str())
    )


class RewardModel:
    """Scores whole responses with a scalar-head model.

    Args:
        engine: of TokenScores.
        tokenizer: the reward model's own.
        actor_tokenizer: of the rollouts; where it differs, conversations are re-tokenised from their text.
            Those with more tokens than the reward model can read are cut from the left, a BOS stays.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine, *, tokenizer: PreTrainedTokenizerBase,
                 actor_tokenizer: PreTrainedTokenizerBase):  # fmt: skip
        self.engine, self.tokenizer, self.actor_tokenizer = engine, tokenizer, actor_tokenizer
        # Not vars(): GPT-2's config knows the name as an alias. RoBERTa's tokenizer knows that two are never used.
        positions = getattr(engine.module.model.config, "max_position_embeddings", None) or 2**31
        self.max_tokens = min(positions, tokenizer.model_max_length)
        self.reads_actor_ids = same_text(tokenizer, actor_tokenizer)

    @torch.no_grad()
    def score(self, rollout: Rollout, messages: Sequence[list[dict[str, str]]]) -> Tensor:
        """[B] float32: the score at the last token of each conversation.

        Args:
            rollout: of the actor, B rows.
            messages: the prompts as chat messages, for a reward model with its own tokenizer.
        """
        if self.reads_actor_ids:
            input_ids, attention_mask = rollout.sequences, rollout.attention_mask
        else:
            rows = self._retokenised(rollout, messages)
            batch = collate_sft(rows, pad_token_id=self.tokenizer.pad_token_id, pad_to_multiple_of=1)
            input_ids, attention_mask = (batch[name].to(self.engine.device) for name in ("input_ids", "attention_mask"))
        return self.engine(input_ids, attention_mask, whole_sequence=True)

    def _retokenised(self, rollout: Rollout, messages: Sequence[list[dict[str, str]]]) -> list[dict[str, list]]:
        texts = decode_responses(self.actor_tokenizer, rollout.responses())
        rows = []
        for prompt, text, ended in zip(messages, texts, rollout.ended.tolist(), strict=True):
            ids, _ = encode_conversation(self.tokenizer, [*prompt, {"role": "assistant", "content": text}])
            if not ended:  # the template closed a response that the actor did not
                ids = ids[:-1]
            ids = cut_left(ids, self.max_tokens, bos_token_id=self.tokenizer.bos_token_id)
            rows.append({"input_ids": ids, "loss_mask": [False] * len(ids)})
        return rows


def load_judge(source: str) -> Judge:
    """The function behind "FILE.py:FUNCTION".

    It is called as judge(prompts, responses, rows) with equally long lists (texts, texts, dicts of the prompt rows'
    other columns) and returns one number for each response.

    Raises: ValueError if the file or the function is not there.
    """
    path, _, name = source.partition(":")
    spec = importlib.util.spec_from_file_location(f"judge_{Path(path).stem}", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ValueError(f"{source}: there is no Python file {path}; write FILE.py:FUNCTION")
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    spec.loader.exec_module(module)
    function = vars(module).get(name)
    if not callable(function):
        raise ValueError(f"{source}: {path} has no function {name or '(none named)'}; write FILE.py:FUNCTION")
    return function


def judged(
    judge: Judge, messages: Sequence[list[dict[str, str]]], responses: Sequence[str], rows: Sequence[dict]
) -> list[float]:
    """What a judge says of responses. A prompt is shown to it as the text of its messages, a line each.

    Raises: ValueError if it does not return one finite number for each response.
    """
    scores = [float(score) for score in judge([prompt_text(chat) for chat in messages], list(responses), list(rows))]
    if len(scores) != len(responses):
        raise ValueError(
            f"the judge returned {len(scores)} numbers for {len(responses)} responses: it must return one for each"
        )
    bad = [(response, score) for response, score in zip(responses, scores, strict=True) if not math.isfinite(score)]
    if bad:
        raise ValueError(f"the judge gave the response {bad[0][0]!r} the score {bad[0][1]}: scores must be finite")
    return scores


def prompt_text(messages: Sequence[dict[str, str]]) -> str:
    return "\n".join(message["content"] for message in messages)
