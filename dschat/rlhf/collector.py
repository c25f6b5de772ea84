"""Collects the experience of an iteration: assigns prompts to ranks, rolls out, resamples groups of equal scores."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from datasets import Dataset

from dschat.data.batches import GlobalBatches
from dschat.data.collators import collate_prompts
from dschat.distributed import collectives, groups
from dschat.rlhf.experience import Experience, MiniDataset
from dschat.rlhf.iteration import Iteration
from dschat.rlhf.ppo_trainer import DeepSpeedPPOTrainer
from dschat.rlhf.rollouts.metrics import experience_sums
from dschat.rlhf.rollouts.result import Timings
from dschat.rlhf.rollouts.score_shaping import flat_groups
from dschat.rlhf.updates.rank_balance import balance_over_ranks


class RolloutCollector:
    """Collects the rollouts of an iteration. Slot i holds the group of one prompt and belongs to rank i mod W.

    Args:
        trainer: rolls out and scores.
        dataset: splits the experience into minibatches.
        prompts: rows of kind "prompt".
        batches: order of the rows; a global batch has as many rows as an iteration has slots.

    Attributes:
        prompts_consumed: prompts used so far by all ranks, counted over all epochs.
    """

    def __init__(
        self, trainer: DeepSpeedPPOTrainer, dataset: MiniDataset, prompts: Dataset, batches: GlobalBatches
    ) -> None:
        self.trainer, self.dataset, self.prompts, self.batches = trainer, dataset, prompts, batches
        self.prompts_consumed = 0

    def collect(self, number: int) -> Iteration:
        """Collect the experience of an iteration, split into minibatches. A collective.

        With --dynamic_sampling N, slots whose group has no response to train on (such as equal scores) get new prompts,
        up to N times; other groups are kept. A slot that still has none after the last attempt keeps its last group.
        """
        iteration, ppo = Iteration(), self.trainer.ppo
        slots: Sequence[int] = range(self.batches.global_batch_size)
        group_of: dict[int, Experience] = {}
        minibatches: list[Experience] | None = []
        for attempt in range(1 + ppo.dynamic_sampling):
            for part, local_slots in self.roll_out(number, attempt, slots, iteration):
                if not ppo.dynamic_sampling:
                    minibatches = self.dataset.add(part, iteration=number)
                    continue
                size = ppo.num_samples_per_prompt
                group_of |= {slot: part.rows(range(i * size, (i + 1) * size)) for i, slot in enumerate(local_slots)}
            untrained_slots = [slot for slot, group in group_of.items() if not group.trained.any()]
            slots = sorted(collectives.all_gather_lists(untrained_slots))
            if not slots:
                break
        if group_of:
            size = self.trainer.rollouts.per_device_generation_batch_size
            local_slots = sorted(group_of)
            for start in range(0, len(local_slots), size):
                part = Experience.concatenate([group_of[slot] for slot in local_slots[start : start + size]])
                minibatches = self.dataset.add(part, iteration=number)
        iteration.minibatches = [
            balance_over_ranks(minibatch, group_size=ppo.num_samples_per_prompt) for minibatch in minibatches
        ]
        return iteration

    def roll_out(
        self, number: int, attempt: int, slots: Sequence[int], iteration: Iteration
    ) -> list[tuple[Experience, list[int]]]:
        """Roll out the next prompts for these slots of all ranks; returns this rank's experiences with their slots.

        A slot's rollout batch does not depend on world size or attempt, as the batch determines how scores are
        normalised. Sample ids are made of attempt and slot: independent of world size, and unique even for
        duplicated rows.
        """
        trainer, ranks = self.trainer, groups.data_parallel_size()
        size = trainer.rollouts.per_device_generation_batch_size * ranks
        rows = {slot: self.row(self.prompts_consumed + position) for position, slot in enumerate(slots)}
        self.prompts_consumed += len(slots)
        parts = []
        for _, batch_slots in groupby(slots, key=lambda slot: slot // size):
            all_slots = list(batch_slots)
            local_slots = [slot for slot in all_slots if slot % ranks == groups.data_parallel_rank()]
            slots_to_roll_out = local_slots or all_slots[:1]  # a rank without slots takes part in the collectives
            sample_ids = [attempt * self.batches.global_batch_size + slot for slot in slots_to_roll_out]
            batch = collate_prompts([self.prompts[rows[slot]] for slot in slots_to_roll_out])
            result = trainer.rollout(batch, iteration=number, sample_ids=sample_ids, update_moments=bool(local_slots))
            part = result.experience
            if trainer.ppo.dynamic_sampling:
                flat = flat_groups(part.scores, part.has_score, trainer.ppo.num_samples_per_prompt)
                part.trained &= ~flat.repeat_interleave(trainer.ppo.num_samples_per_prompt)
            iteration.sums.append(experience_sums(
                result, 1.0 if local_slots else 0.0, judged=trainer.judge is not None,
                group_size=trainer.ppo.num_samples_per_prompt,
            ))  # fmt: skip
            iteration.timings = Timings(iteration.timings, result.timings)
            iteration.samples += result.samples if local_slots else []
            parts += [(part, local_slots)] if local_slots else []
        return parts

    def row(self, position: int) -> int:
        """The row index of the training prompt at this position, counted over all epochs."""
        step, offset = divmod(position, self.batches.global_batch_size)
        return self.batches.step(step)[offset]
