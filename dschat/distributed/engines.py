"""Build DeepSpeed engines, and run the optimizer step that all trainers share."""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import deepspeed
import torch
from torch import nn
from transformers import get_scheduler

from dschat.distributed import collectives, failpoint, watchdog

Metrics = dict[str, torch.Tensor]


def trainable_engine(
    model: nn.Module,
    *,
    config: dict[str, Any],
    parameter_groups: list[dict[str, Any]],
    adam_betas: tuple[float, float],
    lr_scheduler_type: str,
    num_warmup_steps: int,
    num_training_steps: int,
) -> deepspeed.DeepSpeedEngine:
    """A DeepSpeedEngine with fused AdamW and a learning-rate schedule over `num_training_steps` updates."""
    _import_muon_uncompiled()
    optimizer = torch.optim.AdamW(parameter_groups, betas=adam_betas, fused=True)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lambda wrapped: get_scheduler(
            lr_scheduler_type, wrapped, num_warmup_steps=num_warmup_steps, num_training_steps=num_training_steps
        ),
        config=config,
        dist_init_required=False,
    )
    return engine


def _import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon, as every engine does, without torch.compile, which it calls when it is imported.

    That would import torch's compiler, in two seconds, for an optimizer that this suite does not use.
    """
    if "deepspeed.runtime.zero.muon.original_muon" not in sys.modules:
        with mock.patch("deepspeed.runtime.compiler.compile", lambda *args, **kwargs: lambda function: function):
            importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


def frozen_engine(model: nn.Module, *, config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    """A DeepSpeedEngine without optimizer, in evaluation mode, with all parameters frozen."""
    watchdog.phase("engine")
    model.requires_grad_(False)
    engine, _, _, _ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
    engine.eval()
    return engine


def optimizer_step(
    engine: deepspeed.DeepSpeedEngine, micro_losses: Sequence[Callable[[], tuple[torch.Tensor, Metrics]]]
) -> dict[str, float]:
    """One optimizer step from micro-batch losses that are already normalised over the whole step.

    Each entry computes (loss, metrics): sums over its micro-batch, divided by the count of the whole step (all ranks,
    all micro-batches). DeepSpeed averages gradients over ranks and accumulation steps; both are undone here, so the
    step does not depend on how the batch is split.

    If the gradient of any rank is not finite, all ranks skip the update: weights, moments and schedule do not change.

    Returns: the metrics summed over micro-batches and ranks, with "loss", "grad_norm" and "learning_rate"; if the
        update was skipped, also "skipped_updates": 1.
    """
    engine.train()
    _agree_on_count(len(micro_losses), engine.device)
    totals: Metrics = {}
    for number, micro_loss in enumerate(micro_losses, start=1):
        engine.set_gradient_accumulation_boundary(number == len(micro_losses))
        loss, metrics = micro_loss()
        watchdog.progress()
        loss = loss * torch.nan if failpoint.reached("loss") else loss
        engine.backward(loss * collectives.world_size(), scale_wrt_gas=False)
        for name, value in {"loss": loss, **metrics}.items():
            totals[name] = totals.get(name, 0.0) + value.detach().to(torch.float64)
    learning_rate = engine.get_lr()[0]
    norm = _grad_norm_without_zero(engine)
    if norm is not None and not torch.isfinite(norm):  # gradients are all-reduced, so ranks agree
        engine.zero_grad()
        skipped = True
    else:
        engine.step()
        skipped = not engine.was_step_applied()
    if norm is None:
        norm = engine.get_global_grad_norm()
    metrics = sum_metrics(totals) | {"grad_norm": float(norm), "learning_rate": learning_rate}
    return metrics | ({"skipped_updates": 1.0} if skipped else {})


def _agree_on_count(count: int, device: torch.device) -> None:
    """Raise on every rank if their numbers of micro-batches differ, which would deadlock.

    Raises:
        RuntimeError: with the smallest and the largest number.
    """
    if collectives.world_size() > 1:
        most, least = collectives.max_over_ranks(torch.tensor([count, -count], device=device)).tolist()
        if most != -least:
            raise RuntimeError(
                f"one rank has {-least:.0f} micro-batches for this optimizer step and another {most:.0f}: every rank "
                "must run the same number; ranks without rows need dummy micro-batches with count 0"
            )


def _grad_norm_without_zero(engine: deepspeed.DeepSpeedEngine) -> torch.Tensor | None:
    """The gradient norm before clipping if DeepSpeed computes none (ZeRO-0 in fp32: torch's optimizer), else None."""
    if not isinstance(engine.optimizer, torch.optim.Optimizer):
        return None
    gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


def sum_metrics(totals: Metrics) -> dict[str, float]:
    """Sum a dict of scalars over all ranks in one all-reduce; the keys must be the same on every rank."""
    if not totals:
        return {}
    summed = collectives.sum_over_ranks(torch.stack([value.to(torch.float64).reshape(()) for value in totals.values()]))
    return dict(zip(totals, summed.tolist(), strict=True))
