"""Replay an update of step 3 in one process, from the files of `--dump_step N`, and show where tensors differ.

    python scripts/replay.py output/ppo/dump/step-00000007

Each line compares a tensor of the run with its float32 replay: largest absolute difference, its position (rank, row,
column), and largest magnitude. Start debugging at the first line over --tolerance. The replay runs without dropout, so
runs with --actor_dropout differ from logprobs on; for LoRA, its gradients are those of the full weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dschat.arguments import PPOArguments
from dschat.arguments.models import TRUST_HELP
from dschat.arguments.script_inputs import existing_folder, exit_on_mistake, number_type, read_json
from dschat.losses.value import value_loss
from dschat.models.causal_lm import TokenLogprobs, load_causal_lm
from dschat.models.scalar_head import TokenScores, load_scalar_head
from dschat.rlhf.experience import Experience
from dschat.rlhf.ppo_trainer import estimate_advantages
from dschat.rlhf.updates.actor_loss import ActorLoss
from dschat.rlhf.updates.optimizer_steps import StepCounts

SETTINGS = {"processes": int, "temperature": (int, float), "max_answer_seq_len": int, "kl_coef": (int, float),
            "ppo": dict}  # fmt: skip


def settings_of(folder: Path) -> tuple[dict[str, Any], PPOArguments]:
    """The flags saved in the dump. Raises ValueError with the file name if it is not a dump."""
    path = folder / "settings.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no settings.json: name a folder that --dump_step wrote")
    settings = read_json(path)
    wrong = [name for name, kind in SETTINGS.items() if not isinstance(settings, dict)
             or not isinstance(settings.get(name), kind)]  # fmt: skip
    if wrong or settings["processes"] < 1:
        wrong = wrong or ["processes"]
        raise ValueError(f"{path}: {', '.join(wrong)} is missing or wrong: was it written by --dump_step?")
    unknown = settings["ppo"].keys() - {field.name for field in dataclasses.fields(PPOArguments)}
    if unknown:
        raise ValueError(f"{path}: this version knows no flag {', '.join(sorted(unknown))}: replay with the run's own")
    return settings, PPOArguments(**settings["ppo"])


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Load the tensors of a file. Raises ValueError with the file name if that fails."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: not readable as safetensors ({error})") from error


def experiences(folder: Path, processes: int) -> list[Experience]:
    """The first minibatch of every rank."""
    parts = []
    for rank in range(processes):
        path = folder / f"iteration_rank{rank}.safetensors"
        fields = {n.removeprefix("0."): t for n, t in tensors_of(path).items() if n.startswith("0.")}
        try:
            parts.append(Experience(**fields))
        except TypeError as error:
            raise ValueError(f"{path}: its tensors are not those of an Experience ({error})") from error
    return parts


def replay(folder: Path, device: torch.device, *, trust_remote_code: bool = False) -> list[tuple[str, Tensor, Tensor]]:
    """Run the update and return (name, tensor of the run, tensor of the replay)."""
    settings, ppo = settings_of(folder)
    metrics = read_json(folder / "metrics.json")
    ranks = experiences(folder, settings["processes"])
    loading = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
    actor = TokenLogprobs(load_causal_lm(folder / "actor", **loading)).to(device).eval()
    critic = None
    if ppo.trains_critic:
        critic = TokenScores(load_scalar_head(folder / "critic", **loading)).to(device).eval()
    counts = StepCounts(
        tokens=float(sum(part.trained_mask.sum() for part in ranks)),
        responses=float(sum(part.trained_mask.any(-1).sum() for part in ranks)),
    )
    loss_of_actor = ActorLoss(ppo, max_tokens=settings["max_answer_seq_len"])
    rows: list[tuple[str, Tensor, Tensor]] = []
    sums: dict[str, float] = defaultdict(float)
    for rank, whole in enumerate(ranks):
        theirs = tensors_of(folder / f"update_rank{rank}.safetensors")
        if critic is not None:
            _, returns = estimate_advantages(whole, ppo=ppo)
            rows.append((f"rank {rank} returns", whole.returns, returns * whole.response_mask))
        size = ppo.per_device_training_batch_size
        for number, start in enumerate(range(0, len(whole), size)):
            part = whole.rows(range(start, start + size))
            part = Experience(**{name: tensor.to(device) for name, tensor in part.tensors().items()})
            columns = part.response_mask.shape[1]
            logprobs, entropy = actor(
                part.sequences, part.attention_mask, part.loss_mask, settings["temperature"], True
            )
            logprobs, entropy = logprobs[:, -columns:], entropy[:, -columns:]
            loss, said = loss_of_actor(logprobs, entropy, part, counts, kl_coef=settings["kl_coef"])
            found = {"logprobs": logprobs, "policy_loss": loss}
            loss.backward()
            sums["policy_loss"] += float(said["policy_loss"])
            if critic is not None:
                values = critic(part.sequences, part.attention_mask)[:, -columns - 1 : -1]
                off, _ = value_loss(
                    values, part.values, part.returns, part.trained_mask, value_clip_range=ppo.value_clip_range,
                    normalizer=counts.tokens,
                )  # fmt: skip
                off.backward()
                found |= {"values": values, "value_loss": off}
                sums["value_loss"] += float(off)
            for name, tensor in found.items():
                if f"{name}.{number}" not in theirs:
                    continue  # --actor_freeze_steps: the run did not update the actor
                mask = part.response_mask if tensor.dim() else torch.ones((), dtype=torch.bool, device=device)
                rows.append(
                    (f"rank {rank} {name}.{number}", theirs[f"{name}.{number}"] * mask.cpu(), (tensor * mask).detach())
                )
    found = sums | {"actor_grad_norm": grad_norm(actor)}
    found |= {"critic_grad_norm": grad_norm(critic)} if critic is not None else {}
    for name, value in ((name, value) for name, value in found.items() if name in metrics):
        rows.append((name, torch.tensor(torch.nan if metrics[name] is None else metrics[name]), torch.tensor(value)))
    return rows


def grad_norm(model: nn.Module) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def line(name: str, theirs: Tensor, ours: Tensor, tolerance: float) -> tuple[str, bool]:
    """One line of the table, and whether the tensors differ by more than the tolerance."""
    theirs, ours = theirs.double().cpu(), ours.double().cpu()
    off = (theirs - ours).abs()
    off = torch.where(off.isnan(), torch.inf, off)
    worst = float(off.max())
    size = float(theirs[theirs.isfinite()].abs().max()) if theirs.isfinite().any() else 0.0
    where = "" if off.dim() == 0 else str(tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape)))
    parts = worst > tolerance * max(size, 1.0)
    return f"{name:28} {worst:12.3g} {where:>12} {size:12.4g}{'   <- parts here' if parts else ''}", parts


def device_of(name: str) -> torch.device:
    """argparse type: a device that is available."""
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{name!r} is no device here ({str(error).splitlines()[0]})") from error


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=existing_folder, help="OUTPUT_DIR/dump/step-N of a run with --dump_step N")
    parser.add_argument("--tolerance", type=number_type(float, at_least=0), default=1e-3,
                        help="relative to the largest number (default: 1e-3)")  # fmt: skip
    parser.add_argument("--device", type=device_of, default="cpu")
    parser.add_argument("--trust_remote_code", action="store_true", help=TRUST_HELP)
    options = parser.parse_args(arguments)
    with exit_on_mistake("replay"):
        rows = replay(options.folder, options.device, trust_remote_code=options.trust_remote_code)
    print(f"{'tensor':28} {'difference':>12} {'at':>12} {'size':>12}")
    apart = 0
    for name, theirs, ours in rows:
        text, parts = line(name, theirs, ours, options.tolerance)
        print(text)
        apart += parts
    print("the replay gives what the run gave" if not apart else f"{apart} lines part")
    return int(bool(apart))


if __name__ == "__main__":
    sys.exit(main())
