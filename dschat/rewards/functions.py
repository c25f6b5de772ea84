"""User-defined Python reward functions: loads them, passes the arguments they name, validates what they return."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from dschat.rewards.function_arguments import ARGUMENTS, OF_ONE_RESPONSE, binding_of
from dschat.rewards.response_batch import ResponseBatch, prompt_text

Judge = Callable[[Sequence[str], Sequence[str], Sequence[dict]], Sequence[float]]
RewardFunction = Callable[..., Any]  # see function_arguments → a number or None per response

_MAX_SCORE = 3.4e38  # largest float32, the dtype of scores


def load_function(source: str) -> Judge:
    """Load the function "FILE.py:FUNCTION".

    A judge is called as judge(prompts, responses, rows) with equally long lists (texts, texts, dicts of the prompt
    rows' other columns) and returns one number for each response.

    Raises: ValueError if the file or the function does not exist, or the file cannot be imported.
    """
    path, _, name = source.partition(":")
    if not Path(path).is_file() or Path(path).suffix != ".py":
        raise ValueError(f"{source}: there is no Python file {path}; write FILE.py:FUNCTION")
    function = vars(_module(Path(path).resolve())).get(name)
    if not callable(function):
        raise ValueError(f"{source}: {path} has no function {name or '(none named)'}; write FILE.py:FUNCTION")
    return function


def judge_problems(source: str | None) -> list[str]:
    """One line if the judge cannot be loaded; a missing file is reported by the flag's own argument group."""
    if not source or not Path(source.partition(":")[0]).is_file():
        return []
    try:
        load_function(source)
    except ValueError as error:
        return [f"--judge {error}"]
    return []


@functools.cache  # a judge and a reward from one file share its module state
def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"judge_{path.stem}", path)
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle need the module there
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's file may raise anything, SystemExit too
        raise ValueError(f"{path} cannot be imported ({type(error).__name__}: {error}): correct it first") from error
    return module


def judge_scores(
    judge: Judge, messages: Sequence[list[dict[str, str]]], responses: Sequence[str], rows: Sequence[dict]
) -> list[float]:
    """Call a judge on responses. Each prompt is passed as the text of its messages, one per line.

    Raises: ValueError if it does not return one finite number for each response.
    """
    scores = judge([prompt_text(chat) for chat in messages], list(responses), list(rows))
    return validated_scores([float(score) for score in scores], responses, source="the judge")


def bind_options(function: RewardFunction, options: Mapping[str, str]) -> RewardFunction:
    """Bind options from a query string to the function, parsed by the type of their defaults: bool, int, float or str.

    Raises: ValueError for an unknown option, or a value that cannot be parsed.
    """
    declared = {
        name: parameter for name, parameter in inspect.signature(function).parameters.items()
        if name not in ARGUMENTS and name not in OF_ONE_RESPONSE and parameter.default is not parameter.empty
        and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }  # fmt: skip
    values: dict[str, Any] = {}
    for name, text in options.items():
        if name not in declared:
            choices = ", ".join(declared) or "none"
            raise ValueError(f"there is no option {name}; choose from: {choices}")
        values[name] = _parse_option(name, text, declared[name].default)
    return functools.partial(function, **values) if values else function


def _parse_option(name: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError(f"{name}={text}: must be true or false")
        return text.lower() in ("true", "1")
    kind = type(default) if isinstance(default, (int, float)) else str
    try:
        value = kind(text)
    except ValueError as error:
        raise ValueError(f"{name}={text}: must be {'a whole number' if kind is int else 'a number'}") from error
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{name}={text}: must be finite")
    return value


def call_reward_function(
    function: RewardFunction, batch: ResponseBatch, *, source: str
) -> list[float] | Awaitable[list[float]]:
    """Call a reward function: scores of the responses, NaN where it returns None; awaitable if the function is async.

    Raises: ValueError if it does not return a finite number, or None, for each response; or the data rows lack a
        column that it takes.
    """
    binding = binding_of(function)
    arguments = binding.arguments(batch)
    if binding.one_by_one:
        calls = [{name: values[number] for name, values in arguments.items()} for number in range(len(batch))]
        returned: Any = [function(**call) for call in calls]
    else:
        returned = function(**arguments)
    if inspect.isawaitable(returned) or any(map(inspect.isawaitable, returned if binding.one_by_one else ())):
        return _await_scores(returned, batch, source)
    return validated_scores(scores_of(returned), batch.responses, source=source)


def scores_of(returned: Any) -> list[Any]:
    """A list of scores from what a function returned: a list, an array, a tensor, or OpenRLHF's {"rewards": …}.

    An entry may be verl's {"score": …}.
    """
    if isinstance(returned, Mapping):
        names = [name for name in ("rewards", "scores", "score") if name in returned]
        if not names:
            keys = ", ".join(map(str, returned))
            raise ValueError(f"a dict with {keys} was returned: the rewards belong in its entry 'rewards'")
        returned = returned[names[0]]
    scores = returned.tolist() if hasattr(returned, "tolist") else list(returned)
    return [score.get("score") if isinstance(score, Mapping) else score for score in scores]


async def _await_scores(returned: Any, batch: ResponseBatch, source: str) -> list[float]:
    """returned: an awaitable of all scores, or a list of awaitables of one each."""
    scores = await returned if inspect.isawaitable(returned) else await asyncio.gather(*returned)
    return validated_scores(scores_of(scores), batch.responses, source=source)


def validated_scores(returned: Sequence[Any], responses: Sequence[str], *, source: str) -> list[float]:
    """One number for each response, NaN for None.

    Raises: ValueError unless there are as many as responses, each a finite number or None.
    """
    scores = list(returned)
    if len(scores) != len(responses):
        raise ValueError(
            f"{source} returned {len(scores)} scores for {len(responses)} responses: it must return one for each"
        )
    for response, score in zip(responses, scores, strict=True):
        if score is not None and not abs(float(score)) <= _MAX_SCORE:
            raise ValueError(f"{source} returned {float(score)} for the response {response!r}: scores must be finite")
    return [math.nan if score is None else float(score) for score in scores]
