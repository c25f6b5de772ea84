"""Rank program: a step of every objective, cut and packed in several ways: `python step_equality_ranks.py FOLDER`.

The first rank writes FOLDER/<ranks>.pt: for each case metrics and gradients, which test_step_equality compares. One
process must run first: it also writes the reference (padded rows, one in each forward pass, by torch's kernels) and
the rollouts.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from rlhf_models import make_trainer, prompts_of
from step_objectives import objectives, rows_of

from dschat import arguments
from dschat.data.micro_batches import limit_of
from dschat.distributed import collectives, launch
from dschat.generation import Rollout
from dschat.models.backbone import Packing
from dschat.models.causal_lm import TokenLogprobs, load_causal_lm, load_tokenizer
from dschat.models.scalar_head import TokenScores, load_scalar_head
from dschat.models.weights import full_shape, gathered
from dschat.rlhf.experience import Experience
from dschat.rlhf.ppo_trainer import DeepSpeedPPOTrainer
from dschat.runs.fit import Objective, build_engine, forward_tokens, share, train_step
from dschat.runs.network_loading import load_network
from dschat.runs.throughput import trained_model

Result = tuple[dict[str, float], dict[str, torch.Tensor]]  # metrics, and gradients by parameter
LORA = {"lora_dim": 2, "only_optimize_lora": True}
CHECKPOINTING = {"gradient_checkpointing": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "zero 0": {"zero": 0}, "zero 2": {"zero": 2}, "zero 3, checkpointing": {"zero": 3, **CHECKPOINTING},
    "lora, zero 0, checkpointing": {"zero": 0, **LORA, **CHECKPOINTING}, "lora, zero 3": {"zero": 3, **LORA},
}  # fmt: skip
OF_RANKS = {1: ["zero 0", "zero 3, checkpointing", "lora, zero 0, checkpointing"], 2: list(OPTIONS)}
# Tokens of a micro-batch, and how it is run; some rows exceed the smaller budget alone.
FULL = Packing(remove_padding=True, share_prompts=True)
WAYS = {
    "small budget": (26, FULL), "one micro-batch": (10_000, FULL), "all prompts": (40, Packing(remove_padding=True)),
    "padded": (70, Packing()),
}  # fmt: skip
REFERENCE = (1, Packing())
ALGORITHMS = {
    "ppo": {"algorithm": "ppo", "entropy_coef": 0.1, "value_clip_range": 0.1, "num_samples_per_prompt": 2},
    "grpo": {"algorithm": "grpo", "num_samples_per_prompt": 4, "kl_in": "loss", "rollout_correction": "tis"},
}  # fmt: skip


def engine_of(root: Path, kind: str, option: dict[str, Any], *, remove_padding: bool) -> deepspeed.DeepSpeedEngine:
    """As in steps 1 and 2; a learning rate of 0 keeps the weights for the next step."""
    option = dict(option)
    folder = root / {"causal": "actor", "scalar": "reward"}[kind]
    settings = arguments.OneModelSettings(
        model=arguments.PolicyArguments(
            model_name_or_path=str(folder), learning_rate=0.0, zero_stage=option.pop("zero"),
            lora_dim=option.pop("lora_dim", 0),
        ),
        lora=arguments.LoraArguments(
            only_optimize_lora=option.pop("only_optimize_lora", False), lora_module_name="layers.",
            lora_learning_rate=0.0,
        ),
        optimizer=arguments.OptimizerArguments(max_grad_norm=0.0),
        devices=arguments.DeviceArguments(
            dtype="fp32", remove_padding=remove_padding, kernels="auto" if remove_padding else "torch", **option
        ),
    )  # fmt: skip
    load_model, wrapper = {
        "causal": (load_causal_lm, TokenLogprobs), "scalar": (load_scalar_head, TokenScores),
    }[kind]  # fmt: skip
    load = partial(
        load_network, load_model=load_model, wrapper=wrapper, settings=settings, tokenizer=load_tokenizer(folder)
    )
    unused = Objective(collate=dict, count=len, loss_of=lambda *_: None, evaluation=dict)
    engine = build_engine(load, unused, settings, total_steps=10)
    return engine


@torch.no_grad()
def perturb_adapters(engine: deepspeed.DeepSpeedEngine) -> None:
    """B is 0 at first, and then the gradient of A is 0 too. A step restores it from the optimizer's partition."""
    for number, (name, parameter) in enumerate(engine.module.named_parameters()):
        if "lora_B" in name:
            values = torch.randn(full_shape(parameter), generator=torch.Generator().manual_seed(number)) * 0.3
            with gathered([parameter], modifier_rank=0):
                parameter.copy_(values)


