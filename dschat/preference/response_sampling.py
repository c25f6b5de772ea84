"""Sample several responses per prompt, for make_preferences.py."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dschat.arguments import PairArguments
from dschat.data.chat_template import decode_responses, stop_token_ids
from dschat.generation import HybridEngine, Rollout, SamplingParams
from dschat.models.tokenizer import id_limit
from dschat.rewards.weighted_sum import ResponseBatch


class ResponseSampler:
    """Samples num_samples_per_prompt responses to each prompt, seeded by the prompt's index in the data, not its batch.

    Args:
        model: a causal LM on its device.
        settings: flags of sampling.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: PairArguments, *, seed: int
    ) -> None:
        self.engine, self.tokenizer, self.settings, self.seed = HybridEngine(model), tokenizer, settings, seed
        self.vocabulary_size = id_limit(tokenizer)
        self.stop_ids = stop_token_ids(tokenizer, model.generation_config.eos_token_id)

    def sample(self, batch: dict[str, list], indices: Sequence[int]) -> tuple[Rollout, ResponseBatch]:
        """Tokens and texts of the responses, grouped by prompt.

        Args:
            batch: made by collate_prompts.
            indices: index of each prompt in the data.
        """
        settings, samples = self.settings, self.settings.num_samples_per_prompt
        sample_ids = torch.tensor(indices)[:, None] * samples + torch.arange(samples)  # [prompts, samples]
        with self.engine.generation():
            rollout = self.engine.generate(
                repeated(batch["prompts"], samples), max_new_tokens=settings.max_answer_seq_len,
                eos_token_ids=self.stop_ids, pad_token_id=self.tokenizer.pad_token_id, seed=self.seed,
                sample_ids=sample_ids.flatten(),
                sampling=SamplingParams(
                    settings.temperature, settings.top_k, settings.top_p, vocabulary_size=self.vocabulary_size
                ),
            )  # fmt: skip
        token_ids = rollout.responses()
        response_batch = ResponseBatch(
            repeated(batch["messages"], samples), decode_responses(self.tokenizer, token_ids), token_ids,
            repeated(batch["rows"], samples), rollout.ended.tolist(), settings.max_answer_seq_len,
            repeated(batch.get("is_chat", []), samples),
        )  # fmt: skip
        return rollout, response_batch


def repeated(values: Sequence[Any], times: int) -> list[Any]:
    """Repeat each value `times` times."""
    return [value for value in values for _ in range(times)]
