"""Finds out why a rollout engine and a policy disagree: rescores rollouts under hypotheses of what the engine did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat.generation import Rollout, RolloutEngine, SamplingParams
from dschat.generation.sampling import truncate_logits
from dschat.models.causal_lm import head_transform
from dschat.models.lora import without_adapters
from dschat.rlhf.rollouts.engine_check import LIMIT
from dschat.rlhf.rollouts.logprob_mismatch import log_ratio

EXPLAINED = 0.1  # a hypothesis explains a mismatch if at most this share of it is left
SCALES = (0.25, 0.5, 0.75, 1.5, 2.0, 4.0)
NOISE = 0.05  # of an update, relative to each weight's standard deviation


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How log-probs of a response are computed from a model.

    Attributes:
        sampling: the distribution.
        logit_scale: multiplies the logits.
        unscaled: without the model's own logit scale and soft cap.
        position_gap: added to the positions of response tokens.
        adapters: with LoRA adapters applied.
    """

    sampling: SamplingParams = SamplingParams()
    logit_scale: float = 1.0
    unscaled: bool = False
    position_gap: int = 0
    adapters: bool = True


class Gap(NamedTuple):
    """Difference of log-probs of engine and policy, nats.

    Attributes:
        mean, largest: of |Δ| over the response tokens.
        ratio: mean of π_policy / π_engine.
        by_position: mean |Δ| of each quarter of the response positions.
    """

    mean: float
    largest: float
    ratio: float
    by_position: list[float]


@dataclass
class Report:
    """What a diagnosis measured.

    Attributes:
        greedy_agreement: share of greedy tokens that are the policy's most likely ones.
        greedy_margin: largest log-prob by which another token was more likely for the policy, nats.
        before, after: of sampled tokens, with the first weights and after an update.
        worst: (row, position) of the tokens with the largest |Δ| after the update.
        verdict: in words; "" if engine and policy agree up to rounding.
        rollout, rollout_gap: sampled after the update, and its Δ [B, T].
    """

    greedy_agreement: float = 0.0
    greedy_margin: float = 0.0
    before: Gap | None = None
    after: Gap | None = None
    worst: list[tuple[int, int]] = field(default_factory=list)
    verdict: str = ""
    rollout: Rollout | None = None
    rollout_gap: Tensor | None = None


def diagnose(
    model: PreTrainedModel, engine: RolloutEngine, prompts: Sequence[Sequence[int]], *, sampling: SamplingParams,
    max_new_tokens: int, eos_token_ids: Sequence[int], pad_token_id: int, seed: int = 0,
) -> Report:  # fmt: skip
    """Generate, change the weights as an update would, generate again; compare each rollout with the model.

    The model keeps the changed weights.

    Args:
        model: the policy that the engine was built over.
        prompts: token ids.
        sampling: of the sampled rollouts; greedy ones come first.
    """
    request = {
        "max_new_tokens": max_new_tokens, "eos_token_ids": list(eos_token_ids), "pad_token_id": pad_token_id,
        "seed": seed,
    }  # fmt: skip
    report, scoring = Report(), Scoring(sampling=sampling)
    with engine.generation():
        greedy = engine.generate(prompts, sampling=replace(sampling, temperature=0.0), **request)
        first = engine.generate(prompts, sampling=sampling, **request)
    report.greedy_agreement, report.greedy_margin = greedy_agreement(model, greedy, vocabulary=sampling.vocabulary_size)
    report.before = gap_of(delta(model, first, scoring), first.response_mask)
    old = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    change_weights(model, seed=seed)
    with engine.generation():
        rollout = report.rollout = engine.generate(prompts, sampling=sampling, iteration=1, **request)
    change = report.rollout_gap = delta(model, rollout, scoring)
    report.after = gap_of(change, rollout.response_mask)
    order = change.abs().flatten().topk(min(5, int(rollout.response_mask.sum()))).indices.tolist()
    report.worst = [divmod(index, change.shape[1]) for index in order]
    report.verdict = verdict(model, prompts, first, rollout, old=old, scoring=scoring, report=report)
    return report


