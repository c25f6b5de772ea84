"""Build preference pairs from scored responses to the same prompt."""

from collections.abc import Sequence
from itertools import combinations
from random import Random
from typing import Any

from dschat.data.chat_template import Message


def pairs_of_batch(
    prompts: Sequence[list[Message]], responses: Sequence[str], scores: Sequence[float | None], *,
    ended: Sequence[bool], indices: Sequence[int], max_pairs: int, seed: int,
) -> list[tuple[int, dict[str, Any]]]:  # fmt: skip
    """(index of the prompt, row of the preference file) for every pair built from the responses to a batch of prompts.

    Args:
        responses, scores, ended: equally many per prompt, grouped by prompt; responses without a score are not paired.
        indices: index of each prompt in the data; with the seed it decides which pairs are drawn.
        max_pairs: per prompt.
    """
    samples, pairs = len(responses) // len(prompts), []
    for number, (index, prompt) in enumerate(zip(indices, prompts, strict=True)):
        scored = [row for row in range(number * samples, (number + 1) * samples) if scores[row] is not None]
        pairs_of_prompt = preference_pairs(
            [responses[row] for row in scored], [scores[row] for row in scored], ended=[ended[row] for row in scored],
            max_pairs=max_pairs, generator=Random(f"{seed}/{index}"),
        )  # fmt: skip
        pairs += [(index, {"prompt": prompt, **pair}) for pair in pairs_of_prompt]
    return pairs


def preference_pairs(
    responses: Sequence[str], scores: Sequence[float], *, ended: Sequence[bool], max_pairs: int, generator: Random
) -> list[dict[str, Any]]:
    """Random pairs of non-empty responses whose scores and texts differ.

    Args:
        ended: False for a response truncated at the length limit: step 2 then appends no end token.
    """
    non_empty = [row for row, response in enumerate(responses) if response.strip()]
    candidates = [
        (better, worse) if scores[better] > scores[worse] else (worse, better)
        for better, worse in combinations(non_empty, 2)
        if scores[better] != scores[worse] and responses[better].strip() != responses[worse].strip()
    ]
    return [
        {"chosen": responses[better], "rejected": responses[worse],
         "chosen_score": float(scores[better]), "rejected_score": float(scores[worse]),
         "chosen_ended": ended[better], "rejected_ended": ended[worse]}
        for better, worse in generator.sample(candidates, min(max_pairs, len(candidates)))
    ]  # fmt: skip
