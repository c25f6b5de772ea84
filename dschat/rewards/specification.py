"""Parses and validates --reward entries, "SOURCE[?key=value&...][@WEIGHT]"."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from dschat.arguments.secrets import redacted
from dschat.rewards.function_arguments import ARGUMENTS, COLUMNS_OF, binding_of
from dschat.rewards.functions import RewardFunction, bind_options, call_reward_function, load_function
from dschat.rewards.response_batch import ResponseBatch
from dschat.rewards.retry import RetryPolicy
from dschat.rewards.reward_client import service_scores
from dschat.rewards.rules import RULES

KINDS = (
    "a folder or hub name of a reward model, FILE.py:FUNCTION, http://… or https://…, or one of the rules "
    + ", ".join(RULES)
)


@dataclass(frozen=True)
class WeightedSource:
    """One term of the weighted reward sum; exactly one of model, function and url is set.

    Attributes:
        entry: the text of the entry.
        name: short name for metrics.
        weight: coefficient of its scores.
        model: folder or hub name of a reward model.
        function: see function_arguments.
        url: address of a service.
    """

    entry: str
    name: str
    weight: float
    model: str | None = None
    function: RewardFunction | None = None
    url: str | None = None

    def scores(self, batch: ResponseBatch, retry_policy: RetryPolicy) -> list[float | None]:
        """A function's or service's score of each response; NaN: it returned none; None: it failed."""

        def score_part(part: slice) -> Any:
            part_batch = batch.part(part)
            if self.url is not None:
                return service_scores(self.url, part_batch, seconds=retry_policy.seconds)
            return call_reward_function(self.function, part_batch, source=self.label)

        return retry_policy.scores(score_part, len(batch), source=self.label)

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"the reward {redacted(self.entry)}"


def parse_reward(entry: str, *, max_tokens: int = 2**31) -> WeightedSource:
    """Parse "SOURCE[?key=value&...][@WEIGHT]".

    SOURCE is a folder or hub name of a reward model, FILE.py:FUNCTION, the address of a service (which keeps its query
    string), or the name of a rule. Write ./NAME for a folder with the name of a rule.

    Args:
        max_tokens: maximum response length, against which length rules are validated.

    Raises: ValueError that names the problem and the fix.
    """
    source_text, weight = _split_weight(entry)
    if source_text.startswith(("http://", "https://")):
        return _service(entry, source_text, weight)
    source, _, query = source_text.partition("?")
    if source in RULES or ".py:" in source or source.endswith(".py"):
        function = RULES[source] if source in RULES else load_function(source)
        function = bind_options(function, _options(query))
        binding_of(function)  # raises if its parameters cannot be filled
        if source in RULES:
            _try_rule(function, max_tokens)
        return WeightedSource(entry, source.rpartition(":")[2], weight, function=function)
    if query:
        raise ValueError(f"?{query}: a reward model has no options; remove them")
    if not _may_be_a_model(source):
        close_matches = difflib.get_close_matches(source, RULES, n=1)
        hint = f"did you mean {close_matches[0]}?" if close_matches else f"name {KINDS}"
        raise ValueError(f"there is no folder {source}, and no rule of that name: {hint}")
    return WeightedSource(entry, Path(source).resolve().name, weight, model=source)


def reward_problems(entries: Sequence[str], *, max_tokens: int = 2**31) -> list[str]:
    """One line per invalid entry, checked before any model is loaded; a duplicate entry is invalid too.

    The content of a reward model's folder is validated elsewhere (dschat.runs.validation.model_problems).
    """
    problems = []
    for entry in dict.fromkeys(entries):
        try:
            parse_reward(entry, max_tokens=max_tokens)
        except ValueError as error:
            problems.append(f"--reward {entry}: {error}")
        if list(entries).count(entry) > 1:
            problems.append(f"--reward {entry}: occurs twice; give it once, with @WEIGHT")
    return problems


def column_problems(entries: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each function that takes a column which none of the data rows has."""
    problems = []
    for entry in dict.fromkeys(entries):
        function = parse_reward(entry).function
        missing = [] if function is None else binding_of(function).missing_columns(rows)
        if missing:
            known = ", ".join(dict.fromkeys(name for row in rows[:100] for name in row)) or "none"
            others = ", ".join(name for name in ARGUMENTS if name not in COLUMNS_OF)
            problems.append(
                f"--reward {entry}: its parameters are made from columns that the prompts' data lacks: "
                f"{'; '.join(missing)}. Columns beside the prompt: {known}. Without a column there are {others}"
            )
    return problems


def model_paths(entries: Sequence[str]) -> list[str]:
    """The reward models among the entries, without duplicates: each needs an engine."""
    return list(dict.fromkeys(source.model for source in map(parse_reward, entries) if source.model is not None))


def _split_weight(entry: str) -> tuple[str, float]:
    source, separator, weight_text = entry.rpartition("@")
    if not separator:
        return entry, 1.0
    try:
        weight = float(weight_text)
    except ValueError:
        return entry, 1.0  # the @ is part of the source
    if not math.isfinite(weight) or weight == 0:
        raise ValueError(f"@{weight_text}: a weight is a number other than 0; leave the source out to switch it off")
    return source, weight


def _service(entry: str, url: str, weight: float) -> WeightedSource:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{url} is not an address ({error})") from error
    if not host or not url.isprintable() or " " in url:
        raise ValueError(f"{url!r} is not an address: write http://HOST:PORT/score, without spaces")
    if parts.username or parts.password:
        raise ValueError(
            "addresses are logged, so they must not contain a password: put the token into the environment variable "
            "DSCHAT_REWARD_TOKEN"
        )
    return WeightedSource(entry, f"{host}:{port}" if port else host, weight, url=url)


def _options(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError as error:
        raise ValueError(f"?{query}: must be key=value pairs separated by &") from error
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"?{query}: an option occurs twice")
    return dict(pairs)


def _try_rule(rule: RewardFunction, max_tokens: int) -> None:
    """Call a rule on an empty batch, so that invalid options or a missing package raise now."""
    try:
        call_reward_function(rule, ResponseBatch([], [], [], [], [], max_tokens), source="the rule")
    except ImportError as error:
        raise ValueError(str(error)) from error


def _may_be_a_model(source: str) -> bool:
    """True for an existing folder, and for names of the form OWNER/NAME of the hub."""
    is_hub_name = source.count("/") == 1 and not source.startswith((".", "/", "~")) and not source.endswith("/")
    return Path(source).is_dir() or is_hub_name