def verdict(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], first: Rollout, rollout: Rollout, *,
    old: dict[str, Tensor], scoring: Scoring, report: Report,
) -> str:  # fmt: skip
    """Name the hypothesis that explains the mismatch; "" without one."""
    rows, lengths = rollout.sequences.tolist(), rollout.prompt_lengths.tolist()
    decoded = [row[rollout.prompt_length - n : rollout.prompt_length] for row, n in zip(rows, lengths, strict=True)]
    if decoded != [list(prompt) for prompt in prompts]:
        return "template: the engine decoded other prompts than it was given: its chat template or tokenizer differs"
    limit = LIMIT[model.dtype]
    if report.before.mean <= limit and report.after.mean <= limit:
        return ""
    sampled = rollout if report.after.mean > limit else first
    mean = max(report.after.mean, report.before.mean if sampled is first else 0.0)
    weights = old if sampled is first else {}
    best, left = "", float("inf")
    for name, hypothesis, changed in hypotheses(model, scoring, old if sampled is rollout else None):
        with replaced(model, weights | changed):
            rest = float(gap_of(delta(model, sampled, hypothesis), sampled.response_mask).mean)
        if rest < left:
            best, left = name, rest
        if rest <= limit / 100:
            break
    if left <= max(limit, EXPLAINED * mean):
        return best
    return f"unknown: no hypothesis explains a mismatch of {mean:.3g} nats (the nearest: {best}, {left:.3g} left)"


def hypotheses(
    model: PreTrainedModel, scoring: Scoring, old: dict[str, Tensor] | None
) -> Iterator[tuple[str, Scoring, dict[str, Tensor]]]:
    """What an engine may have done wrong: its name, how it scores, and weights that it has in place of the model's.

    Args:
        old: weights before the update; None for rollouts without one before them.
    """
    if old is not None:
        yield "stale weights: the engine has the weights of one update before", scoring, old
    if scoring.sampling != SamplingParams():
        before = "sampling distribution: the engine's log-probs are those before"
        untruncated = replace(scoring.sampling, top_k=0, top_p=1.0)
        plain = replace(untruncated, temperature=1.0)
        yield f"{before} temperature, top-k and top-p", replace(scoring, sampling=plain), {}
        yield f"{before} top-k and top-p", replace(scoring, sampling=untruncated), {}
        everything = replace(scoring.sampling, vocabulary_size=None)
        yield (
            "sampling distribution: the engine samples ids beyond the tokenizer's vocabulary",
            replace(scoring, sampling=everything), {},
        )  # fmt: skip
    if old is not None:
        for layer, names in layers_of(model).items():
            yield f"stale weights: {layer} was not synchronised", scoring, {name: old[name] for name in names}
    if any(".lora_" in name for name, _ in model.named_parameters()):
        without = replace(scoring, adapters=False)
        yield "adapters: the engine has the base weights, without the adapters", without, {}
    unscaled = replace(scoring, unscaled=True)
    yield "wrong scale: the engine leaves out the model's logit scale or soft cap", unscaled, {}
    for gap in (1, -1):
        shifted = replace(scoring, position_gap=gap)
        yield f"positions: those of response tokens are shifted by {gap}", shifted, {}
    for scale in SCALES:
        scaled = replace(scoring, logit_scale=scale)
        yield f"wrong scale: the engine's logits are {scale} times the model's", scaled, {}


def layers_of(model: PreTrainedModel) -> dict[str, list[str]]:
    """Parameter names by decoder layer, by part of a layer, and by module for those outside the layers."""
    groups: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        paths = [parts[:-1]] if number is None else [parts[: number + 1], parts[: number + 2]]
        for path in paths:
            groups.setdefault(".".join(path), []).append(name)
    return groups


