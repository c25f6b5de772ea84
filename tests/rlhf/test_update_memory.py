"""Memory of scoring and of updates at a fixed token budget: that of one micro-batch, however many rows there are."""

import pytest
import torch
from allocated_bytes import AllocatedBytes
from rlhf_models import make_trainer, prompts_of, save_models

from dschat.generation import Rollout
from dschat.rlhf.experience import Experience

pytestmark = pytest.mark.usefixtures("single_rank_group")
BUDGET = 300  # tokens of a micro-batch
FEW, MANY = 16, 256
# Of results: old and reference log-probs, values, entropies, returns and what the losses keep of each token.
BYTES_PER_TOKEN = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


def peaks(folder, rows: int, **flags) -> tuple[int, int, int]:
    """Peak bytes of scoring and of an update of this many rows, and the columns of all rows."""
    trainer = make_trainer(folder, share_prompts=False, per_device_training_batch_size=rows, **flags)
    part = trainer.generate_experience(prompts_of(trainer))
    experience = Experience.concatenate([part] * (rows // len(part)))
    assert len(experience) == rows
    mask = experience.response_mask
    rollout = Rollout(
        experience.sequences, experience.attention_mask, mask, experience.rollout_logprobs, experience.ended
    )
    trainer.train_rlhf(experience)  # the optimizer's states exist from now on
    with AllocatedBytes() as scoring, torch.no_grad():
        trainer.model_outputs(rollout, "recompute")
    with AllocatedBytes() as update:
        trainer.train_rlhf(experience)
    return scoring.peak, update.peak, experience.sequences.numel()


def test_memory_of_scoring_and_updates_does_not_grow_with_the_rows(folder):
    few, many = (peaks(folder, rows, max_tokens_per_micro_batch=BUDGET) for rows in (FEW, MANY))
    unlimited = peaks(folder, MANY)
    for before, after, without_budget in zip(few[:2], many[:2], unlimited[:2], strict=True):
        assert after <= 1.1 * before + BYTES_PER_TOKEN * (many[2] - few[2])
        assert without_budget > 3 * after
