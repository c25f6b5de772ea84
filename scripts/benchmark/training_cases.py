"""Workloads of the training benchmark: sequence lengths, and the rows that every contender trains on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from shapes import DEVIATION, MEDIAN_SHARE, LengthKind, PromptKind

SUPERVISED, RL = ("sft", "rm", "dpo"), ("grpo", "ppo")
KINDS = (*SUPERVISED, *RL)
GROUP = 8  # responses per prompt of GRPO
FIRST_ID = 3  # ids below are padding, BOS and EOS
# Named lengths: PROMPT/RESPONSE, both in tokens.
NAMED = {"short": "16/uniform:16-64", "shared": f"512x{GROUP}/constant:64"}
DEFAULT_LENGTHS = {
    "sft": "short,lognormal:496", "rm": "short,lognormal:496", "dpo": "short,lognormal:496",
    "grpo": "constant:64,geometric:256,shared", "ppo": "constant:64,geometric:256",
}  # fmt: skip
DEFAULT_PROMPT = {"sft": "16", "rm": "16", "dpo": "16", "grpo": "32", "ppo": "32"}
MEAN_SHARE = 8  # the mean of geometric lengths is this part of the longest


@dataclass(frozen=True)
class Lengths:
    """Lengths of prompts and responses, as --lengths names them.

    Attributes:
        name: as given.
        prompt: lengths of prompts, and number of consecutive rows that share one.
        distribution: constant, uniform, lognormal or geometric.
        shortest, longest: bounds of a response.
    """

    name: str
    prompt: PromptKind
    distribution: str
    shortest: int
    longest: int

    @classmethod
    def parse(cls, name: str, kind: str) -> Lengths:
        """Parse "short", "shared" or "[PROMPT/]constant:N | uniform:LOW-HIGH | lognormal:MAX | geometric:MAX"."""
        prompt, _, response = NAMED.get(name, name).rpartition("/")
        distribution, _, bounds = response.partition(":")
        low, _, high = bounds.partition("-")
        if distribution not in ("constant", "uniform", "lognormal", "geometric") or not low.isdigit():
            raise ValueError(f"{name!r}: must be one of {', '.join(NAMED)}, or constant:N, lognormal:N, geometric:N")
        lengths = cls(name, PromptKind.parse(prompt or DEFAULT_PROMPT[kind]), distribution, int(low), int(high or low))
        if not 1 <= lengths.shortest <= lengths.longest:
            raise ValueError(f"{name!r}: a response has at least 1 token")
        return lengths

    def fits(self, kind: str) -> bool:
        """RL samples its responses: their lengths are constant, or geometric by the chance of EOS at each token."""
        return kind in SUPERVISED or self.distribution in ("constant", "geometric")

    @property
    def eos_probability(self) -> float:
        """Chance of EOS at each token, for RL."""
        return MEAN_SHARE / self.longest if self.distribution == "geometric" else 0.0

    @property
    def mean_tokens(self) -> float:
        """Tokens of a sequence, about."""
        share = 1 / MEAN_SHARE if self.distribution == "geometric" else MEDIAN_SHARE * math.exp(DEVIATION**2 / 2)
        if self.distribution in ("constant", "uniform"):
            share = (self.shortest + self.longest) / (2 * self.longest)
        return (self.prompt.shortest + self.prompt.longest) / 2 + share * self.longest

    def draw(self, count: int, rng: Random) -> list[int]:
        """Lengths of this many responses."""
        if self.distribution in ("constant", "lognormal"):
            return LengthKind(self.distribution, self.longest).draw(count, rng)
        if self.distribution == "uniform":
            return [rng.randint(self.shortest, self.longest) for _ in range(count)]
        means = [rng.expovariate(self.eos_probability) for _ in range(count)]
        return [min(1 + int(length), self.longest) for length in means]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a turn.

    Attributes:
        sequences: per optimizer step; a pair has two.
        micro_batch: sequences per forward pass.
        steps: optimizer steps per turn; in RL, rollouts with one step each.
    """

    sequences: int
    micro_batch: int
    steps: int

    def problems(self) -> list[str]:
        if min(self.sequences, self.micro_batch, self.steps) < 1 or self.sequences % self.micro_batch:
            return ["--sequences must be a multiple of --micro_batch, and --steps at least 1"]
        return [f"--micro_batch {self.micro_batch} must be even: a pair has two sequences"] * (self.micro_batch % 2)


def make_rows(kind: str, lengths: Lengths, sizes: Sizes, *, vocabulary: int, seed: int) -> list[dict]:
    """The rows of one turn, which depend on the arguments alone.

    Returns:
        sft: input_ids, prompt_length. rm, dpo: chosen_ids, rejected_ids, prompt_length. grpo, ppo: input_ids of
        prompts. All with `length`, the tokens of the row.
    """
    rng = Random(f"{seed} {kind} {lengths} {sizes}")

    def ids(count: int) -> list[int]:
        return [rng.randrange(FIRST_ID, vocabulary) for _ in range(count)]

    def prompts(count: int) -> list[list[int]]:
        result: list[list[int]] = []
        while len(result) < count:
            result += [ids(rng.randint(lengths.prompt.shortest, lengths.prompt.longest))] * rows_per_prompt
        return result[:count]

    sequences = sizes.sequences * sizes.steps
    rows_per_prompt = 1 if kind in RL else max(1, lengths.prompt.samples // sequences_per_row(kind))
    if kind in RL:
        group = samples_per_prompt(kind, lengths)
        return [{"input_ids": prompt, "length": len(prompt)} for prompt in prompts(sequences // group)]
    drawn = lengths.draw(sequences, rng)
    if kind == "sft":
        rows = [(prompt, prompt + ids(n)) for prompt, n in zip(prompts(sequences), drawn, strict=True)]
        return [{"input_ids": row, "prompt_length": len(prompt), "length": len(row)} for prompt, row in rows]
    pairs = [
        (len(prompt), prompt + ids(chosen), prompt + ids(rejected))
        for prompt, chosen, rejected in zip(prompts(sequences // 2), drawn[::2], drawn[1::2], strict=True)
    ]
    return [
        {
            "chosen_ids": chosen,
            "rejected_ids": rejected,
            "prompt_length": prompt,
            "length": max(len(chosen), len(rejected)),
        }
        for prompt, chosen, rejected in pairs
    ]


def sequences_per_row(kind: str) -> int:
    return 2 if kind in ("rm", "dpo") else 1


def samples_per_prompt(kind: str, lengths: Lengths) -> int:
    """Responses sampled for each prompt, in RL."""
    return GROUP if kind == "grpo" else lengths.prompt.samples


def sequence_lengths(rows: list[dict]) -> list[int]:
    """Tokens of every sequence of supervised rows."""
    names = ("input_ids", "chosen_ids", "rejected_ids")
    return [len(row[name]) for row in rows for name in names if name in row]


def prompt_tokens(kind: str, lengths: Lengths, rows: list[dict]) -> int:
    """Tokens of all prompts; a prompt counts for each of its sequences."""
    if kind in RL:
        return samples_per_prompt(kind, lengths) * sum(row["length"] for row in rows)
    return sequences_per_row(kind) * sum(row["prompt_length"] for row in rows)
