"""Replay an update of step 3 in one process, from the files of `--dump_step N`, and show where tensors differ.

    python scripts/replay.py output/ppo/dump/step-00000007

Each line compares a tensor of the run with its float32 replay: largest absolute difference, its position (rank, row,
column), and largest magnitude. Start debugging at the first line over --tolerance. The replay runs without dropout, so
runs with --actor_dropout differ from logprobs on; for LoRA, its gradients are those of the full weights.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
from dump_files import Dump, read_dump
from torch import Tensor, nn

from dschat.arguments.models import TRUST_HELP
from dschat.arguments.script_inputs import existing_folder, exit_on_mistake, number_type
from dschat.losses.value import value_loss
from dschat.models.causal_lm import TokenLogprobs, load_causal_lm
from dschat.models.scalar_head import TokenScores, load_scalar_head
from dschat.rlhf.experience import Experience, estimate_advantages
from dschat.rlhf.rollouts.model_outputs import state_columns
from dschat.rlhf.updates.actor_loss import ActorLoss
from dschat.rlhf.updates.optimizer_steps import StepCounts
from dschat.tensors import whiten


class Comparison(NamedTuple):
    """A tensor of the run and the same one of the replay."""

    name: str
    recorded: Tensor
    replayed: Tensor


class Update:
    """The replayed update: models in float32 without dropout, gradients accumulated over all ranks.

    Attributes:
        totals: policy_loss and value_loss of the whole update.
    """

    def __init__(self, dump: Dump, folder: Path, device: torch.device, *, trust_remote_code: bool) -> None:
        loading = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
        self.dump, self.device, self.totals = dump, device, defaultdict(float)
        self.actor = TokenLogprobs(load_causal_lm(folder / "actor", **loading)).to(device).eval()
        self.critic = None
        if dump.ppo.trains_critic:
            self.critic = TokenScores(load_scalar_head(folder / "critic", **loading)).to(device).eval()
        self.counts = StepCounts(
            tokens=float(sum(part.trained_mask.sum() for part in dump.experience)),
            responses=float(sum(part.trained_mask.any(-1).sum() for part in dump.experience)),
        )
        self.actor_loss = ActorLoss(dump.ppo, max_tokens=dump.max_answer_seq_len)

    @torch.no_grad()
    def estimate_advantages(self) -> None:
        """Values, advantages and returns of every rank's rows, of a run whose only update per rollout computed them."""
        parts, ppo = self.dump.experience, self.dump.ppo
        for part in parts:
            rows = range(len(part))
            values = [self.values(self.on_device(part.rows([row]))) for row in rows]
            part.values = torch.zeros_like(part.rewards)
            for row in rows:
                part.values[row, : values[row].shape[1]] = values[row].cpu()
            part.advantages, part.returns = estimate_advantages(part, ppo=ppo)
        if ppo.whiten_advantages:
            advantages = torch.cat([part.advantages.flatten() for part in parts])
            masks = torch.cat([part.trained_mask.flatten() for part in parts])
            whitened = whiten(advantages, masks).split([part.rewards.numel() for part in parts])
            for part, flat in zip(parts, whitened, strict=True):
                part.advantages = flat.view_as(part.rewards)

    def on_device(self, part: Experience) -> Experience:
        return Experience(**{name: tensor.to(self.device) for name, tensor in part.tensors().items()})

    def values(self, part: Experience) -> Tensor:
        """[B, T], V of the state before each response token."""
        return state_columns(self.critic(part.sequences, part.attention_mask), part.response_mask)

    def actor_backward(self, part: Experience) -> dict[str, Tensor]:
        """Forward and backward pass of the actor; returns the tensors that a dump records."""
        columns = part.response_mask.shape[1]
        logprobs, entropy = self.actor(
            part.sequences, part.attention_mask, part.loss_mask, self.dump.temperature, True
        )  # [B, P+T] each
        logprobs, entropy = logprobs[:, -columns:], entropy[:, -columns:]  # [B, T]
        loss, metrics = self.actor_loss(logprobs, entropy, part, self.counts, kl_coef=self.dump.kl_coef)
        loss.backward()
        self.totals["policy_loss"] += float(metrics["policy_loss"])
        return {"logprobs": logprobs, "policy_loss": loss}

    def critic_backward(self, part: Experience) -> dict[str, Tensor]:
        """As actor_backward; {} without a critic."""
        if self.critic is None:
            return {}
        values = self.values(part)
        loss, _ = value_loss(
            values, part.values, part.returns, part.trained_mask, value_clip_range=self.dump.ppo.value_clip_range,
            normalizer=self.counts.tokens,
        )  # fmt: skip
        loss.backward()
        self.totals["value_loss"] += float(loss.detach())
        return {"values": values, "value_loss": loss}

    def of_rank(self, experience: Experience) -> dict[str, Tensor]:
        """The tensors that a dump records, of all rows of one rank; 0 in rows that are not trained on."""
        tensors: dict[str, Tensor] = {}
        trained = experience.trained_mask.any(dim=1).nonzero().squeeze(1)
        for rows in trained.split(self.dump.ppo.per_device_training_batch_size):
            part = self.on_device(experience.rows(rows))
            for name, tensor in (self.actor_backward(part) | self.critic_backward(part)).items():
                tensor = tensor.detach().cpu()
                if tensor.dim() == 0:
                    tensors[name] = tensors.get(name, 0.0) + tensor
                else:
                    whole = tensors.setdefault(name, tensor.new_zeros(experience.response_mask.shape))
                    whole[rows, : tensor.shape[1]] = tensor
        return tensors

    def metrics(self) -> dict[str, float]:
        """Losses and gradient norms of the update, once all micro-batches are done."""
        norms = {"actor_grad_norm": grad_norm(self.actor)}
        norms |= {"critic_grad_norm": grad_norm(self.critic)} if self.critic is not None else {}
        return self.totals | norms


