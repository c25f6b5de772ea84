"""Program of one or two ranks for test_engines.py: optimizer steps against plain torch on the whole batch."""

import itertools
from functools import partial

import torch
from torch import nn

from dschat.distributed import collectives, launch
from dschat.distributed.deepspeed_config import frozen_config, training_config
from dschat.distributed.engines import frozen_engine, optimizer_step, trainable_engine
from dschat.models.weights import gathered

ROWS, STEPS, CLIP, RATE, BETAS, DECAY = 8, 3, 0.05, 1e-2, (0.8, 0.9), 0.1
SPLITS = {  # rows of each micro-batch, for each rank
    1: {"whole": [[range(8)]], "split": [[range(3), range(3, 8)]], "with an empty micro-batch": [[range(8), range(0)]]},
    2: {
        "even": [[range(4)], [range(4, 8)]],
        "uneven": [[range(1), range(1, 3)], [range(3, 4), range(4, 8)]],
        "one rank without rows": [[range(8)], [range(0)]],
    },
}


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 5, generator=generator), torch.randn(ROWS, 1, generator=generator)


def share_of_loss(model: nn.Module, step: int, rows: range) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    inputs, targets = batch(step)
    errors = (model(inputs[rows.start : rows.stop]) - targets[rows.start : rows.stop]).square()
    return errors.sum() / ROWS, {"rows": torch.tensor(float(len(rows))), "error": errors.detach().sum()}


def plain_torch() -> tuple[list[torch.Tensor], list[dict[str, float]]]:
    """Parameters and metrics after AdamW on whole batches: gradient clipped by its global norm, linear schedule."""
    model = network()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS)
    lines = []
    for step in range(STEPS):
        rate = RATE * (STEPS - step) / STEPS
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss, sums = share_of_loss(model, step, range(ROWS))
        loss.backward()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
        for parameter in model.parameters():
            parameter.grad *= min(1.0, CLIP / float(norm))
        optimizer.step()
        lines.append({"loss": loss.item(), "rows": 8.0, "error": sums["error"].item(), "grad_norm": norm.item(),
                      "learning_rate": rate})  # fmt: skip
    return [p.detach() for p in model.parameters()], lines


def check(stage: int, split: list[list[range]], case: str) -> None:
    model = network()
    micro_batches = split[collectives.rank()]
    config = training_config(
        dtype="fp32", zero_stage=stage, micro_batch_size=4, gradient_accumulation_steps=1,
        world_size=collectives.world_size(), max_grad_norm=CLIP,
    )  # fmt: skip
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "lr": RATE, "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() < 2], "lr": RATE, "weight_decay": 0.0},
    ]
    engine = trainable_engine(
        model, config=config, parameter_groups=groups, adam_betas=BETAS, lr_scheduler_type="linear",
        num_warmup_steps=0, num_training_steps=STEPS,
    )  # fmt: skip
    expected, lines = plain_torch()
    for step, line in enumerate(lines):
        engine.eval()  # as an evaluation would leave it
        metrics = optimizer_step(engine, [partial(share_of_loss, engine, step, rows) for rows in micro_batches])
        assert engine.module.training
        assert metrics.keys() == line.keys(), case
        for name, value in line.items():
            assert abs(metrics[name] - value) <= 1e-5 * abs(value), (case, step, name, metrics[name], value)
    for parameter, reference in zip(engine.module.parameters(), expected, strict=True):
        with gathered([parameter]):
            torch.testing.assert_close(parameter.detach(), reference, rtol=1e-4, atol=1e-5, msg=lambda m: case + m)  # noqa: B023


def check_frozen(stage: int) -> None:
    config = frozen_config(dtype="fp32", zero_stage=stage, micro_batch_size=4, world_size=collectives.world_size())
    engine = frozen_engine(network(), config=config)
    assert not engine.module.training and not any(p.requires_grad for p in engine.module.parameters())
    inputs, _ = batch(0)
    torch.testing.assert_close(engine(inputs), network()(inputs))


if __name__ == "__main__":
    launch.join(seed=1)
    for stage, (name, split) in itertools.product((0, 1, 2, 3), SPLITS[collectives.world_size()].items()):
        check(stage, split, f"ZeRO {stage}, {name}")
    for stage in (0, 3):
        check_frozen(stage)
    launch.run(lambda: print("all equal", flush=True))
