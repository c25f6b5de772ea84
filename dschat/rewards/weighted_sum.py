"""The score of a response: a weighted sum over reward models, functions, rules and services."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dschat.arguments.secrets import redacted
from dschat.distributed import collectives, watchdog
from dschat.distributed.collectives import sum_over_ranks
from dschat.distributed.terminal import printable
from dschat.generation import Rollout
from dschat.rewards.functions import Judge, judge_scores, load_function
from dschat.rewards.pending_scores import PendingScores
from dschat.rewards.response_batch import ResponseBatch, prompt_text
from dschat.rewards.retry import NoScores, RetryPolicy, is_own_failure, own_traceback
from dschat.rewards.reward_model import RewardModel, same_tokenization
from dschat.rewards.specification import WeightedSource, model_paths, parse_reward, reward_problems

__all__ = [  # re-exported: the interface of dschat.rewards for the steps
    "ResponseBatch",
    "Judge",
    "RewardModel",
    "Rewards",
    "Scores",
    "WeightedSource",
    "judge_scores",
    "load_function",
    "model_paths",
    "parse_reward",
    "prompt_text",
    "reward_problems",
    "same_tokenization",
]


@dataclass(frozen=True)
class Scores:
    """Scores of B responses, in total and by source.

    Attributes:
        total: [B] float32, Σ weight · score over the sources that gave a score; 0 where none did.
        has_score: [B] bool, False where a source failed, or no source gave a score.
        parts: source name → [B] float32, its scores before normalisation and weighting; NaN where it has none.
    """

    total: Tensor
    has_score: Tensor
    parts: dict[str, Tensor]


class Rewards:
    """The weighted sum of reward sources.

    Args:
        sources: made by parse_reward.
        normalize: subtract each source's mean and divide by its standard deviation, both over all ranks and rollouts
            so far, this one included.
        models: path → reward model, for every path of model_paths.
        retry_policy: for functions and services.
    """

    def __init__(
        self,
        sources: Sequence[WeightedSource],
        *,
        normalize: bool,
        models: Mapping[str, RewardModel] | None = None,
        retry_policy: RetryPolicy | None = None,
    ) -> None:
        self.sources = dict(zip(_unique_names([source.name for source in sources]), sources, strict=True))
        self.normalize, self.models = normalize, dict(models or {})
        self.retry_policy = retry_policy or RetryPolicy(seconds=300.0, retries=2)
        missing = {source.model for source in sources if source.model is not None} - self.models.keys()
        if not sources or missing:
            raise ValueError(
                f"no reward model was built for {', '.join(missing)}" if missing else "--reward: name a source"
            )
        self._checked: set[str] = set()  # names of sources whose first scores have been checked
        self._moments = torch.zeros(len(sources), 3, dtype=torch.float64)  # per source: count, mean, Σ (x − mean)²

    def start(self, batch: ResponseBatch) -> PendingScores:
        """Start the functions and services on a batch in a background thread; pass the result to `score`."""
        return PendingScores(self.sources, batch, retry_policy=self.retry_policy)

    @torch.no_grad()
    def score(
        self, rollout: Rollout, batch: ResponseBatch, *, pending: PendingScores | None = None,
        update_moments: bool = True, normalize: bool = True,
    ) -> Scores:  # fmt: skip
        """Score a rollout. A collective; every rank passes its own.

        Args:
            batch: the same B responses as texts.
            pending: what `start` returned for this batch; None: functions and services are called here, in their order
                among the models.
            update_moments: whether these scores update the running moments; may differ between ranks.
            normalize: False: return raw scores even if training normalises them, as evaluation compares scores over
                time and with the score of a correct answer.
        """
        device = rollout.sequences.device
        columns, failed = [], torch.zeros(len(batch), dtype=torch.bool, device=device)
        for name, source in self.sources.items():
            watchdog.progress()
            if source.model is not None:
                scores, missing = self._model_scores(source.model, rollout, batch)
            else:
                returned = pending.scores(name) if pending else source.scores(batch, self.retry_policy)
                scores, missing = self._score_tensors(source, returned, batch)
            columns.append(scores.to(device))
            self._check_first_scores(name, scores, missing)
            failed |= missing.to(device)
        raw = torch.stack(columns)  # [sources, B], NaN: no score
        if self.normalize:
            new_values = raw if update_moments else torch.full_like(raw, torch.nan)
            self._moments = merged_moments(self._moments.to(device), new_values).cpu()
        normalized = normalised(raw, self._moments.to(device)) if self.normalize and normalize else raw
        weights = torch.tensor([source.weight for source in self.sources.values()], device=device)
        has_score = ~failed & ~raw.isnan().all(dim=0)  # [B]
        total = (weights[:, None] * normalized).nan_to_num(nan=0.0).sum(dim=0)  # [B]
        return Scores(torch.where(has_score, total, 0.0), has_score, dict(zip(self.sources, raw, strict=True)))

    def _check_first_scores(self, name: str, scores: Tensor, missing: Tensor) -> None:
        """Once for each source: end the run if a function raised for every response, warn if all scores are equal.

        A collective, since all ranks' responses count.

        Raises: NoScores, with the function's own traceback.
        """
        if name in self._checked:
            return
        self._checked.add(name)
        source = self.sources[name]
        problem = self.retry_policy.problems.get(source.label) if source.function is not None else None
        raised = own_traceback(problem) if problem is not None and is_own_failure(problem) else None
        own = (scores[~scores.isnan()].tolist(), int(missing.sum()), len(missing), raised)
        known, failed, counts, tracebacks = zip(*collectives.all_gather_objects(own), strict=True)
        known, reason = [score for part in known for score in part], next(filter(None, tracebacks), None)
        if reason is not None and sum(failed) == sum(counts):
            raise NoScores(f"{source.label} failed for all of the first {sum(counts)} responses:\n{reason}")
        if len(known) > 1 and len(set(known)) == 1 and collectives.is_main():
            print(printable(
                f"warning: {source.label} gave {known[0]:g} to all of the first {len(known)} responses: equal scores "
                "teach nothing; does it get what it expects? samples.jsonl shows prompts and responses"
            ), file=sys.stderr, flush=True)  # fmt: skip

    def _model_scores(self, model: str, rollout: Rollout, batch: ResponseBatch) -> tuple[Tensor, Tensor]:
        """[B] float32 scores, NaN without one, and [B] bool, True where the model failed."""
        scores = self.models[model].score(rollout, batch.messages).float()
        missing = ~scores.isfinite()
        return scores.masked_fill(missing, torch.nan), missing

    def _score_tensors(
        self, source: WeightedSource, returned: list[float | None], batch: ResponseBatch
    ) -> tuple[Tensor, Tensor]:
        """[B] float32 scores, NaN without one, and [B] bool, True where the source failed: it returned None."""
        missing = torch.tensor([score is None for score in returned], dtype=torch.bool)
        scores = torch.tensor([torch.nan if score is None else score for score in returned], dtype=torch.float32)
        if len(returned) and not missing.any() and scores.isnan().all():
            message = (
                f"warning: the reward {redacted(source.entry)} returned no score for any of {len(batch)} responses: "
                f"does the column exist? Columns of a row: {', '.join(batch.rows[0]) or 'none'}"
            )
            print(printable(message), file=sys.stderr, flush=True)
        return scores, missing

    @property
    def state(self) -> dict[str, list[float]]:
        """The running moments of each source, for a checkpoint."""
        return dict(zip(self.sources, self._moments.tolist(), strict=True))

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore the moments from `state`; sources that it lacks start from zero."""
        rows = [list(state.get(name, (0.0, 0.0, 0.0))) for name in self.sources]
        self._moments = torch.tensor(rows, dtype=torch.float64)