def replay(folder: Path, device: torch.device, *, trust_remote_code: bool = False) -> list[Comparison]:
    """Run the update again and compare its tensors and metrics with those of the run."""
    dump = read_dump(folder)
    update = Update(dump, folder, device, trust_remote_code=trust_remote_code)
    comparisons: list[Comparison] = []
    values_known = any(part.values is not None for part in dump.experience)
    if update.critic is not None and not values_known:
        update.estimate_advantages()
    for rank, (experience, recorded) in enumerate(zip(dump.experience, dump.recorded, strict=True)):
        if values_known:
            _, returns = estimate_advantages(experience, ppo=dump.ppo)
            comparisons.append(
                Comparison(f"rank {rank} returns", experience.returns, returns * experience.response_mask)
            )
        replayed = update.of_rank(experience)
        for name in sorted(replayed.keys() & recorded.keys()):  # --actor_freeze_steps: the run did not update the actor
            if recorded[name].shape != replayed[name].shape:
                raise ValueError(
                    f"{folder / f'update_rank{rank}.safetensors'}: {name} has shape {tuple(recorded[name].shape)}, "
                    f"that of the replay {tuple(replayed[name].shape)}"
                )
            mask = experience.trained_mask if replayed[name].dim() else torch.ones((), dtype=torch.bool)
            comparisons.append(Comparison(f"rank {rank} {name}", recorded[name] * mask, replayed[name] * mask))
    for name, value in update.metrics().items():
        if name in dump.metrics:
            recorded_value = torch.nan if dump.metrics[name] is None else dump.metrics[name]
            comparisons.append(Comparison(name, torch.tensor(recorded_value), torch.tensor(value)))
    return comparisons


def grad_norm(model: nn.Module) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def table_row(comparison: Comparison, tolerance: float) -> tuple[str, bool]:
    """One row of the table, and whether the tensors differ by more than the tolerance."""
    recorded, replayed = comparison.recorded.double().cpu(), comparison.replayed.double().cpu()
    difference = (recorded - replayed).abs()
    difference = torch.where(difference.isnan(), torch.inf, difference)
    largest = float(difference.max())
    size = float(recorded[recorded.isfinite()].abs().max()) if recorded.isfinite().any() else 0.0
    position = ""
    if difference.dim():
        position = str(tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape)))
    differs = largest > tolerance * max(size, 1.0)
    mark = "   <- differs" if differs else ""
    return f"{comparison.name:28} {largest:12.3g} {position:>12} {size:12.4g}{mark}", differs


def available_device(name: str) -> torch.device:
    """An argparse type: an available device."""
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"{name!r} is not an available device ({reason})") from error


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=existing_folder, help="OUTPUT_DIR/dump/step-N of a run with --dump_step N")
    parser.add_argument("--tolerance", type=number_type(float, at_least=0), default=1e-3,
                        help="relative to the largest number (default: 1e-3)")  # fmt: skip
    parser.add_argument("--device", type=available_device, default="cpu")
    parser.add_argument("--trust_remote_code", action="store_true", help=TRUST_HELP)
    options = parser.parse_args(arguments)
    with exit_on_mistake("replay"):
        comparisons = replay(options.folder, options.device, trust_remote_code=options.trust_remote_code)
    print(f"{'tensor':28} {'difference':>12} {'position':>12} {'size':>12}")
    rows = [table_row(comparison, options.tolerance) for comparison in comparisons]
    print("\n".join(text for text, _ in rows))
    differing = sum(differs for _, differs in rows)
    print(f"{differing} lines differ" if differing else "the replay equals the run")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
