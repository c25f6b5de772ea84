"""A model to chat with: loaded for generation, with its tokenizer and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from conversation import Conversation
from deepspeed.accelerator import get_accelerator
from streamed_text import Answer
from transformers import PreTrainedTokenizerBase

from dschat.data.chat_template import stop_token_ids
from dschat.generation import HybridEngine, SamplingParams
from dschat.models.causal_lm import load_causal_lm, load_tokenizer
from dschat.models.positions import position_limit
from dschat.models.tokenizer import id_limit
from dschat.runs.validation import model_problems

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """How answers are sampled; see SamplingParams. `max_new_tokens` is the longest answer, in tokens."""

    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    max_new_tokens: int = 256
    seed: int = 0
    system: str | None = None
    parse_special_tokens: bool = False


@dataclass(frozen=True)
class ChatModel:
    """A model with what its answers need.

    Attributes:
        name: the folder or hub name that the user gave.
        stops: ids that end an answer.
        positions: maximum tokens of prompt and answer; None: no limit.
    """

    name: str
    engine: HybridEngine
    tokenizer: PreTrainedTokenizerBase
    stops: list[int]
    positions: int | None
    parameters: int

    def conversation(self, settings: ChatSettings) -> Conversation:
        """An empty conversation within the positions of this model."""
        return Conversation(
            self.tokenizer, system=settings.system, positions=self.positions, max_new_tokens=settings.max_new_tokens,
            parse_special_tokens=settings.parse_special_tokens,
        )  # fmt: skip

    def answer(
        self, ids: Sequence[int], settings: ChatSettings, *, max_new_tokens: int, iteration: int, sample_id: int = 0
    ) -> Answer:
        """The answer to a prompt, generated as it is iterated, inside engine.generation().

        Args:
            ids: of the prompt.
            iteration, sample_id: with the seed they decide the random numbers, see generation.request.

        Raises:
            ValueError: sampling settings out of range; or with the first token, see HybridEngine.stream.
        """
        sampling = SamplingParams(
            settings.temperature, settings.top_k, settings.top_p, vocabulary_size=id_limit(self.tokenizer)
        )
        tokens = self.engine.stream(
            ids, sample_id=sample_id, max_new_tokens=max_new_tokens, eos_token_ids=self.stops, sampling=sampling,
            seed=settings.seed, iteration=iteration,
        )  # fmt: skip
        return Answer(tokens, self.tokenizer, stops=self.stops)


def load_chat_models(paths: Sequence[str], *, dtype: str | None, trust_remote_code: bool) -> list[ChatModel]:
    """Load the models, in order.

    Args:
        dtype: a key of DTYPES; None: bf16 on an accelerator, fp32 on a CPU.

    Raises: ValueError with the problems of all paths, before any weights are loaded.
    """
    checks = [
        model_problems("MODEL", path, tokens=0, lengths="", trust_remote_code=trust_remote_code, causal=True)
        for path in dict.fromkeys(paths)
    ]
    if mistakes := [mistake for mistakes in checks for mistake in mistakes]:
        raise ValueError("\n".join(mistakes))
    return [_load(path, dtype=dtype, trust_remote_code=trust_remote_code) for path in paths]


def _load(path: str, *, dtype: str | None, trust_remote_code: bool) -> ChatModel:
    device = get_accelerator().device_name()
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    model = load_causal_lm(
        path, dtype=DTYPES[dtype or ("fp32" if device == "cpu" else "bf16")], tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
    ).to(device).eval()  # fmt: skip
    positions, _ = position_limit(model.config)
    stops = stop_token_ids(tokenizer, model.generation_config.eos_token_id)
    return ChatModel(path, HybridEngine(model), tokenizer, stops, positions, model.num_parameters())