def merged_moments(moments: Tensor, values: Tensor) -> Tensor:
    """Merge new values of all ranks into running moments: count, mean and sum of squared deviations.

    Args:
        moments: [S, 3] float64.
        values: [S, B] float, of this rank; NaN is ignored. A collective.

    Returns: [S, 3] float64.

    Source: Chan, Golub & LeVeque 1983, Algorithms for Computing the Sample Variance (Am. Stat. 37:3), eq. 2.1.
    """
    valid = ~values.isnan()
    present = torch.where(valid, values.double(), 0.0)
    count, total = sum_over_ranks(torch.stack([valid.sum(dim=1).double(), present.sum(dim=1)]))  # [S] each
    mean = total / count.clamp(min=1)
    squares = sum_over_ranks(torch.where(valid, present - mean[:, None], 0.0).square().sum(dim=1))
    before, old_mean, old_squares = moments.unbind(dim=1)
    n, shift = before + count, mean - old_mean
    share = count / n.clamp(min=1)
    return torch.stack([n, old_mean + shift * share, old_squares + squares + shift.square() * before * share], dim=1)


def normalised(values: Tensor, moments: Tensor) -> Tensor:
    """(x − mean) / √(variance + 1e-8) of each source's values [S, B]; unchanged while the count is 0."""
    count, mean, squares = (column[:, None] for column in moments.unbind(dim=1))
    normalized = (values.double() - mean) * torch.rsqrt(squares / count.clamp(min=1) + 1e-8)
    return torch.where(count > 0, normalized, values.double()).float()


def _unique_names(names: Sequence[str]) -> list[str]:
    """Make names unique by numbering duplicates: length, length_2."""
    return [
        name if names[:index].count(name) == 0 else f"{name}_{names[:index].count(name) + 1}"
        for index, name in enumerate(names)
    ]
