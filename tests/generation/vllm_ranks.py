"""Rank program: rollouts of vLLM follow the policy's weights: `python vllm_ranks.py FOLDER SETTINGS`.

SETTINGS are a JSON object of flags. Every rank checks its own rollouts.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import deepspeed
import numpy as np
import torch
from rlhf_models import QUESTIONS, make_trainer, prompts_of

from dschat.distributed import collectives, launch
from dschat.generation import HybridEngine
from dschat.rlhf.ppo_trainer import DeepSpeedPPOTrainer
from dschat.rlhf.rollouts import diagnosis
from dschat.rlhf.rollouts.diagnosis import Scoring
from dschat.rlhf.rollouts.logprob_mismatch import log_ratio

ROUNDING = 1e-4  # nats, float32


def generators() -> tuple:
    return random.getstate()[1], tuple(np.random.get_state()[1]), tuple(torch.get_rng_state().tolist())


def greedy(trainer: DeepSpeedPPOTrainer, engine, prompts: list[list[int]]) -> list[list[int]]:
    with engine.generation():
        return engine.generate(
            prompts, max_new_tokens=[3, 6, 5, 6][: len(prompts)], eos_token_ids=trainer.stop_ids,
            pad_token_id=trainer.tokenizer.pad_token_id, sampling=replace(trainer.sampling, temperature=0.0),
        ).responses()  # fmt: skip


def check(root: Path, settings: dict) -> None:
    launch.join(seed=0)
    before = generators(), torch.get_num_threads(), torch.set_num_threads
    trainer = make_trainer(root, rollout_engine="vllm", actor_learning_rate=1e-2, **settings)
    assert (torch.get_num_threads(), torch.set_num_threads) == before[1:]
    actor = trainer.engine.actor
    own = QUESTIONS[collectives.rank() :: collectives.world_size()][: 4 - collectives.rank()]  # unequal numbers
    prompts, earlier = prompts_of(trainer, own), None
    for iteration in range(3):
        state = generators()
        rollout = trainer.generate(prompts, trainer.sampling, iteration=iteration, sample_ids=range(len(own)))
        assert generators() == state, "sampling uses the process's own random numbers"
        assert actor.syncs == iteration + 1
        again = trainer.generate(prompts, trainer.sampling, iteration=iteration, sample_ids=range(len(own)))
        assert actor.syncs == iteration + 1, "weights were loaded again without an update"
        assert torch.equal(again.sequences, rollout.sequences)
        if earlier is not None:  # other random numbers, so other tokens, and the weights have changed
            assert rollout.responses() != earlier
        earlier = rollout.responses()
        sampling = trainer.sampling
        model = trainer.engine.policy.module.model
        assert int(rollout.sequences.max()) < trainer.vocabulary_size
        if sampling.truncates(model.config.vocab_size):  # log-probs of the truncated distribution
            delta = diagnosis.delta(model, rollout, Scoring(sampling=sampling))
        else:
            outputs = trainer.model_outputs(rollout, "recompute")
            delta = log_ratio(outputs.old_logprobs, rollout.logprobs, rollout.response_mask)
        assert float(delta.abs().max()) < ROUNDING, f"iteration {iteration}: {float(delta.abs().max())} nats"
        expected = greedy(trainer, HybridEngine(trainer.engine.policy), prompts["prompts"])
        assert greedy(trainer, actor, prompts["prompts"]) == expected
        result = trainer.rollout(prompts, iteration=iteration)
        trainer.train_rlhf(result.experience)
    change_without_a_step(trainer)
    trainer.generate(prompts, trainer.sampling, iteration=9, sample_ids=range(len(own)))
    assert actor.syncs == 4, "weights that change without a step are loaded too"
    if collectives.is_main():
        print("rollouts follow the policy")


@torch.no_grad()
def change_without_a_step(trainer: DeepSpeedPPOTrainer) -> None:
    for parameter in trainer.engine.policy.parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.mul_(1.01)


if __name__ == "__main__":
    launch.run(lambda: check(Path(sys.argv[1]), json.loads(sys.argv[2])))
