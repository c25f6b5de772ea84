"""Encodes records: plain messages → token ids within the length limit, one row of a dataset.

A row that is too long is truncated (prompts from the left, responses from the right, so that the tokens around their
boundary are kept) or dropped, by option. A BOS at the start of a prompt is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datasets import Features, Sequence, Value
from transformers import PreTrainedTokenizerBase

from .chat_template import encode_answer, encode_conversation, encode_prompt, encode_text, end_of_turn_id
from .chat_template.control_tokens import control_tokens, strings_in

_IDS = Sequence(Value("int32"))
FEATURES = {
    "sft": Features({"input_ids": _IDS, "loss_mask": Sequence(Value("bool")), "length": Value("int32")}),
    "preference": Features(
        {
            "chosen_ids": _IDS,
            "rejected_ids": _IDS,
            "prompt_length": Value("int32"),
            "margin": Value("float32"),
            "length": Value("int32"),
        }
    ),
    "unpaired": Features(
        {"input_ids": _IDS, "prompt_length": Value("int32"), "desirable": Value("bool"), "length": Value("int32")}
    ),
    "prompt": Features(
        {
            "input_ids": _IDS,
            "row_index": Value("int64"),
            "row": Value("large_string"),
            "prompt_text": Value("large_string"),
            "is_chat": Value("bool"),
            "length": Value("int32"),
        }
    ),
}


@dataclass(frozen=True)
class Encoded:
    """One row of FEATURES[kind], or None with the reason why a valid row is skipped; `cut`: it was truncated."""

    features: dict[str, Any] | None
    cut: bool = False
    skip_reason: str = ""


@dataclass(frozen=True)
class Encoder:
    """Encodes the records of one kind.

    Args:
        max_tokens: longest prompt (kind "prompt"), else longest sequence of prompt and response.
        drop_overlong: drop longer rows instead of truncating them.
        end_id: `end_of_turn_id(tokenizer)`.
        parse_special_tokens: encode control-token strings in contents as control tokens (see encode_prompt).
    """

    kind: str
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    drop_overlong: bool
    train_on_prompt: bool
    end_id: int | None
    parse_special_tokens: bool = False

    @classmethod
    def for_kind(
        cls, kind: str, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int, overlong: str, train_on_prompt: bool,
        parse_special_tokens: bool = False,
    ) -> Encoder:  # fmt: skip
        """Raises ValueError for an invalid kind, token limit or overlong mode."""
        if kind not in FEATURES:
            raise ValueError(f"kind {kind!r}: choose one of {', '.join(FEATURES)}")
        if overlong not in ("truncate", "drop"):
            raise ValueError(f"overlong {overlong!r}: choose 'truncate' or 'drop'.")
        minimum = 1 if kind == "prompt" else 2
        if max_tokens < minimum:
            flag = "--max_prompt_seq_len" if kind == "prompt" else "--max_seq_len"
            raise ValueError(f"{flag} {max_tokens} leaves no room for a prompt: it must be at least {minimum}.")
        if not tokenizer.chat_template:
            raise ValueError("The tokenizer has no chat template: call ensure_chat_template(tokenizer) first.")
        end_id = end_of_turn_id(tokenizer)
        return cls(kind, tokenizer, max_tokens, overlong == "drop", train_on_prompt, end_id, parse_special_tokens)

    def encode(self, record: Mapping[str, Any], row: Mapping[str, Any], row_index: int) -> list[Encoded]:
        """Encode a record: one Encoded, or two for a pair that is used as unpaired responses.

        Args: record: from parse_record; row, row_index: its source row and id. Raises ValueError for a bad row.
        """
        if self.kind == "prompt":
            return [self._encode_prompt(record, row, row_index)]
        if self.kind == "unpaired":
            return [self._encode_unpaired(record, index) for index in range(len(record["answers"]))]
        return [self._encode_sft(record) if self.kind == "sft" else self._encode_preference(record)]

    def control_tokens(self, record: Mapping[str, Any]) -> list[str]:
        """The control tokens whose strings occur in the texts of a record, each once."""
        return control_tokens(self.tokenizer).found_in(strings_in(record))

    def _encode_prompt(self, record: Mapping[str, Any], row: Mapping[str, Any], row_index: int) -> Encoded:
        ids = encode_prompt(
            self.tokenizer, record["prompt"], tools=record.get("tools"), parse_special_tokens=self.parse_special_tokens
        )
        if not ids:
            raise ValueError("the prompt has no tokens")
        cut = len(ids) > self.max_tokens
        if cut and self.drop_overlong:
            return Encoded(None, skip_reason="too long")
        ids = cut_left(ids, self.max_tokens, bos_token_id=self.tokenizer.bos_token_id)
        other_columns = {name: value for name, value in row.items() if name != "prompt"}
        features = {
            "input_ids": ids,
            "row_index": row_index,
            "row": json.dumps(other_columns, ensure_ascii=False, default=str),
            "prompt_text": json.dumps(record["prompt"], ensure_ascii=False),
            "is_chat": not isinstance(row.get("prompt"), str),
            "length": len(ids),
        }
        return Encoded(features, cut)

    def _encode_sft(self, record: Mapping[str, Any]) -> Encoded:
        if "text" in record:
            ids, mask = encode_text(self.tokenizer, record["text"], parse_special_tokens=self.parse_special_tokens)
        else:
            ids, mask = encode_conversation(
                self.tokenizer, record["messages"], end_id=self.end_id, tools=record.get("tools"),
                parse_special_tokens=self.parse_special_tokens,
            )  # fmt: skip
        if record.get("cut"):
            ids, mask = ids[:-1], mask[:-1]
        cut = len(ids) > self.max_tokens
        if cut and self.drop_overlong:
            return Encoded(None, skip_reason="too long")
        if cut and "text" in record:
            ids, mask = ids[: self.max_tokens], mask[: self.max_tokens]
        elif cut:
            ids, mask = self._cut_conversation(ids, mask)
        if self.train_on_prompt:
            mask = [False] + [True] * (len(ids) - 1)
        if True not in mask:
            raise ValueError("none of its tokens would be trained")
        return Encoded({"input_ids": ids, "loss_mask": mask, "length": len(ids)}, cut)

    def _cut_conversation(self, ids: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
        """Truncate to max_tokens; everything before the last response counts as its prompt."""
        start = len(mask)  # becomes the first token of the last trained span
        while mask[start - 1]:
            start -= 1
        room = self._prompt_room(start, len(ids) - start)
        ids = cut_left(ids[:start], room, bos_token_id=self.tokenizer.bos_token_id) + ids[start:]
        mask = [False] + mask[start - room + 1 :]  # the first remaining token has no prediction
        return ids[: self.max_tokens], mask[: self.max_tokens]

    def _encode_preference(self, record: Mapping[str, Any]) -> Encoded:
        prompt, chosen, rejected = self._encode_answers(record, {0: record["chosen"], 1: record["rejected"]})
        longest = max(len(chosen), len(rejected))
        cut = len(prompt) + longest > self.max_tokens
        if cut and self.drop_overlong:
            return Encoded(None, skip_reason="too long")
        if cut:
            room = self._prompt_room(len(prompt), longest)
            prompt = cut_left(prompt, room, bos_token_id=self.tokenizer.bos_token_id)
            chosen, rejected = (answer[: self.max_tokens - len(prompt)] for answer in (chosen, rejected))
        if chosen == rejected:
            return Encoded(None, skip_reason="chosen and rejected are equal" + (" after cutting" if cut else ""))
        features = {
            "chosen_ids": prompt + chosen,
            "rejected_ids": prompt + rejected,
            "prompt_length": len(prompt),
            "margin": record["margin"],
            "length": 2 * len(prompt) + len(chosen) + len(rejected),
        }
        return Encoded(features, cut)

    def _encode_unpaired(self, record: Mapping[str, Any], index: int) -> Encoded:
        answer, desirable = record["answers"][index]
        prompt, response = self._encode_answers(record, {index: answer})
        cut = len(prompt) + len(response) > self.max_tokens
        if cut and self.drop_overlong:
            return Encoded(None, skip_reason="too long")
        if cut:
            room = self._prompt_room(len(prompt), len(response))
            prompt = cut_left(prompt, room, bos_token_id=self.tokenizer.bos_token_id)
        ids = (prompt + response)[: self.max_tokens]
        features = {"input_ids": ids, "prompt_length": len(prompt), "desirable": desirable, "length": len(ids)}
        return Encoded(features, cut)

    def _encode_answers(self, record: Mapping[str, Any], answers: Mapping[int, str]) -> list[list[int]]:
        """Ids of the record's prompt and of each answer, which ends with the end-of-turn token.

        An answer that was cut off by a length limit gets no end-of-turn token.
        """
        encoded: list[list[int]] = []
        for index, answer in answers.items():
            prompt, response = encode_answer(
                self.tokenizer, record["prompt"], answer, end_id=self.end_id, tools=record.get("tools"),
                parse_special_tokens=self.parse_special_tokens,
            )  # fmt: skip
            response = response[:-1] if index in record.get("cut", ()) else response
            encoded += [response] if encoded else [prompt, response]
        if not encoded[0]:
            raise ValueError("the prompt has no tokens")
        return encoded

    def _prompt_room(self, prompt: int, response: int) -> int:
        """Tokens left for the prompt when prompt and response together exceed max_tokens.

        A response of max_tokens or more is truncated anyway, so the prompt gets up to half.
        """
        return self.max_tokens - response if response < self.max_tokens else min(prompt, self.max_tokens // 2)


def cut_left(ids: list[int], room: int, *, bos_token_id: int | None) -> list[int]:
    """The last `room` ids; a BOS at the start is kept if there is room for it and one more token."""
    if len(ids) <= room:
        return ids
    if room > 1 and ids[0] == bos_token_id:
        return [ids[0], *ids[len(ids) - room + 1 :]]
    return ids[len(ids) - room :]
