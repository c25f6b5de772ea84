"""States in host memory during rollouts: device bytes are released, and training goes on as if nothing had moved."""

import pytest
import torch
from rlhf_models import group_of_one, make_trainer, prompts_of, save_models

from dschat.distributed.state_offload import StateOffload, optimizer_tensors

QUESTIONS = ["what is 1 plus 2", "what is 3 plus 4", "what is 5 plus 6", "what is 7 plus 8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


def states_of(trainer):
    """Every tensor in training, cloned: parameters, partitions, optimizer states."""
    tensors = []
    for engine in trainer.engine.trained.values():
        tensors += [parameter.detach().clone() for parameter in engine.module.parameters()]
        tensors += [tensor.detach().clone() for tensor in optimizer_tensors(engine.optimizer)]
    return tensors


def iterations(trainer, count):
    """Scores and losses of some iterations."""
    results = []
    for iteration in range(count):
        result = trainer.rollout(prompts_of(trainer, QUESTIONS), iteration=iteration)
        results.append((result.experience.sequences.tolist(), trainer.train_rlhf(result.experience)))
    return results


@pytest.mark.parametrize("dtype, stage", [("fp32", 0), ("bf16", 0), ("bf16", 2), ("bf16", 3), ("fp32", 3)])
def test_training_is_bit_for_bit_the_same_with_states_offloaded_during_rollouts(folder, dtype, stage):
    settings = {"dtype": dtype, "actor_zero_stage": stage, "critic_zero_stage": stage, "max_answer_seq_len": 6}
    results, states = {}, {}
    for offload in (False, True):
        with group_of_one():
            trainer = make_trainer(folder, offload_states_during_rollout=offload, **settings)
            assert (trainer.engine.state_offload is not None) is offload
            results[offload] = iterations(trainer, 3)
            states[offload] = states_of(trainer)
    assert repr(results[True]) == repr(results[False])
    assert len(states[True]) == len(states[False]) > 30
    assert all(torch.equal(a, b) for a, b in zip(states[True], states[False], strict=True))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_bytes_of_everything_but_the_actors_weights_are_released(folder, stage):
    with group_of_one():
        trainer = make_trainer(
            folder, offload_states_during_rollout=True, dtype="bf16", actor_zero_stage=stage, critic_zero_stage=stage
        )
        iterations(trainer, 1)  # optimizer states exist from the first step on
        engine, offload = trainer.engine, trainer.engine.state_offload
        parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.policy.module.parameters())
        moved = offload.storages()
        before = [storage.nbytes() for storage in moved]
        # fp32 master weights and two moments of actor and critic alone are 12 bytes a parameter each.
        assert sum(before) > 20 * parameters
        with offload.offloaded() as released:
            assert released == sum(before)
            assert all(storage.nbytes() == 0 for storage in moved)
            with engine.actor.generation():
                rollout = engine.actor.generate(
                    [[3, 4, 5]], max_new_tokens=4, eos_token_ids=None, pad_token_id=0
                )  # fmt: skip
        assert rollout.sequences.shape == (1, 7)
        assert [storage.nbytes() for storage in moved] == before


def test_states_come_back_after_an_exception(folder):
    with group_of_one():
        trainer = make_trainer(folder, offload_states_during_rollout=True)
        before = states_of(trainer)
        with pytest.raises(KeyError), trainer.engine.state_offload.offloaded():
            raise KeyError
        assert all(torch.equal(a, b) for a, b in zip(before, states_of(trainer), strict=True))


def test_storages_on_other_devices_stay(folder):
    with group_of_one():
        trainer = make_trainer(folder)
        assert StateOffload(trainer.engine.policy, device=torch.device("meta")).storages() == []
