"""Ends a run whose rollout engine does not sample from the policy, before an update trains on its rollouts."""

from __future__ import annotations

import torch
from torch import Tensor

from dschat.distributed.collectives import sum_over_ranks
from dschat.generation import SamplingParams
from dschat.rlhf.experience import Experience
from dschat.rlhf.rlhf_engine import DeepSpeedRLHFEngine
from dschat.rlhf.rollouts.logprob_mismatch import log_ratio
from dschat.rlhf.rollouts.model_outputs import OldLogprobs, policy_logprobs

ROWS = 4  # rescored where the policy's log-probs are not computed anyway
# Mean |Δ| in nats that cannot be rounding. In fp32 it is below 1e-4; in bf16 it was 0.04 at most on the models of the
# quickstart and the tests, and a wrong temperature, template or weight gives tenths.
LIMIT = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.3}
GROWTH = 8.0  # over the mean of the first check


class RolloutMismatch(RuntimeError):
    """Rollouts and policy disagree by more than rounding."""


class EngineCheck:
    """Compares log-probs of rollouts with the policy's: in the first iteration, and in every N-th.

    The mean difference must stay below LIMIT, and below GROWTH times that of the first check, or a hundredth of LIMIT
    if that is larger.

    Args:
        every: N; 0: only the first iteration.
        dtype: of the policy's weights.
        sampling, vocabulary: if the sampling truncates the distribution of the policy's ids, the engine's log-probs
            are larger than the policy's; then only the opposite counts.
        same_weights: False if the engine's weights are quantised: then only growth is limited.
    """

    def __init__(
        self, *, every: int, dtype: torch.dtype, sampling: SamplingParams, vocabulary: int, same_weights: bool = True
    ) -> None:
        self.every, self.limit, self.temperature = every, LIMIT[dtype], sampling.temperature
        self.truncated = sampling.truncates(vocabulary)
        self.same_weights = same_weights
        self.first: float | None = None  # mean of the first check

    def is_due(self, iteration: int) -> bool:
        return self.first is None or bool(self.every) and iteration % self.every == 0

    def check_experience(
        self, engine: DeepSpeedRLHFEngine, experience: Experience, old_logprobs: OldLogprobs, *, iteration: int
    ) -> None:
        """Compare this rank's rollout with the policy; if it has no log-probs of the policy, rescore a few rows.

        Engines that decode with the policy's own weights are not rescored. A collective.

        Raises: as `check`.
        """
        logprobs = experience.old_logprobs if old_logprobs == "recompute" else None
        if logprobs is None and not engine.actor.capabilities.separate_weights:
            return
        if logprobs is None:
            experience = experience.rows(range(min(ROWS, len(experience))))
            rows = {"input_ids": experience.sequences, "attention_mask": experience.attention_mask}
            logprobs, _ = policy_logprobs(
                engine, rows | {"loss_mask": experience.loss_mask}, response_mask=experience.response_mask,
                temperature=self.temperature,
            )  # fmt: skip
        self.check(logprobs, experience.rollout_logprobs, experience.response_mask, iteration=iteration)

    def check(self, logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, *, iteration: int) -> None:
        """Compare a rollout of this rank with the weights that sampled it. A collective.

        Args:
            logprobs, rollout_logprobs: [B, T] float, of policy and engine.
            response_mask: [B, T] bool.
            iteration: of the rollout, for the message.

        Raises:
            RolloutMismatch: on all ranks.
        """
        delta = log_ratio(logprobs, rollout_logprobs, response_mask).double()
        deviation = delta.clamp(min=0) if self.truncated else delta.abs()
        total, tokens = sum_over_ranks(torch.stack([deviation.sum(), response_mask.sum()])).tolist()
        mean = total / max(tokens, 1.0)
        limit = self.limit if self.same_weights else float("inf")
        if self.first is not None:
            limit = min(limit, max(GROWTH * self.first, self.limit / 100))
        self.first = mean if self.first is None else self.first
        if not mean <= limit:
            raise RolloutMismatch(
                f"iteration {iteration + 1}: log-probs of the rollout engine and of the policy differ by {mean:.3g} "
                f"nats on average, more than the {limit:.3g} that rounding explains: the engine has other weights, "
                "another temperature, or computes the model differently. The run ends before an update trains on "
                "these rollouts. scripts/doctor.py finds the cause; --rollout_engine hybrid decodes with the policy "
                "itself"
            )
