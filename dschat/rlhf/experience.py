"""The rollout buffer: scored rollouts (Experience), their advantages, their shuffled minibatches (MiniDataset)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dschat.arguments import PPOArguments
from dschat.rlhf.algorithms import ALGORITHMS, EstimatorInputs
from dschat.tensors import whiten


@dataclass
class Experience:
    """Rollouts with everything an update needs. B sequences, P prompt columns, T response columns.

    Attributes:
        sequences: [B, P+T] long, prompts left-padded, responses right-padded.
        attention_mask: [B, P+T] bool, True on prompt and response tokens.
        response_mask: [B, T] bool, True on response tokens, the final EOS too.
        rollout_logprobs, old_logprobs, ref_logprobs: [B, T] of decoder, actor and reference on the response tokens;
            with --old_logprobs rollout the first two are the same.
        entropy: [B, T] of the actor's distribution at each response token, nats; with --old_logprobs rollout the
            one-sample estimate −rollout_logprobs.
        values: [B, T], V of the state before each response token.
        scores: [B], scores of whole responses from --reward.
        has_score: [B] bool, False where scoring failed or returned none; that score is 0 and is ignored.
        ended: [B] bool, True where the response ended by EOS.
        trained: [B] bool, False for responses excluded from updates: without a score, truncated (--mask_truncated), or
            in a group whose scores are all equal (--dynamic_sampling).
        kl, rewards, advantages, returns: [B, T].

    Without a reference model ref_logprobs and kl are None, without a critic values and returns are. Where the only
    update on the rollout computes them (see DeepSpeedPPOTrainer), old_logprobs, entropy and kl are None, and values,
    advantages and returns are.
    """

    sequences: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    rollout_logprobs: Tensor
    scores: Tensor
    has_score: Tensor
    ended: Tensor
    trained: Tensor
    rewards: Tensor
    old_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    ref_logprobs: Tensor | None = None
    kl: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def loss_mask(self) -> Tensor:
        """[B, P+T] bool: response_mask over all columns."""
        return F.pad(self.response_mask, (self.sequences.shape[1] - self.response_mask.shape[1], 0))

    @property
    def prompt_lengths(self) -> Tensor:
        """[B] long, tokens of each prompt."""
        prompt_columns = self.sequences.shape[1] - self.response_mask.shape[1]
        return self.attention_mask[:, :prompt_columns].sum(dim=1)

    def without_tokens(self) -> "Experience":
        """The first row with an empty response_mask: a placeholder that adds 0 to every loss and metric."""
        row = self.rows([0])
        return replace(row, response_mask=torch.zeros_like(row.response_mask), trained=torch.zeros_like(row.trained))

    @property
    def trained_mask(self) -> Tensor:
        """[B, T] bool: the response tokens that updates train on."""
        return self.response_mask & self.trained.unsqueeze(-1)

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are not None, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def rows(self, indices: Sequence[int] | Tensor) -> "Experience":
        """These rows, with columns that are padding in all of them removed."""
        tensors = {name: tensor[indices] for name, tensor in self.tensors().items()}
        prompt_length = tensors["sequences"].shape[1] - tensors["response_mask"].shape[1]
        has_token = tensors["attention_mask"].any(dim=0)  # [P+T]
        start = int(has_token[:prompt_length].float().argmax())  # left padding shared by all rows
        response_columns = tensors["response_mask"].any(dim=0).nonzero()  # there may be holes between them
        end = int(response_columns[-1]) + 1 if len(response_columns) else 1
        for name, tensor in tensors.items():
            if name in ("sequences", "attention_mask"):
                tensors[name] = tensor[:, start : prompt_length + end]
            elif tensor.dim() == 2:
                tensors[name] = tensor[:, :end]
        return Experience(**tensors)

    @staticmethod
    def concatenate(parts: Sequence["Experience"]) -> "Experience":
        """Concatenate several experiences along the batch; shorter ones are padded with masked columns."""
        prompt_length = max(part.sequences.shape[1] - part.response_mask.shape[1] for part in parts)
        response_length = max(part.response_mask.shape[1] for part in parts)

        def padded(part: Experience, name: str) -> Tensor:
            tensor = getattr(part, name)
            if tensor.dim() == 1:
                return tensor
            right = response_length - part.response_mask.shape[1]
            has_prompt = name in ("sequences", "attention_mask")
            left = prompt_length - (part.sequences.shape[1] - part.response_mask.shape[1]) if has_prompt else 0
            return F.pad(tensor, (left, right))  # pad id 0 or mask False; padding is defined by attention_mask alone

        return Experience(**{name: torch.cat([padded(part, name) for part in parts]) for name in parts[0].tensors()})


def estimate_advantages(
    experience: Experience, *, ppo: PPOArguments, greedy_scores: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute advantages [B, T], not whitened yet, and the critic's returns [B, T] (None without a critic).

    Args:
        experience: must have rewards, and values if there is a critic.
        greedy_scores: [B] shaped score of the greedy response to each row's prompt, for a greedy baseline.
    """
    return ALGORITHMS[ppo.algorithm].estimate(
        EstimatorInputs(
            rewards=experience.rewards, response_mask=experience.response_mask, values=experience.values,
            has_score=experience.has_score, greedy_scores=greedy_scores, group_size=ppo.num_samples_per_prompt,
            gamma=ppo.gamma, gae_lambda=ppo.gae_lambda,
        )
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MinibatchShuffle:
    """Which rows of a rollout form which minibatch.

    Global prompt i of an iteration is on rank i mod W, with all of its responses: a group. A minibatch holds G groups
    over all ranks; group i belongs to lane i mod G, and every epoch permutes each lane separately. So rows stay on
    their rank without communication, groups stay whole, and the rows of a minibatch do not depend on the number of
    ranks W (a divisor of G).

    Attributes:
        minibatch_size: rows per minibatch on this rank, G · group_size / W.
        group_size: responses per prompt, in consecutive rows.
        rank, world_size: data-parallel rank of this process, and W.
        seed: seed of the shuffle.
    """

    minibatch_size: int
    rank: int
    world_size: int
    seed: int
    group_size: int = 1

    def minibatches(self, rows: int, *, iteration: int, epoch: int) -> list[Tensor]:
        """Local row indices of each minibatch of one epoch.

        Args:
            rows: sequences of the rollout on this rank.

        Raises: ValueError if they cannot be split into minibatches of whole groups.
        """
        if rows % self.minibatch_size or self.minibatch_size % self.group_size:
            raise ValueError(
                f"a rollout of {rows} sequences per device, in groups of {self.group_size}, cannot be cut into "
                f"minibatches of {self.minibatch_size} with whole groups: make per_device_training_batch_size × "
                "gradient_accumulation_steps a multiple of num_samples_per_prompt, and generation_batches × "
                "per_device_generation_batch_size × num_samples_per_prompt a multiple of both"
            )
        lanes = self.minibatch_size // self.group_size * self.world_size
        generator = np.random.default_rng([self.seed, iteration, epoch])
        shuffled = torch.from_numpy(generator.random((lanes, rows // self.minibatch_size)).argsort(axis=1))
        local_lanes = torch.arange(self.rank, lanes, self.world_size)
        global_groups = shuffled[local_lanes] * lanes + local_lanes[:, None]
        groups = ((global_groups - self.rank) // self.world_size).T  # [minibatches, groups of each]
        return list((groups[..., None] * self.group_size + torch.arange(self.group_size)).flatten(1))


class MiniDataset:
    """Collects the rollout batches of an iteration and splits them into shuffled minibatches.

    Args:
        shuffle: assigns rows to minibatches.
        generation_batches: number of experiences per rollout.
        ppo_epochs: passes over the rollout.
        whiten_advantages: to zero mean and unit variance over all trained tokens of the rollout, on all ranks; not
            those that the update computes, which whitens them.
    """

    def __init__(
        self, shuffle: MinibatchShuffle, *, generation_batches: int, ppo_epochs: int, whiten_advantages: bool = True
    ) -> None:
        self.shuffle, self.generation_batches, self.ppo_epochs = shuffle, generation_batches, ppo_epochs
        self.whiten_advantages = whiten_advantages
        self.parts: list[Experience] = []

    def add(self, experience: Experience, *, iteration: int = 0) -> list[Experience] | None:
        """Add one rollout batch; when the rollout is complete, return its minibatches and clear the buffer.

        A collective when the rollout is complete and advantages are whitened.

        Args:
            iteration: seeds the shuffle, together with the epoch.

        Returns: ppo_epochs × (rows / minibatch_size) minibatches, or None until the rollout is complete.
        """
        self.parts.append(experience)
        if len(self.parts) < self.generation_batches:
            return None
        rollout = Experience.concatenate(self.parts)
        self.parts = []
        if self.whiten_advantages and rollout.advantages is not None:
            rollout.advantages = whiten(rollout.advantages, rollout.trained_mask)
        return [
            rollout.rows(rows)
            for epoch in range(self.ppo_epochs)
            for rows in self.shuffle.minibatches(len(rollout), iteration=iteration, epoch=epoch)
        ]
