"""Flags for the reward sources that score responses."""

from dataclasses import dataclass
from typing import ClassVar

from dschat.arguments.flags import flag
from dschat.arguments.run import MAX_TIMEOUT


@dataclass
class RewardArguments:
    """Reward sources; dschat.rewards.specification parses them."""

    _argument_group_name: ClassVar[str] = "rewards"
    reward: list[str] = flag(
        [],
        "Reward sources to sum up, each SOURCE[?key=value&...][@WEIGHT]: a reward model (folder or hub "
        "name), FILE.py:FUNCTION, the http(s) address of a service, or a rule such as boxed or format "
        "(training/step3_rlhf_finetuning/README.md lists them).",
        on_resume="refuse",
    )
    reward_timeout: float = flag(
        300.0,
        "Timeout of a function or service for one batch, in seconds, and how long an unavailable service is "
        "retried; inf: no limit.",
        above=0,
        at_most=MAX_TIMEOUT,
        finite=False,
        needs=["reward"],
        on_resume="apply",
    )
    reward_retries: int = flag(
        2, "Further calls of a function or service that has failed.", at_least=0, needs=["reward"], on_resume="apply"
    )
    normalize_rewards: bool = flag(
        False,
        "Standardise each source's scores by their running mean and standard deviation before weighting.",
        on_resume="refuse",
    )

    def problems(self) -> list[str]:
        return []  # entries are validated by reward_problems, which imports dschat.rewards
