"""Built-in support for hub datasets with their own schema: configuration, splits, and the mapping of rows.

A row is mapped to the fields of records.py; its other columns are kept for reward functions. Preference labels are
resolved to chosen and rejected here; rows whose label is a tie are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dschat.data.marked_answers import last_boxed

Row = Mapping[str, Any]


class UnusableRow(ValueError):
    """A valid row that cannot be used for training; the message gives the reason."""


@dataclass(frozen=True)
class HubDataset:
    """How the rows of one dataset map to the fields of records.py.

    Args:
        columns: what a row must have to be mapped; one that lacks them is used unchanged (mapped and saved before).
        fields: row → fields of records.py. Raises UnusableRow.
        config: configuration of the data set on the hub.
        splits: "train" and "eval" → the dataset's own splits, where their names do not imply it.
        hub: its name on the hub, where it differs from the key in HUB_DATASETS.
    """

    columns: Sequence[str]
    fields: Callable[[Row], dict[str, Any]]
    config: str | None = None
    splits: Mapping[str, str] = field(default_factory=dict)
    hub: str | None = None


def hub_dataset(path: str) -> tuple[HubDataset | None, str]:
    """The supported dataset that an entry of --data_path refers to, and its path.

    "openai/gsm8k" is on the hub; a folder ".../openai/gsm8k" and the files in it are local copies;
    "openai/gsm8k=PATH" reads any other file or folder as rows of that data set.
    """
    name, equals, target = path.partition("=")
    if equals and name in HUB_DATASETS:
        return HUB_DATASETS[name], target
    for folder in (Path(path), Path(path).parent):
        for name, dataset in HUB_DATASETS.items():
            if f"/{folder.as_posix()}".endswith(f"/{name}"):
                return dataset, path
    return None, path


def mapped_fields(row: Row, dataset: HubDataset | None, columns: Mapping[str, str]) -> dict[str, Any]:
    """The row's own columns plus the fields of records.py.

    Args:
        columns: field of records.py → the user's column for it, which takes precedence where the row has it.

    Raises: UnusableRow; ValueError for a row of the data set that is damaged.
    """
    fields = dict(row)
    if dataset is not None and all(row.get(name) is not None for name in dataset.columns):
        try:
            fields |= dataset.fields(row)
        except (TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"not a row of this data set ({type(error).__name__}: {error})") from error
    return fields | {name: row[column] for name, column in columns.items() if column in row}


def _columns(**columns: str) -> HubDataset:
    """Field of records.py = column of the dataset; text is stripped, because templates add their own whitespace."""

    def fields(row: Row) -> dict[str, Any]:
        values = {name: row[column] for name, column in columns.items()}
        return {name: value.strip() if isinstance(value, str) else value for name, value in values.items()}

    return HubDataset(tuple(columns.values()), fields)


def _preference(prompt: Any, first: Any, second: Any, *, first_wins: float) -> dict[str, Any]:
    """first_wins: above 0, the first answer is chosen; below 0, the second; 0: a tie."""
    if first_wins == 0:
        raise UnusableRow("no answer is preferred")
    chosen, rejected = (first, second) if first_wins > 0 else (second, first)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _webgpt(row: Row) -> dict[str, Any]:
    first_wins = float(row["score_0"]) - float(row["score_1"])
    return _preference(row["question"]["full_text"], row["answer_0"], row["answer_1"], first_wins=first_wins)


def _shp(row: Row) -> dict[str, Any]:
    """labels: 1 if A is preferred. score_ratio: votes of the better answer over those of the other, 1 for a tie."""
    first_wins = (1 if int(row["labels"]) == 1 else -1) if float(row["score_ratio"]) > 1 else 0
    return _preference(row["history"], row["human_ref_A"], row["human_ref_B"], first_wins=first_wins)


def _helpsteer3(row: Row) -> dict[str, Any]:
    """overall_preference: from -3 (response 1 is much better) to 3."""
    first_wins = -row["overall_preference"]
    return _preference(row["context"], row["response1"], row["response2"], first_wins=first_wins)


def _yitingxie(row: Row) -> dict[str, Any]:
    """Answers start with the speaker's name; the prompt does not end with it."""
    prompt = row["prompt"].rstrip().removesuffix("Assistant:").rstrip() + "\n\nAssistant:"
    chosen, rejected = (row[name].rpartition("Assistant:")[2].strip() for name in ("chosen", "rejected"))
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _sharegpt(row: Row) -> dict[str, Any]:
    """ "USER: a ASSISTANT: b</s>USER: c ASSISTANT:" as messages; `label` is the answer."""
    system, *parts = re.split(r"(?:^|\s|</s>)(USER|ASSISTANT):", row["prompt"])
    roles = ["user" if speaker == "USER" else "assistant" for speaker in parts[::2]]
    contents = [text.removesuffix("</s>").strip() for text in parts[1::2]]
    prompt = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True) if text]
    if not prompt:
        raise UnusableRow("no question")
    prompt = [{"role": "system", "content": system.strip()}, *prompt] if system.strip() else prompt
    return {"prompt": prompt, "response": row["label"].removesuffix("</s>").strip()}


