"""Benchmark workloads: models of common shapes with random weights, prompts, and response lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from statistics import NormalDist

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Log-normal lengths: their median is this share of the longest, and their logarithms have this deviation. Of a hundred
# responses two reach the longest, half are shorter than a fifth of it, and all together are a quarter of the rectangle.
MEDIAN_SHARE, DEVIATION = 0.2, 0.8


def _llama(vocabulary: int, width: int, layers: int, heads: int, **more: object) -> LlamaConfig:
    theta = more.pop("rope_theta", 10_000.0)
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        rope_parameters={"rope_type": "default", "rope_theta": theta}, **more,
    )  # fmt: skip


def _qwen2(width: int, inner: int, layers: int, heads: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=151_936, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )  # fmt: skip


SHAPES: dict[str, Callable[[], PreTrainedConfig]] = {
    "tiny": lambda: _llama(1024, 256, 6, 4, intermediate_size=640, max_position_embeddings=2048),
    "smollm2": lambda: _llama(
        49_152, 576, 30, 9, intermediate_size=1536, num_key_value_heads=3, tie_word_embeddings=True,
        max_position_embeddings=8192, rope_theta=100_000.0,
    ),
    "qwen2.5-0.5b": lambda: _qwen2(896, 4864, 24, 14),
    "qwen2.5-1.5b": lambda: _qwen2(1536, 8960, 28, 12),
    "opt-1.3b": lambda: OPTConfig(
        vocab_size=50_272, hidden_size=2048, ffn_dim=8192, num_hidden_layers=24, num_attention_heads=32,
        word_embed_proj_dim=2048, max_position_embeddings=2048,
    ),
    "llama-3-8b": lambda: _llama(
        128_256, 4096, 32, 32, intermediate_size=14_336, num_key_value_heads=8, max_position_embeddings=8192,
        rope_theta=500_000.0,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class PromptKind:
    """Prompt lengths and responses per prompt: "16-32", "512", "512x8"."""

    shortest: int
    longest: int
    samples: int

    @classmethod
    def parse(cls, text: str) -> PromptKind:
        lengths, _, samples = text.partition("x")
        shortest, _, longest = lengths.partition("-")
        kind = cls(int(shortest), int(longest or shortest), int(samples or 1))
        if not 1 <= kind.shortest <= kind.longest or kind.samples < 1:
            raise ValueError(f"{text!r}: must be LOW-HIGH or N, from 1 up, with at least 1 response per prompt")
        return kind

    def __str__(self) -> str:
        lengths = f"{self.shortest}" if self.shortest == self.longest else f"{self.shortest}-{self.longest}"
        return lengths + (f"x{self.samples}" if self.samples > 1 else "")


@dataclass(frozen=True)
class LengthKind:
    """Response lengths: "constant:64", all 64 tokens; "lognormal:128", mostly short, few of 128."""

    name: str
    longest: int

    @classmethod
    def parse(cls, text: str, default: int) -> LengthKind:
        name, _, longest = text.partition(":")
        kind = cls(name, int(longest or default))
        if name not in ("constant", "lognormal") or kind.longest < 1:
            raise ValueError(f"{text!r}: must be constant or lognormal, with a maximum of at least 1 token")
        return kind

    def __str__(self) -> str:
        return f"{self.name}:{self.longest}"

    def draw(self, count: int, rng: Random) -> list[int]:
        """One length for each response: the distribution's quantiles, shuffled, so that the total does not vary."""
        if self.name == "constant":
            return [self.longest] * count
        normal = NormalDist(math.log(MEDIAN_SHARE * self.longest), DEVIATION)
        lengths = [round(math.exp(normal.inv_cdf((i + 0.5) / count))) for i in range(count)]
        rng.shuffle(lengths)
        return [min(max(length, 1), self.longest) for length in lengths]


@dataclass(frozen=True)
class Case:
    """The input of one rollout, equal for every contender.

    Attributes:
        prompts: B lists of ids; the samples of one prompt are adjacent.
        limits: B lengths: response b ends at exactly that many tokens.
    """

    prompt_kind: PromptKind
    length_kind: LengthKind
    prompts: list[list[int]]
    limits: list[int]

    @property
    def batch(self) -> int:
        return len(self.prompts)

    @property
    def tokens(self) -> int:
        """Useful tokens: tokens decoded for rows that have ended do not count."""
        return sum(self.limits)

    @property
    def columns(self) -> int:
        """Columns of the padded [B, S] rectangle of prompts and responses."""
        return max(map(len, self.prompts)) + max(self.limits)


def make_case(batch: int, prompt_kind: PromptKind, length_kind: LengthKind, *, vocabulary: int, seed: int) -> Case:
    """A case that depends on the arguments alone, not on other cases of the run."""
    rng = Random(f"{seed} {batch} {prompt_kind} {length_kind}")
    prompts: list[list[int]] = []
    while len(prompts) < batch:
        length = rng.randint(prompt_kind.shortest, prompt_kind.longest)
        prompts += [[rng.randrange(3, vocabulary) for _ in range(length)]] * prompt_kind.samples
    return Case(prompt_kind, length_kind, prompts[:batch], length_kind.draw(batch, rng))


def random_model(name: str, *, dtype: torch.dtype, device: torch.device, seed: int) -> PreTrainedModel:
    """A random model of this shape, in eval mode, without an EOS of its own."""
    config = SHAPES[name]()
    config.eos_token_id = None
    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    model.generation_config = GenerationConfig()
    return model


def weight_bytes(model: PreTrainedModel) -> int:
    """Weight bytes read per step: all weights, except an untied embedding, of which only a few rows are read."""
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    head = model.get_output_embeddings().weight
    skipped = {id(table) for table in tables if table is not head}
    return sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in skipped)


def kv_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values of all layers for one token."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * dtype.itemsize


def bandwidth_limit(case: Case, *, weights: int, kv: int, bandwidth: float) -> float:
    """Useful tokens per second at the memory bandwidth limit: each step reads the weights and every row's context.

    With constant lengths this is B · bandwidth ÷ (weights + B · mean context · kv). A context shared by samples is
    counted for each, so an engine that reads it once may exceed the limit; so may a model that fits into a cache.

    Args:
        case: the rollout.
        weights: bytes of weights read per step.
        kv: bytes of keys and values per token.
        bandwidth: bytes per second.
    """
    # Token t of a row, t = 2 … L, reads its prompt and t − 1 tokens; the first token comes from the prefill.
    contexts = sum(
        (limit - 1) * len(prompt) + limit * (limit - 1) // 2
        for prompt, limit in zip(case.prompts, case.limits, strict=True)
    )
    return case.tokens * bandwidth / (max(case.limits) * weights + contexts * kv)


def needed_bytes(case: Case, *, kv: int, vocabulary: int) -> int:
    """Rough upper bound of the bytes to decode a case, besides weights: a full rectangle, and float32 logits."""
    return 2 * case.batch * case.columns * kv + 4 * 4 * case.batch * vocabulary
