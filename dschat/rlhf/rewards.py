"""Where scores come from: a reward model, which may read with another tokenizer than the actor's."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.chat_template import encode_conversation
from dschat.data.collators import collate_sft
from dschat.generation import Rollout

Judge = Callable[[Sequence[str], Sequence[str], Sequence[dict]], Sequence[float]]


def same_text(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """True if both tokenizers turn every conversation into the same ids."""
    return (
        one.get_vocab() == other.get_vocab()
        and one.chat_template == other.chat_template
        and one.eos_token_id == other.eos_token_id
        and one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
    )


class RewardModel:
    """Scores whole responses with a scalar-head model.

    Args:
        engine: of TokenScores.
        tokenizer: the reward model's own.
        actor_tokenizer: of the rollouts; where it differs, conversations are re-tokenised from their text.
            Those with more tokens than the reward model has positions are cut from the left.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine, *, tokenizer: PreTrainedTokenizerBase,
                 actor_tokenizer: PreTrainedTokenizerBase):  # fmt: skip
        self.engine, self.tokenizer, self.actor_tokenizer = engine, tokenizer, actor_tokenizer
        self.max_tokens = vars(engine.module.model.config).get("max_position_embeddings") or 2**31
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
            batch = collate_sft(self._retokenised(rollout, messages), pad_token_id=self.tokenizer.pad_token_id)
            input_ids, attention_mask = (batch[name].to(self.engine.device) for name in ("input_ids", "attention_mask"))
        return self.engine.module.sequence_scores(input_ids, attention_mask)

    def _retokenised(self, rollout: Rollout, messages: Sequence[list[dict[str, str]]]) -> list[dict[str, list]]:
        texts = self.actor_tokenizer.batch_decode(rollout.responses(), skip_special_tokens=True)
        rows = []
        for prompt, text, ended in zip(messages, texts, rollout.ended.tolist(), strict=True):
            ids, mask = encode_conversation(self.tokenizer, [*prompt, {"role": "assistant", "content": text}])
            if not ended:  # the template closed a response that the actor did not
                ids, mask = ids[:-1], mask[:-1]
            rows.append({"input_ids": ids[-self.max_tokens :], "loss_mask": mask[-self.max_tokens :]})
        return rows


def load_judge(source: str) -> Judge:
    """The function behind "FILE.py:FUNCTION".

    It is called as judge(prompts, responses, rows) with equally long lists (texts, texts, dicts of the prompt rows'
    other columns) and returns one number for each response.

    Raises: ValueError if the file or the function is not there.
    """
    path, _, name = source.partition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ValueError(f"{source}: there is no Python file {path}; write FILE.py:FUNCTION")
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = vars(module).get(name)
    if not callable(function):
        raise ValueError(f"{source}: {path} has no function {name or '(none named)'}; write FILE.py:FUNCTION")
    return function