def record_gradients(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Filled before each optimizer step with the gradient of the whole step, summed over the ranks."""
    gradients, step = {}, engine.step

    def recorded() -> None:
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad if engine.zero_optimization_stage() == 0 else safe_get_full_grad(parameter)
                gradients[name] = torch.zeros(full_shape(parameter)) if gradient is None else gradient.clone().float()
        step()

    engine.step = recorded
    return gradients


THROUGHPUT = ("tokens_per_second", "samples_per_second", "padding", "mfu", "memory_gib", "peak_memory_gib")


def one_model_steps(root: Path, option: dict[str, Any], ways: dict[str, tuple], *, remove_padding: bool) -> dict:
    """(objective, way) → result."""
    tokenizer = load_tokenizer(root / "actor")
    results: dict[tuple[str, str], Result] = {}
    for kind in ("causal", "scalar"):
        engine = engine_of(root, kind, option, remove_padding=remove_padding)
        assert engine.module.packing == (FULL if remove_padding else Packing())
        gradients = record_gradients(engine)
        for name, (row_kind, model_kind, objective) in objectives(tokenizer.pad_token_id).items():
            rows = rows_of(row_kind, len(tokenizer), root / f"arrow-{collectives.rank()}")
            for way, (budget, packing) in ways.items() if model_kind == kind else ():
                engine.module.backbone.packing = packing
                perturb_adapters(engine)
                limit = limit_of(engine.module, rows=2, max_tokens=budget)
                indices = list(range(min(7, len(rows))))
                parts = share(forward_tokens(rows, padded=limit.padded), indices, limit)
                metrics = train_step(engine, objective, rows, parts, trained_model(engine, limit))
                metrics = {name: x for name, x in metrics.items() if name not in THROUGHPUT}
                results[name, way] = metrics, dict(gradients)
        engine.destroy()
    return results


def trainer_of(root: Path, name: str, option: dict[str, Any], *, remove_padding: bool) -> DeepSpeedPPOTrainer:
    option = dict(option)
    stage, dim = option.pop("zero"), option.pop("lora_dim", 0)
    return make_trainer(
        root, **ALGORITHMS[name], **option, actor_zero_stage=stage, critic_zero_stage=stage, actor_lora_dim=dim,
        critic_lora_dim=dim, lora_module_name="layers.", lora_learning_rate=0.0, actor_learning_rate=0.0,
        critic_learning_rate=0.0, remove_padding=remove_padding, kernels="auto" if remove_padding else "torch",
    )  # fmt: skip


def perturbed_experience(trainer: DeepSpeedPPOTrainer) -> Experience:
    """A rollout as after some updates: other old and reference log-probs and values, two rows that are not trained."""
    experience = trainer.generate_experience(prompts_of(trainer))
    generator = torch.Generator().manual_seed(1)
    mask = experience.response_mask
    for name, scale in {"old_logprobs": 0.1, "rollout_logprobs": 0.2, "ref_logprobs": 0.3, "values": 0.2}.items():
        if (tensor := getattr(experience, name)) is not None:
            setattr(experience, name, tensor + scale * mask * torch.randn(mask.shape, generator=generator))
    experience.advantages = mask * torch.randn(mask.shape, generator=generator)
    experience.trained[[1, 6]] = False
    return experience


def scoring_sums(trainer: DeepSpeedPPOTrainer, own: Experience) -> dict[str, float]:
    """Over all ranks: Σ x² of the log-probs, entropies and values that scoring computes of these rollouts."""
    mask = own.response_mask
    rollout = Rollout(own.sequences, own.attention_mask, mask, own.rollout_logprobs, own.ended)
    with torch.no_grad():
        outputs = vars(trainer.model_outputs(rollout, "recompute"))
    names = [name for name, output in outputs.items() if output is not None]
    sums = collectives.sum_over_ranks(torch.stack([outputs[name][mask].double().square().sum() for name in names]))
    return {f"scoring {name}": value for name, value in zip(names, sums.tolist(), strict=True)}


def rlhf_steps(root: Path, option: dict[str, Any], ways: dict[str, tuple], *, remove_padding: bool) -> dict:
    """(algorithm, way) → result; gradients of actor and critic together."""
    results: dict[tuple[str, str], Result] = {}
    rank, ranks = collectives.rank(), collectives.world_size()
    for name in ALGORITHMS:
        trainer = trainer_of(root, name, option, remove_padding=remove_padding)
        kind = "lora" if "lora_dim" in option else "full"
        file = root / f"{name}-{kind}.pt"
        if not remove_padding:
            for engine in trainer.engine.trained.values():
                perturb_adapters(engine)
            torch.save(perturbed_experience(trainer).tensors(), file)
        experience = Experience(**torch.load(file))
        group = trainer.ppo.num_samples_per_prompt
        own = experience.rows([row for row in range(len(experience)) if row // group % ranks == rank])
        gradients = {kind: record_gradients(engine) for kind, engine in trainer.engine.trained.items()}
        for way, (budget, packing) in ways.items():
            for engine in trainer.engine.trained.values():
                engine.module.backbone.packing = packing
                perturb_adapters(engine)
            trainer.engine.devices = replace(trainer.engine.devices, max_tokens_per_micro_batch=budget)
            metrics = scoring_sums(trainer, own) | trainer.train_rlhf(own, measure_mismatch=True)
            named = {f"{kind} {key}": value for kind, own in gradients.items() for key, value in own.items()}
            results[name, way] = metrics, named
        for engine in trainer.engine.trained.values():
            engine.destroy()
    return results


if __name__ == "__main__":
    launch.join(seed=0)
    folder, results = Path(sys.argv[1]), {}
    if collectives.world_size() == 1:
        for kind, option in {"full": {"zero": 0}, "lora": {"zero": 0, **LORA}}.items():
            for steps in (one_model_steps, rlhf_steps):
                found = steps(folder, option, {"reference": REFERENCE}, remove_padding=False)
                results |= {("reference", kind, objective): result for (objective, _), result in found.items()}
    for option in OF_RANKS[collectives.world_size()]:
        for steps in (one_model_steps, rlhf_steps):
            found = steps(folder, OPTIONS[option], WAYS, remove_padding=True)
            results |= {(option, *case): result for case, result in found.items()}
    if collectives.is_main():
        torch.save(results, folder / f"{collectives.world_size()}.pt")
    collectives.barrier()
    dist.destroy_process_group()
