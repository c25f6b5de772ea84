"""Preference losses as objectives for dschat.runs.fit: batches → log-probs of responses → loss of the whole step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import deepspeed
import torch
from torch import Tensor

from dschat import arguments
from dschat.data.collators import collate_preferences, collate_unpaired
from dschat.distributed import collectives, watchdog
from dschat.distributed.engines import Metrics
from dschat.losses.kto import kto_kl, kto_loss
from dschat.losses.preference import (
    chosen_nll,
    dpo_loss,
    hinge_loss,
    ipo_loss,
    orpo_loss,
    robust_loss,
    sequence_logprobs,
    simpo_loss,
)
from dschat.models.lora import without_adapters
from dschat.runs.fit import Batch, Objective, evaluation_means


def preference_objective(preference: arguments.PreferenceArguments, *, pad_token_id: int) -> Objective:
    """The training objective for these settings."""
    unpaired = preference.kind == "unpaired"
    preparations = []
    if preference.reference == "adapters_off" and not preference.reference_free:
        preparations.append(partial(reference_without_adapters, response_logprobs=RESPONSE_LOGPROBS[preference.kind]))
    if unpaired:
        preparations.append(reference_point)
    loss = configured_kto_loss(preference) if unpaired else configured_pair_loss(preference)
    return Objective(
        collate=partial(collate_unpaired if unpaired else collate_preferences, pad_token_id=pad_token_id),
        count=lambda batch: batch["row_mask" if unpaired else "pair_mask"].sum(),
        loss_of=loss,
        evaluation=partial(evaluation_means, counted="rows" if unpaired else "pairs"),
        prepare=partial(run_preparations, preparations=preparations),
    )


def configured_pair_loss(preference: arguments.PreferenceArguments) -> Callable[..., tuple[Tensor, Metrics]]:
    """The configured pair loss, as Objective.loss_of."""
    smoothing = {"label_smoothing": preference.label_smoothing}
    losses = {
        "dpo": partial(dpo_loss, **smoothing),
        "robust": partial(robust_loss, **smoothing),
        "ipo": ipo_loss,
        "hinge": hinge_loss,
        "simpo": partial(simpo_loss, gamma=preference.simpo_gamma),
        "orpo": orpo_loss,
    }
    return partial(
        pair_loss,
        loss_fn=partial(losses[preference.preference_loss], beta=preference.beta),
        reference_free=preference.reference_free,
        length_normalized=preference.uses_mean_logprobs,
        # ORPO already includes this term, with weight 1.
        sft_coef=0.0 if preference.preference_loss == "orpo" else preference.sft_coef,
    )


def configured_kto_loss(preference: arguments.PreferenceArguments) -> Callable[..., tuple[Tensor, Metrics]]:
    return partial(
        unpaired_loss,
        loss_fn=partial(
            kto_loss, beta=preference.beta, desirable_weight=preference.desirable_weight,
            undesirable_weight=preference.undesirable_weight,
        ),
    )  # fmt: skip


def pair_loss(
    engine: deepspeed.DeepSpeedEngine, batch: Batch, pairs: float, *, loss_fn: Callable[..., tuple[Tensor, Metrics]],
    reference_free: bool, length_normalized: bool, sft_coef: float,
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """The loss normalised by the pairs of the whole step; chosen and rejected share one forward pass."""
    mask = batch["pair_mask"]
    logprobs, ref_logprobs = pair_logprobs(engine, batch)[mask], batch["ref_logprobs"][mask]  # [B, 2] each
    lengths = _chosen_and_rejected(batch["loss_mask"].sum(dim=1))[mask].clamp(min=1)  # [B, 2]
    policy, reference = (
        (logprobs / lengths, ref_logprobs / lengths) if length_normalized else (logprobs, ref_logprobs)
    )
    loss, metrics = loss_fn(*policy.unbind(1), *(() if reference_free else reference.unbind(1)), normalizer=pairs)
    if sft_coef:
        sft = chosen_nll((logprobs / lengths)[:, 0], normalizer=pairs)
        loss, metrics = loss + sft_coef * sft, metrics | {"sft_loss": sft.detach()}
    return loss, metrics


def unpaired_loss(
    engine: deepspeed.DeepSpeedEngine, batch: Batch, rows: float, *, loss_fn: Callable[..., tuple[Tensor, Metrics]]
) -> tuple[Tensor, Metrics]:
    """KTO over the single responses of the whole step; `reference_point` computes KL and share of desirable rows."""
    mask = batch["row_mask"]
    logprobs = _own_logprobs(engine, batch)[mask]  # [B]
    loss, metrics = loss_fn(
        logprobs, batch["ref_logprobs"][mask, 0], batch["desirable"][mask], kl=batch["kl"],
        desirable_share=batch["desirable_share"], normalizer=rows,
    )  # fmt: skip
    return loss, metrics | {"kl": batch["kl"] * mask.sum() / rows}  # micro-batch metrics are summed


def pair_logprobs(engine: deepspeed.DeepSpeedEngine, batch: Batch) -> Tensor:
    """[B, 2] float32: log-probs of the chosen and of the rejected response, sums over their tokens."""
    logprobs = engine(batch["input_ids"], batch["attention_mask"], batch["loss_mask"])  # [2B, S]
    return _chosen_and_rejected(sequence_logprobs(logprobs, batch["loss_mask"]))


def unpaired_logprobs(engine: deepspeed.DeepSpeedEngine, batch: Batch) -> Tensor:
    """[B, 2] float32: log-probs of the row's own response and of the mismatched one."""
    return torch.stack([_own_logprobs(engine, batch), _mismatched_logprobs(engine, batch)], dim=1)


