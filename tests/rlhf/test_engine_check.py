"""The comparison of a rollout engine's log-probs with the policy's during a run."""

import pytest
import torch
from rlhf_models import make_trainer, prompts_of, save_models

from dschat.generation import SamplingParams
from dschat.rlhf.rollouts.engine_check import EngineCheck, RolloutMismatch

MASK = torch.tensor([[True, True, True, False]])


def check_of(**changes):
    settings = {"every": 2, "dtype": torch.float32, "sampling": SamplingParams(0.7), "vocabulary": 9} | changes
    return EngineCheck(**settings)


def compare(check, difference, iteration=0):
    """Log-probs of the policy that are larger by `difference`; what is masked never counts."""
    logprobs = torch.full((1, 4), -2.0)
    logprobs[0, 3] = torch.nan
    check.check(logprobs, logprobs - difference, MASK, iteration=iteration)


def test_it_is_due_in_the_first_iteration_and_every_nth():
    check = check_of(every=3)
    assert check.is_due(7)  # the first of a resumed run
    compare(check, 0.0)
    assert [number for number in range(10) if check.is_due(number)] == [0, 3, 6, 9]
    once = check_of(every=0)
    assert once.is_due(0)
    compare(once, 0.0)
    assert not any(once.is_due(number) for number in range(10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_difference_beyond_rounding_ends_the_run(dtype):
    small, large = {torch.float32: (1e-4, 0.02), torch.bfloat16: (0.05, 0.5)}[dtype]
    check = check_of(dtype=dtype)
    compare(check, small)
    for difference in (large, -large, float("nan")):
        with pytest.raises(RolloutMismatch, match="doctor.py"):
            compare(check_of(dtype=dtype), difference)


def test_a_difference_that_grows_ends_the_run():
    check = check_of(dtype=torch.bfloat16)
    compare(check, 0.01)
    compare(check, 0.05, iteration=2)
    with pytest.raises(RolloutMismatch, match="iteration 5: .* more than the 0.08"):
        compare(check, 0.1, iteration=4)


def test_quantised_weights_may_differ_but_not_grow():
    check = check_of(same_weights=False)
    compare(check, 0.5)
    compare(check, 2.0)
    with pytest.raises(RolloutMismatch):
        compare(check, 5.0)


def test_a_truncated_distribution_gives_tokens_more_probability_never_less():
    check = check_of(sampling=SamplingParams(0.7, top_p=0.5))
    compare(check, -0.5)  # the policy's is smaller by the mass that was cut
    with pytest.raises(RolloutMismatch):
        compare(check, 0.5)


@pytest.mark.usefixtures("single_rank_group")
@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout"])
def test_a_trainer_stops_before_the_update(tmp_path, old_logprobs):
    """With --old_logprobs rollout only engines with weights of their own are rescored, on a few rows."""
    trainer = make_trainer(save_models(tmp_path), old_logprobs=old_logprobs)
    trainer.rollout(prompts_of(trainer), iteration=0)
    assert (trainer.engine_check.first is None) == (old_logprobs == "rollout")
    capabilities = trainer.engine.actor.capabilities
    trainer.engine.actor.capabilities = type(capabilities)(streams=True, reproducible=True, separate_weights=True)
    generate = trainer.engine.actor.generate

    def shifted(prompts, **request):
        rollout = generate(prompts, **request)
        rollout.logprobs = rollout.logprobs - 0.5
        return rollout

    trainer.engine.actor.generate = shifted
    with pytest.raises(RolloutMismatch, match="iteration 51"):
        trainer.rollout(prompts_of(trainer), iteration=50)
