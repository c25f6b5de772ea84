"""What the actor lived through, and how it is cut into minibatches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

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
            estimate of one sample, −rollout_logprobs.
        values: [B, T], V of the state before each response token.
        scores: [B], what --reward gives whole responses.
        has_score: [B] bool, False where no score could be had; that score is 0 and counts for nothing.
        ended: [B] bool, True where the response ended by EOS.
        trained: [B] bool, False for responses that no update may learn from: those without a score, those cut off
            (--mask_truncated), those of groups that could not be refilled (--dynamic_sampling).
        kl, rewards, advantages, returns: [B, T].

    Without a reference model ref_logprobs and kl are None, without a critic values and returns are.
    """

    sequences: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor
    entropy: Tensor
    scores: Tensor
    has_score: Tensor
    ended: Tensor
    trained: Tensor
    rewards: Tensor
    advantages: Tensor
    ref_logprobs: Tensor | None = None
    kl: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def loss_mask(self) -> Tensor:
        """[B, P+T] bool: response_mask over all columns."""
        return F.pad(self.response_mask, (self.sequences.shape[1] - self.response_mask.shape[1], 0))

    @property
    def trained_mask(self) -> Tensor:
        """[B, T] bool: the response tokens that updates learn from."""
        return self.response_mask & self.trained.unsqueeze(-1)

    def tensors(self) -> dict[str, Tensor]:
        """Every field that this experience has."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def rows(self, indices: Sequence[int] | Tensor) -> "Experience":
        """These rows, without the columns that are padding in all of them."""
        part = {name: tensor[indices] for name, tensor in self.tensors().items()}
        prompt = part["sequences"].shape[1] - part["response_mask"].shape[1]
        real = part["attention_mask"].any(dim=0)  # [P+T]
        first = int(real[:prompt].float().argmax())  # left padding shared by all rows
        used = part["response_mask"].any(dim=0).nonzero()  # response columns; there may be holes between them
        last = int(used[-1]) + 1 if len(used) else 1
        for name, tensor in part.items():
            if name in ("sequences", "attention_mask"):
                part[name] = tensor[:, first : prompt + last]
            elif tensor.dim() == 2:
                part[name] = tensor[:, :last]
        return Experience(**part)

    @staticmethod
    def concatenate(parts: Sequence["Experience"]) -> "Experience":
        """All rows of several experiences; narrower ones get padding columns that no mask counts."""
        prompt = max(part.sequences.shape[1] - part.response_mask.shape[1] for part in parts)
        response = max(part.response_mask.shape[1] for part in parts)

        def widened(part: Experience, name: str) -> Tensor:
            tensor = getattr(part, name)
            if tensor.dim() == 1:
                return tensor
            right = response - part.response_mask.shape[1]
            whole = name in ("sequences", "attention_mask")
            left = prompt - (part.sequences.shape[1] - part.response_mask.shape[1]) if whole else 0
            return F.pad(tensor, (left, right))  # pad id 0 or mask False: attention_mask alone says what counts

        return Experience(**{name: torch.cat([widened(part, name) for part in parts]) for name in parts[0].tensors()})


class MiniDataset:
    """Collects the rollout batches of an iteration and deals them out as minibatches.

    Global prompt i of an iteration lies on rank i mod W, with all of its responses: a group. A minibatch holds G groups
    of all ranks together; group i belongs to lane i mod G, and every epoch permutes each lane on its own. So lanes stay
    on their rank, no row has to travel, groups stay whole, and the same rows share a minibatch whatever the number of
    ranks W (a divisor of G).

    Args:
        generation_batches: experiences that make one rollout.
        minibatch_size: rows per minibatch on this rank, G · group_size / W.
        ppo_epochs: passes over the rollout.
        rank, world_size: of this process.
        seed: of the shuffling.
        group_size: responses of each prompt, in rows that follow each other.
        whiten_advantages: to zero mean and unit variance over every token of the rollout that is trained, on all ranks.
    """

    def __init__(self, *, generation_batches: int, minibatch_size: int, ppo_epochs: int, rank: int, world_size: int,
                 seed: int, group_size: int = 1, whiten_advantages: bool = True):  # fmt: skip
        self.generation_batches, self.minibatch_size, self.ppo_epochs = generation_batches, minibatch_size, ppo_epochs
        self.rank, self.world_size, self.seed, self.whiten_advantages = rank, world_size, seed, whiten_advantages
        self.group_size = group_size
        self.parts: list[Experience] = []

    def add(self, experience: Experience, *, iteration: int = 0) -> list[Experience] | None:
        """Take in one rollout batch; when the rollout is complete, hand out its minibatches and start afresh.

        A collective when the rollout is complete and advantages are whitened.

        Args:
            iteration: seeds the shuffle, together with the epoch.

        Returns: ppo_epochs × (rows / minibatch_size) minibatches, or None while rollout batches are missing.
        """
        self.parts.append(experience)
        if len(self.parts) < self.generation_batches:
            return None
        rollout = Experience.concatenate(self.parts)
        self.parts = []
        if self.whiten_advantages:
            rollout.advantages = whiten(rollout.advantages, rollout.trained_mask)
        return [
            rollout.rows(rows)
            for epoch in range(self.ppo_epochs)
            for rows in self._shuffled(len(rollout), iteration, epoch)
        ]

    def _shuffled(self, rows: int, iteration: int, epoch: int) -> list[Tensor]:
        """Local row numbers of each minibatch of one epoch."""
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
        mine = torch.arange(self.rank, lanes, self.world_size)
        whole = shuffled[mine] * lanes + mine[:, None]  # global numbers of groups
        groups = ((whole - self.rank) // self.world_size).T  # [minibatches, groups of each]
        return list((groups[..., None] * self.group_size + torch.arange(self.group_size)).flatten(1))
