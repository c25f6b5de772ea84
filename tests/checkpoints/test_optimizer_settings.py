"""A resumed run uses the learning rate, schedule, weight decay, betas and clipping of its flags: against torch."""

from dataclasses import dataclass, replace
from pathlib import Path

import deepspeed
import pytest
import torch
from torch import nn

from dschat.checkpoints.loading import load_checkpoint
from dschat.checkpoints.saving import save_checkpoint
from dschat.distributed.deepspeed_config import training_config
from dschat.distributed.engines import optimizer_step, trainable_engine
from dschat.models.weights import gathered

BEFORE, AFTER = 2, 3  # steps before and after the resume


@dataclass(frozen=True)
class Flags:
    learning_rate: float = 1e-2
    biases_rate: float = 3e-2
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.8, 0.9)
    max_grad_norm: float = 0.5
    total_steps: int = 8


CHANGES = {
    "nothing": {},
    "learning rates": {"learning_rate": 2e-3, "biases_rate": 5e-3},
    "length of the schedule": {"total_steps": 20},
    "weight decay": {"weight_decay": 0.7},
    "betas": {"betas": (0.5, 0.6)},
    "smaller max_grad_norm": {"max_grad_norm": 0.02},
    "no gradient clipping": {"max_grad_norm": 0.0},
    "all at once": {
        "learning_rate": 4e-3, "biases_rate": 1e-3, "weight_decay": 0.0, "betas": (0.7, 0.95), "max_grad_norm": 0.1,
        "total_steps": 6,
    },
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("single_rank_group")


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(8, 5, generator=generator), torch.randn(8, 1, generator=generator)
    return (model(inputs.to(next(model.parameters()).dtype)) - 3 * targets).square().sum()


def groups_of(model: nn.Module, flags: Flags) -> list[dict]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "lr": flags.learning_rate,
         "weight_decay": flags.weight_decay, "name": "weights"},
        {"params": [p for p in model.parameters() if p.dim() < 2], "lr": flags.biases_rate, "weight_decay": 0.0,
         "name": "biases"},
    ]  # fmt: skip


def engine_of(flags: Flags, *, zero_stage: int, dtype: str) -> deepspeed.DeepSpeedEngine:
    config = training_config(
        dtype=dtype, zero_stage=zero_stage, micro_batch_size=8, gradient_accumulation_steps=1, world_size=1,
        max_grad_norm=flags.max_grad_norm,
    )  # fmt: skip
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    model = network()
    return trainable_engine(
        model, config=config, parameter_groups=groups_of(model, flags), adam_betas=flags.betas,
        lr_scheduler_type="linear", num_warmup_steps=0, num_training_steps=flags.total_steps,
    )  # fmt: skip


def train(engine: deepspeed.DeepSpeedEngine, steps: range) -> list[dict[str, float]]:
    return [optimizer_step(engine, [lambda step=step: (loss_of(engine, step), {})]) for step in steps]


def plain_torch(before: Flags, after: Flags) -> tuple[list[torch.Tensor], list[float]]:
    """Weights after all steps, and the rate of the weights at each, where flags change between two of them."""
    model = network()
    optimizer = torch.optim.AdamW(groups_of(model, before), betas=before.betas)
    rates = []
    for step in range(BEFORE + AFTER):
        flags = before if step < BEFORE else after
        for group, rate in zip(optimizer.param_groups, (flags.learning_rate, flags.biases_rate), strict=True):
            group["lr"] = rate * max(0.0, 1 - step / flags.total_steps)
            group["betas"] = flags.betas
        optimizer.param_groups[0]["weight_decay"] = flags.weight_decay
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if flags.max_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), flags.max_grad_norm)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()], rates


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_a_resumed_run_uses_its_own_flags_from_the_first_step(change, zero_stage, tmp_path):
    before = Flags()
    after = replace(before, **CHANGES[change])
    saved = engine_of(before, zero_stage=zero_stage, dtype="fp32")
    lines = train(saved, range(BEFORE))
    folder = save_checkpoint(tmp_path, BEFORE, engines={"model": saved}, state={"seed": 1}, keep=1)
    resumed = engine_of(after, zero_stage=zero_stage, dtype="fp32")
    load_checkpoint(folder, engines={"model": resumed}, fingerprint={})
    lines += train(resumed, range(BEFORE, BEFORE + AFTER))
    weights, rates = plain_torch(before, after)
    assert [line["learning_rate"] for line in lines] == pytest.approx(rates)
    for parameter, expected in zip(resumed.module.parameters(), weights, strict=True):
        with gathered([parameter]):
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_resumed_run_in_bf16_uses_its_own_flags(zero_stage, tmp_path: Path):
    """DeepSpeed has another optimizer wrapper for bf16, which stores its own max_grad_norm."""
    before, after = Flags(), Flags(**CHANGES["all at once"])
    saved = engine_of(before, zero_stage=zero_stage, dtype="bf16")
    train(saved, range(BEFORE))
    folder = save_checkpoint(tmp_path, BEFORE, engines={"model": saved}, state={"seed": 1}, keep=1)
    resumed = engine_of(after, zero_stage=zero_stage, dtype="bf16")
    load_checkpoint(folder, engines={"model": resumed}, fingerprint={})
    weights, biases = resumed.optimizer.param_groups
    assert (weights["weight_decay"], biases["weight_decay"]) == (after.weight_decay, 0.0)
    assert weights["betas"] == biases["betas"] == after.betas
    assert (weights["lr"], biases["lr"]) == pytest.approx((4e-3 * 4 / 6, 1e-3 * 4 / 6))
    assert resumed.optimizer.clip_grad == after.max_grad_norm
