"""Arguments of reward functions, bound by their names: the suite's own, and those of TRL, OpenRLHF and verl.

    suite     f(prompts, responses, rows, token_ids, messages, ended, max_tokens, <options with defaults>)
    TRL       f(prompts, completions, completion_ids, <columns>, **kwargs): chat lists where the prompt is a chat
    OpenRLHF  f(queries, prompts, labels)
    verl      f(data_source, solution_str, ground_truth, extra_info), called for each response

A required parameter with another name is a column of the prompts' data rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dschat.rewards.response_batch import ResponseBatch

LABEL_COLUMNS = ("labels", "label", "answer")  # of OpenRLHF's labels, the first that exists
TRUTH_COLUMNS = ("ground_truth", "reward_model", "answer")  # of verl's ground_truth, likewise


def _chats_or_texts(batch: ResponseBatch) -> list[Any]:
    pairs = zip(batch.messages, batch.prompts, batch.chats, strict=True)
    return [messages if is_chat else text for messages, text, is_chat in pairs]


def _completions(batch: ResponseBatch) -> list[Any]:
    pairs = zip(batch.responses, batch.chats, strict=True)
    return [[{"role": "assistant", "content": text}] if is_chat else text for text, is_chat in pairs]


def _queries(batch: ResponseBatch) -> list[str]:
    """Prompt and response as one text, so that query[len(prompt):] is the response."""
    return [prompt + response for prompt, response in zip(batch.prompts, batch.responses, strict=True)]


def _column(batch: ResponseBatch, *names: str) -> list[Any]:
    """The value in the first of these columns that a row has, None in rows without any."""
    return [next((row[name] for name in names if name in row), None) for row in batch.rows]


def _labels(batch: ResponseBatch) -> list[Any]:
    return _column(batch, *LABEL_COLUMNS)


def _ground_truths(batch: ResponseBatch) -> list[Any]:
    """verl's data has {"reward_model": {"ground_truth": …}}."""
    values = _column(batch, *TRUTH_COLUMNS)
    return [value.get("ground_truth") if isinstance(value, dict) else value for value in values]


def _data_sources(batch: ResponseBatch) -> list[str]:
    return [row.get("data_source", "") for row in batch.rows]


def _extra_infos(batch: ResponseBatch) -> list[dict]:
    return [row.get("extra_info") or {} for row in batch.rows]


# Columns that arguments are made from: one of each.
COLUMNS_OF = {"labels": LABEL_COLUMNS, "ground_truth": TRUTH_COLUMNS, "ground_truths": TRUTH_COLUMNS}
# Each gives a list with a value for each response, but max_tokens.
ARGUMENTS: dict[str, Callable[[ResponseBatch], Any]] = {
    "prompts": lambda batch: batch.prompts,
    "responses": lambda batch: batch.responses,
    "rows": lambda batch: batch.rows,
    "token_ids": lambda batch: batch.token_ids,
    "messages": lambda batch: batch.messages,
    "ended": lambda batch: batch.ended,
    "max_tokens": lambda batch: batch.max_tokens,
    "completions": _completions,
    "completion_ids": lambda batch: batch.token_ids,
    "queries": _queries,
    "labels": _labels,
    "solution_strs": lambda batch: batch.responses,
    "ground_truths": _ground_truths,
    "data_sources": _data_sources,
    "extra_infos": _extra_infos,
}
# verl calls its functions for each response; the argument with the values of all responses.
OF_ONE_RESPONSE = {
    "solution_str": "solution_strs", "ground_truth": "ground_truths", "data_source": "data_sources",
    "extra_info": "extra_infos",
}  # fmt: skip
RESPONSES = ("responses", "token_ids", "completions", "completion_ids", "queries", "solution_strs")


@dataclass(frozen=True)
class Binding:
    """How a function is called.

    Attributes:
        names: its parameters among ARGUMENTS, or among OF_ONE_RESPONSE if it is called for each response.
        columns: required parameters that are columns of the data rows.
        optional_columns: parameters with the default None: columns if the rows have them.
        options: parameters with another default, which columns do not set.
        everything: takes any keyword argument: gets all of ARGUMENTS and all columns.
        one_by_one: is called for each response.
    """

    names: tuple[str, ...]
    columns: tuple[str, ...]
    optional_columns: tuple[str, ...]
    options: tuple[str, ...]
    everything: bool
    one_by_one: bool

    def arguments(self, batch: ResponseBatch) -> dict[str, Any]:
        """Keyword arguments for a batch; if called one by one, each is a list with a value for each call."""
        available = dict.fromkeys(name for row in batch.rows for name in row if name not in self.options)
        columns = [*self.columns, *(name for name in self.optional_columns if name in available)]
        names = self.names
        if self.everything and not self.one_by_one:
            columns, names = [*columns, *available], tuple(ARGUMENTS)
        values = {name: _column(batch, name) for name in columns}
        values |= {name: ARGUMENTS[OF_ONE_RESPONSE.get(name, name)](batch) for name in names}
        if "prompts" in values and "completions" in self.names:
            values["prompts"] = _chats_or_texts(batch)  # as TRL passes them
        return values

    def missing_columns(self, rows: Iterable[dict]) -> list[str]:
        """What is missing in all of these data rows: names of columns, or "a, b or c" where one of them would do."""
        needed = {(name,) for name in self.columns} | {COLUMNS_OF[name] for name in self.names if name in COLUMNS_OF}
        for row in rows:
            needed = {names for names in needed if not any(name in row for name in names)}
            if not needed:
                break
        return [" or ".join(names) for names in sorted(needed)]


def binding_of(function: Callable[..., Any]) -> Binding:
    """How to call the function by the names of its parameters.

    Raises: ValueError if no parameter receives the responses though one has another name, or one has no name.
    """
    parameters = inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    everything = inspect.Parameter.VAR_KEYWORD in kinds
    named = {
        name: parameter for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }  # fmt: skip
    one_by_one = "solution_str" in named
    known = OF_ONE_RESPONSE if one_by_one else ARGUMENTS
    required = [name for name, parameter in named.items() if parameter.default is parameter.empty]
    understood = bool(named) and all(name in known for name in required)
    # Without them, a parameter of an unknown name may be meant for the responses rather than for a column.
    has_responses = one_by_one or any(name in RESPONSES for name in named) or everything
    unnamed = [
        name for name, parameter in parameters.items()
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty
    ]  # fmt: skip
    if unnamed or not (has_responses or understood):
        raise ValueError(
            f"its parameters are ({', '.join(parameters)}), but they are bound by name, and "
            + (f"{unnamed[0]} is positional-only" if unnamed else "none of them is the responses")
            + f": use {', '.join(ARGUMENTS)}, columns of the data, or verl's {', '.join(OF_ONE_RESPONSE)}"
        )
    others = {name: parameter for name, parameter in named.items() if name not in known}
    return Binding(
        names=tuple(name for name in named if name in known),
        columns=tuple(name for name, parameter in others.items() if parameter.default is parameter.empty),
        optional_columns=tuple(name for name, parameter in others.items() if parameter.default is None),
        options=tuple(name for name, parameter in others.items() if parameter.default not in (None, parameter.empty)),
        everything=everything,
        one_by_one=one_by_one,
    )
