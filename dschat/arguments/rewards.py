"""Flags for the reward sources that score responses."""

from dataclasses import dataclass
from typing import ClassVar

from dschat.arguments.command_line import flag
from dschat.arguments.run import LONGEST_WAIT


@dataclass
class RewardArguments:
    """Reward sources; dschat.rewards.specification parses them."""

    _argument_group_name: ClassVar[str] = "rewards"
    reward: list[str] = flag(
        [],
        "SOURCE[?key=value&...][@WEIGHT], added up: a reward model, FILE.py:FUNCTION, http(s)://..., or a rule: exact, "
        "last_number, boxed, format, length, repetition, overlong, reasoning_gym",
        on_resume="refuse",
    )
    reward_timeout: float = flag(
        300.0,
        "seconds that a function or service may take for a batch, and that a service is asked again which is away or "
        "busy; inf: no limit",
        above=0, at_most=LONGEST_WAIT, finite=False, needs=["reward"],
    )  # fmt: skip
    reward_retries: int = flag(2, "how often one that fails is asked again", at_least=0, needs=["reward"])
    normalize_rewards: bool = flag(
        False, "each source's scores less their running mean, in running standard deviations, before its weight",
        on_resume="refuse",
    )

    def problems(self) -> list[str]:
        return []  # entries are validated by reward_problems, which imports dschat.rewards