@torch.no_grad()
def delta(model: PreTrainedModel, rollout: Rollout, scoring: Scoring) -> Tensor:
    """[B, T] log π_policy − log π_engine of the response tokens, each row scored alone by the model's own forward."""
    was_training, scored = model.training, torch.zeros_like(rollout.logprobs)
    model.eval()
    prompts = rollout.prompt_lengths.tolist()
    for row, response in enumerate(rollout.responses()):
        start = rollout.prompt_length - prompts[row]
        ids = rollout.sequences[row, start : rollout.prompt_length + len(response)]
        logits = response_logits(model, ids, prompt=prompts[row], scoring=scoring)
        sampling = scoring.sampling
        logits = without_unknown_ids(logits, sampling.vocabulary_size) / sampling.temperature
        logits = truncate_logits(logits, top_k=sampling.top_k, top_p=sampling.top_p)
        logprobs = logits.log_softmax(-1)
        scored[row, : len(response)] = logprobs.gather(1, ids[prompts[row] :, None]).squeeze(1)
    model.train(was_training)
    return log_ratio(scored, rollout.logprobs, rollout.response_mask)


def response_logits(model: PreTrainedModel, ids: Tensor, *, prompt: int, scoring: Scoring) -> Tensor:
    """[T, V] float32 logits that predict the tokens after the prompt."""
    positions = torch.arange(len(ids), device=ids.device)
    positions = torch.where(positions < prompt, positions, (positions + scoring.position_gap).clamp(min=0))
    with nullcontext() if scoring.adapters else without_adapters(model):
        logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0, prompt - 1 : -1]
    logits = logits.float() * scoring.logit_scale
    scale, softcap = head_transform(model)
    if scoring.unscaled and softcap is not None:
        logits = softcap * torch.atanh((logits / softcap).clamp(-1 + 1e-6, 1 - 1e-6))
    return logits / scale if scoring.unscaled else logits


def without_unknown_ids(logits: Tensor, vocabulary: int | None) -> Tensor:
    """Logits [T, V] with −inf from id `vocabulary` on; None: unchanged."""
    known = torch.arange(logits.shape[-1], device=logits.device) < (vocabulary or logits.shape[-1])
    return logits.masked_fill(~known, float("-inf"))


@torch.no_grad()
def greedy_agreement(
    model: PreTrainedModel, rollout: Rollout, *, vocabulary: int | None = None
) -> tuple[float, float]:
    """Share of tokens that are the model's most likely ones, and the largest margin of others, nats.

    Args:
        vocabulary: number of ids that can be sampled, None all.
    """
    was_training, agreeing, tokens, margin = model.training, 0, 0, 0.0
    model.eval()
    prompts = rollout.prompt_lengths.tolist()
    for row, response in enumerate(rollout.responses()):
        ids = rollout.sequences[row, rollout.prompt_length - prompts[row] : rollout.prompt_length + len(response)]
        logits = response_logits(model, ids, prompt=prompts[row], scoring=Scoring())
        logprobs = without_unknown_ids(logits, vocabulary).log_softmax(-1)
        chosen = logprobs.gather(1, ids[prompts[row] :, None]).squeeze(1)
        behind = logprobs.max(-1).values - chosen
        agreeing, tokens = agreeing + int((behind == 0).sum()), tokens + len(response)
        margin = max(margin, float(behind.max()))
    model.train(was_training)
    return agreeing / max(tokens, 1), margin


def gap_of(difference: Tensor, mask: Tensor) -> Gap:
    """Summarise Δ [B, T]."""
    sizes = difference.abs().double()[mask]
    columns = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)[mask] * 4 // max(mask.shape[1], 1)
    quarters = [sizes[columns == quarter] for quarter in range(4)]
    return Gap(
        float(sizes.mean()), float(sizes.max()), float(difference.double()[mask].exp().mean()),
        [float(part.mean()) if len(part) else 0.0 for part in quarters],
    )  # fmt: skip


@torch.no_grad()
def change_weights(model: nn.Module, *, seed: int) -> None:
    """Add noise to every weight, as large as an update that an engine with the old weights cannot hide."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        spread = parameter.float().std(correction=0) if parameter.numel() > 1 else parameter.float().abs().mean()
        parameter.add_(noise * (NOISE * spread.clamp(min=0.01)).to(parameter.dtype))


@contextmanager
def replaced(model: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """The model with other values of these parameters inside the context."""
    parameters = dict(model.named_parameters())
    kept = {name: parameters[name].detach().clone() for name in weights}
    try:
        for name, weight in weights.items():
            parameters[name].data.copy_(weight)
        yield
    finally:
        for name, weight in kept.items():
            parameters[name].data.copy_(weight)