def _miracl(row: Row) -> dict[str, Any]:
    if not row["positive_passages"]:
        raise UnusableRow("no passage answers it")
    answer = row["positive_passages"][0]["text"]
    rejected = {"rejected": row["negative_passages"][0]["text"]} if row["negative_passages"] else {}
    return {"prompt": row["query"], "response": answer, "chosen": answer, **rejected}


def _mkqa(language: str) -> Callable[[Row], dict[str, Any]]:
    def fields(row: Row) -> dict[str, Any]:
        question, answers = row["queries"].get(language), row["answers"].get(language)
        if not question or not answers or not answers[0]["text"]:
            raise UnusableRow("no answer in this language")
        return {"prompt": question, "response": answers[0]["text"]}

    return fields


def _hc3(row: Row) -> dict[str, Any]:
    if not row["human_answers"]:
        raise UnusableRow("no human answer")
    return {"prompt": row["question"], "response": row["human_answers"][0]}


def _gsm8k(row: Row) -> dict[str, Any]:
    """The solution without its calculator notes (<<3*4=12>>); the answer is what follows ####, without commas."""
    response = re.sub(r"<<[^>]*>>", "", row["answer"])
    answer = response.rpartition("####")[2].strip().replace(",", "")
    return {"prompt": row["question"], "response": response, "answer": answer}


def _math(row: Row) -> dict[str, Any]:
    answer = last_boxed(row["solution"])
    if answer is None:
        raise UnusableRow("no boxed answer")
    return {"prompt": row["problem"], "response": row["solution"], "answer": answer.strip()}


def _dapo(row: Row) -> dict[str, Any]:
    return {"prompt": row["prompt"], "answer": str(row["reward_model"]["ground_truth"])}


_PAIR = _columns(prompt="prompt", response="chosen", chosen="chosen", rejected="rejected")
_CHAT = _columns(messages="messages")
_MIRACL = HubDataset(("query", "positive_passages", "negative_passages"), _miracl)
_MATH = HubDataset(("problem", "solution"), _math)

HUB_DATASETS = {
    "Dahoas/rm-static": _PAIR,
    "Dahoas/full-hh-rlhf": _PAIR,
    "Dahoas/synthetic-instruct-gptj-pairwise": _PAIR,
    "yitingxie/rlhf-reward-datasets": HubDataset(("prompt", "chosen", "rejected"), _yitingxie),
    "openai/webgpt_comparisons": HubDataset(("question", "answer_0", "answer_1", "score_0", "score_1"), _webgpt),
    "stanfordnlp/SHP": HubDataset(("history", "human_ref_A", "human_ref_B", "labels", "score_ratio"), _shp),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": HubDataset(("prompt", "label"), _sharegpt),
    "wangrui6/Zhihu-KOL": _columns(prompt="INSTRUCTION", response="RESPONSE"),
    "Cohere/miracl-zh-queries-22-12": _MIRACL,
    "Cohere/miracl-ja-queries-22-12": _MIRACL,
    "Hello-SimpleAI/HC3-Chinese": HubDataset(("question", "human_answers"), _hc3, config="all"),
    "mkqa-Chinese": HubDataset(("queries", "answers"), _mkqa("zh_cn"), hub="apple/mkqa"),
    "mkqa-Japanese": HubDataset(("queries", "answers"), _mkqa("ja"), hub="apple/mkqa"),
    "lmqg/qg_jaquad": _columns(prompt="question", response="sentence"),
    "lmqg/qag_jaquad": HubDataset(
        ("questions", "paragraph"), lambda row: {"prompt": row["questions"][0], "response": row["paragraph"]}
    ),
    "Anthropic/hh-rlhf": _columns(chosen="chosen", rejected="rejected"),
    "HuggingFaceH4/ultrachat_200k": HubDataset(
        ("messages",), _CHAT.fields, splits={"train": "train_sft", "eval": "test_sft"}
    ),
    "HuggingFaceH4/ultrafeedback_binarized": HubDataset(
        ("prompt", "chosen", "rejected"), _PAIR.fields, splits={"train": "train_prefs", "eval": "test_prefs"}
    ),
    "nvidia/HelpSteer3": HubDataset(
        ("context", "response1", "response2", "overall_preference"), _helpsteer3, config="preference"
    ),
    "allenai/tulu-3-sft-mixture": _CHAT,
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": HubDataset(
        ("chosen", "rejected"),
        lambda row: {"prompt": None},  # its prompt column is only one turn of the shared conversation
    ),
    "openai/gsm8k": HubDataset(("question", "answer"), _gsm8k, config="main"),
    "hendrycks/competition_math": _MATH,
    "nlile/hendrycks-MATH-benchmark": _MATH,
    "HuggingFaceH4/MATH-500": _MATH,
    "BytedTsinghua-SIA/DAPO-Math-17k": HubDataset(("prompt", "reward_model"), _dapo),
    "open-r1/DAPO-Math-17k-Processed": HubDataset(
        ("prompt", "solution"), lambda row: {"prompt": row["prompt"], "answer": row["solution"]}, config="all"
    ),
    "open-r1/OpenR1-Math-220k": HubDataset(
        ("problem", "answer"), lambda row: {"prompt": row["problem"], "answer": row["answer"]}, config="default"
    ),
}
