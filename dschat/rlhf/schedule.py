"""Length of a step 3 run: prompts per iteration, updates per iteration, iterations."""

from dataclasses import dataclass

from datasets import Dataset

from dschat.arguments import RLHFSettings
from dschat.arguments.command_line import as_settings_errors
from dschat.data.batches import GlobalBatches
from dschat.distributed import groups


@dataclass(frozen=True, kw_only=True)
class RLHFSchedule:
    """The prompts of every iteration, and how many iterations and updates there are.

    Attributes:
        batches: the prompts of each iteration, over all ranks.
        iterations: rollouts of the whole run.
        minibatch_size: responses per update and device.
        updates_per_iteration: optimizer steps of each trained model.
    """

    batches: GlobalBatches
    iterations: int
    minibatch_size: int
    updates_per_iteration: int

    @property
    def total_updates(self) -> int:
        return self.iterations * self.updates_per_iteration


def rlhf_schedule(prompts: Dataset, settings: RLHFSettings) -> RLHFSchedule:
    """Schedule of a run. Raises SettingsError if there are too few prompts for an iteration."""
    rollouts, ppo, run = settings.rollouts, settings.ppo, settings.run
    prompts_per_rank = rollouts.per_device_generation_batch_size * rollouts.generation_batches
    minibatch_size = ppo.per_device_training_batch_size * settings.optimizer.gradient_accumulation_steps
    with as_settings_errors():
        batches = GlobalBatches(
            prompts["length"], global_batch_size=prompts_per_rank * groups.data_parallel_size(), seed=run.seed,
            group_by_length=False,
        )  # fmt: skip
    return RLHFSchedule(
        batches=batches, iterations=run.max_steps or run.num_train_epochs * len(batches), minibatch_size=minibatch_size,
        updates_per_iteration=ppo.ppo_epochs * prompts_per_rank * ppo.num_samples_per_prompt // minibatch_size,
    )  # fmt: skip
