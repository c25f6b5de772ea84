"""Rank program: faults of vLLM end with a message: `python vllm_faults.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from rlhf_models import make_trainer, prompts_of

from dschat.distributed import launch
from dschat.generation import SamplingParams
from dschat.generation.vllm import engine as vllm_engine
from dschat.models.weights import full_weights
from dschat.rlhf.ppo_trainer import DeepSpeedPPOTrainer
from dschat.rlhf.rollouts.engine_check import RolloutMismatch


def iterate(trainer: DeepSpeedPPOTrainer, iteration: int) -> None:
    trainer.train_rlhf(trainer.rollout(prompts_of(trainer), iteration=iteration).experience)


def raised(kind: type[Exception], call) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def check_stale_weights(trainer: DeepSpeedPPOTrainer) -> None:
    """Each kind of weight that is not renewed is named: a matrix that vLLM fuses and packs, a norm, all."""
    old = {name: weight.detach().clone() for name, weight in full_weights(trainer.engine.policy)}
    streamed = vllm_engine.StreamedWeights
    for number, stale in enumerate(("model.layers.1.mlp.up_proj.weight", "model.norm.weight", "")):

        class Stale(streamed):
            def __iter__(self, stale=stale):
                for name, weight in super().__iter__():
                    yield name, old[name] if stale in name else weight

        iterate(trainer, 10 + number)
        vllm_engine.StreamedWeights = Stale
        message = raised(RuntimeError, lambda: iterate(trainer, 20))
        assert "stale weights" in message, message
        assert {0: "layers.1.mlp.gate_up_proj", 1: "model.norm", 2: "embed_tokens"}[number] in message, message
        vllm_engine.StreamedWeights = streamed
        iterate(trainer, 30 + number)  # the next sync loads them all


def check_tied_head(trainer: DeepSpeedPPOTrainer) -> None:
    """Without repacking, a tied head computes with the weights before."""
    repack, vllm_engine.repack_weights = vllm_engine.repack_weights, lambda model: None
    message = raised(RuntimeError, lambda: iterate(trainer, 40))
    assert "1 of" in message and "lm_head" in message, message
    vllm_engine.repack_weights = repack
    iterate(trainer, 41)


def check_sampling_distribution(trainer: DeepSpeedPPOTrainer) -> None:
    """Log-probs of another temperature end the run, also between the iterations that --check_rollouts_every names."""
    trainer.rollouts.temperature = 2.0  # of the policy's log-probs; the engine samples with 0.7
    sampling = type(trainer).sampling
    type(trainer).sampling = property(lambda self: SamplingParams(0.7))
    trainer.engine_check.every = 1
    message = raised(RolloutMismatch, lambda: iterate(trainer, 50))
    assert "another temperature" in message and "doctor" in message
    type(trainer).sampling, trainer.rollouts.temperature = sampling, 0.7


def check_failed_requests(trainer: DeepSpeedPPOTrainer) -> None:
    actor = trainer.engine.actor
    generate = actor._llm.generate

    def aborted(*arguments, **keywords):
        outputs = generate(*arguments, **keywords)
        outputs[1].outputs[0].finish_reason = "abort"
        return outputs

    def dead(*arguments, **keywords):
        raise RuntimeError("engine died")

    actor._llm.generate = aborted
    assert "ended by 'abort'" in raised(RuntimeError, lambda: iterate(trainer, 60))
    actor._llm.generate = dead
    assert "engine died" in raised(RuntimeError, lambda: iterate(trainer, 61))
    actor._llm.generate = generate
    iterate(trainer, 62)
    outside = {"max_new_tokens": 2, "eos_token_ids": None, "pad_token_id": 0}
    assert "with engine.generation()" in raised(RuntimeError, lambda: actor.generate([[3]], **outside))
    with actor.generation():
        assert "already entered" in raised(RuntimeError, lambda: actor.generation().__enter__())
        long = "position" in raised(ValueError, lambda: actor.generate([[3] * 200], **outside))
    assert long


def main() -> None:
    launch.join(seed=0)
    trainer = make_trainer(
        Path(sys.argv[1]), rollout_engine="vllm", actor_learning_rate=1e-2, check_rollouts_every=1
    )
    iterate(trainer, 0)
    tied = trainer.engine.policy.module.model.config.tie_word_embeddings
    untied = [check_stale_weights, check_sampling_distribution, check_failed_requests]
    for check in [check_tied_head] if tied else untied:
        check(trainer)
    print("all faults ended with a message")


if __name__ == "__main__":
    launch.run(main)
