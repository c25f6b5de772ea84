"""Score responses for preference pairs: by a judge, or by the weighted reward sources of step 3."""

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from dschat.arguments import PairSettings
from dschat.data.micro_batches import limit_of
from dschat.distributed import groups
from dschat.distributed.deepspeed_config import DTYPES, frozen_config
from dschat.distributed.engines import frozen_engine
from dschat.generation import Rollout
from dschat.models.causal_lm import load_tokenizer
from dschat.models.scalar_head import TokenScores, load_scalar_head
from dschat.rewards.retry import RetryPolicy
from dschat.rewards.weighted_sum import ResponseBatch, RewardModel, Rewards, load_function, model_paths, parse_reward
from dschat.runs.network_loading import set_forward_options

MAX_FAILED_CALLS = 3  # consecutive batches without any score on one process: then the run stops
ScoreFunction = Callable[[Rollout, ResponseBatch], list[float | None]]


def score_function(settings: PairSettings, tokenizer: PreTrainedTokenizerBase) -> ScoreFunction:
    """The judge (--judge) or the reward sources (--reward) as a function; it returns None for an unscored response.

    Raises: ValueError if the judge or a reward source cannot be loaded.
    """
    if settings.sampling.judge:
        return _judge(settings)
    return _rewards(settings, tokenizer)


def _judge(settings: PairSettings) -> ScoreFunction:
    sampling = settings.sampling
    judge = load_function(sampling.judge)
    retry_policy = RetryPolicy(
        seconds=sampling.judge_timeout, retries=sampling.judge_retries, max_failed_calls=MAX_FAILED_CALLS
    )
    return lambda _, batch: retry_policy.judge_scores(judge, batch.messages, batch.responses, batch.rows)


def _rewards(settings: PairSettings, tokenizer: PreTrainedTokenizerBase) -> ScoreFunction:
    reward = settings.rewards
    rewards = Rewards(
        [parse_reward(entry) for entry in reward.reward], normalize=False,
        models={path: _reward_model(path, settings, tokenizer) for path in model_paths(reward.reward)},
        retry_policy=RetryPolicy(
            seconds=reward.reward_timeout, retries=reward.reward_retries, max_failed_calls=MAX_FAILED_CALLS
        ),
    )  # fmt: skip

    def score(rollout: Rollout, batch: ResponseBatch) -> list[float | None]:
        scores = rewards.score(rollout, batch)
        totals = zip(scores.total.tolist(), scores.has_score.tolist(), strict=True)
        return [total if has_score else None for total, has_score in totals]

    return score


def _reward_model(path: str, settings: PairSettings, actor_tokenizer: PreTrainedTokenizerBase) -> RewardModel:
    sampling, dtype = settings.sampling, settings.devices.dtype
    trusted, micro_batch_size = sampling.trust_remote_code, sampling.per_device_generation_batch_size
    config = frozen_config(
        dtype=dtype, zero_stage=0, micro_batch_size=micro_batch_size, world_size=groups.data_parallel_size()
    )
    tokenizer = load_tokenizer(path, trust_remote_code=trusted)
    network = TokenScores(load_scalar_head(path, dtype=DTYPES[dtype], tokenizer=tokenizer, trust_remote_code=trusted))
    set_forward_options(network, settings.devices)
    engine = frozen_engine(network, config=config)
    limit = limit_of(network, rows=micro_batch_size, max_tokens=settings.devices.max_tokens_per_micro_batch)
    return RewardModel(engine, tokenizer=tokenizer, actor_tokenizer=actor_tokenizer, limit=limit)