RESPONSE_LOGPROBS = {"preference": pair_logprobs, "unpaired": unpaired_logprobs}


def run_preparations(
    engine: deepspeed.DeepSpeedEngine, batches: Iterable[Batch], *, preparations: list[Callable[..., Iterable[Batch]]]
) -> Iterable[Batch]:
    for prepare in preparations:
        batches = prepare(engine, batches)
    return batches


def reference_without_adapters(
    engine: deepspeed.DeepSpeedEngine, batches: Iterable[Batch], *, response_logprobs: Callable[..., Tensor]
) -> Iterable[Batch]:
    """Add reference log-probs to the micro-batches: those of the model with its adapters disabled."""
    engine.eval()
    for batch in batches:
        watchdog.phase("reference")
        with torch.no_grad(), without_adapters(engine.module):
            ref_logprobs = response_logprobs(engine, batch)
        yield batch | {"ref_logprobs": ref_logprobs}  # outside the context, else the caller would run without adapters


@torch.no_grad()
def reference_point(engine: deepspeed.DeepSpeedEngine, batches: Iterable[Batch]) -> list[Batch]:
    """Add KTO's KL (`kl`, nats) and `desirable_share` to the micro-batches, both over all of them on all ranks."""
    batches = list(batches)
    engine.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=engine.device)
    for batch in batches:
        watchdog.phase("reference point")
        mask = batch["row_mask"]
        log_ratio = (_mismatched_logprobs(engine, batch) - batch["ref_logprobs"][:, 1])[mask]
        sums += torch.stack([log_ratio.double().sum(), mask.sum().double(), batch["desirable"][mask].sum().double()])
    log_ratio_sum, rows, desirable = collectives.sum_over_ranks(sums)
    statistics = {"kl": kto_kl(log_ratio_sum, rows).float(), "desirable_share": desirable / rows.clamp(min=1)}
    return [batch | statistics for batch in batches]


def _own_logprobs(engine: deepspeed.DeepSpeedEngine, batch: Batch) -> Tensor:
    logprobs = engine(batch["input_ids"], batch["attention_mask"], batch["loss_mask"])  # [B, S]
    return sequence_logprobs(logprobs, batch["loss_mask"])


def _mismatched_logprobs(engine: deepspeed.DeepSpeedEngine, batch: Batch) -> Tensor:
    mask = batch["mismatched_loss_mask"]
    return sequence_logprobs(engine(batch["mismatched_ids"], batch["mismatched_attention_mask"], mask), mask)  # [B]


def _chosen_and_rejected(values: Tensor) -> Tensor:
    """[2B] (chosen first, then rejected) → [B, 2]."""
    return torch.stack(values.chunk(2), dim=1)
