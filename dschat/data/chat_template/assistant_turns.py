"""Locates the start of each assistant turn in the token ids of a conversation.

By definition, `ids(prompt of the messages before an answer)` must be a prefix of the conversation's ids. Rendering and
encoding that prompt for every answer takes quadratic time, so in long conversations it is done for a few answers only.
The others rely on two conditions, checked for each: the text between the preceding content and the answer is the same
as for those few, and control tokens split a text into segments that a tokenizer encodes independently. Answers that
fail the check are rendered as in the definition, one by one; encoding them stays linear.
"""

from __future__ import annotations

import bisect
import logging
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from weakref import WeakSet

from transformers import PreTrainedTokenizerBase

from .rendering import ChatRenderer, Message

logger = logging.getLogger(__name__)

RENDERED_TURNS = 8  # up to this many answers, the prompt of each is rendered
COSTLY_RENDERINGS = 100  # from this many in one conversation on, their cost is logged
_warned: WeakSet[PreTrainedTokenizerBase] = WeakSet()
_NONCE = secrets.token_hex(8)


def answer_starts(
    renderer: ChatRenderer, messages: Sequence[Message], turns: Sequence[int], text: str, ids: Sequence[int]
) -> list[int] | None:
    """Index of the first token of each answer; None where the prompt of one is not a prefix of the conversation.

    Args:
        messages: the whole conversation.
        turns: indices of the answers in `messages`, ascending.
        text, ids: of the conversation, from `renderer`.
    """
    conversation = _RenderedConversation(renderer, messages, text, list(ids))
    if len(turns) <= RENDERED_TURNS:
        return conversation.rendered_starts(turns)
    conversation.align_control_tokens()
    ends = conversation.content_ends(before=turns)
    by_context: dict[tuple, list[int]] = defaultdict(list)
    for turn in turns:
        by_context[conversation.context(turn, ends)].append(turn)
    starts: dict[int, int] = {}
    for context, same_context in by_context.items():
        # Each kind of turn is rendered at its first, middle and last occurrence.
        sampled = sorted({same_context[0], same_context[len(same_context) // 2], same_context[-1]})
        sampled_starts = conversation.rendered_starts(sampled)
        if sampled_starts is None:
            return None
        starts |= dict(zip(sampled, sampled_starts, strict=True))
        rendered = {turn: (ends[turn - 1], starts[turn]) for turn in sampled}
        opening = conversation.common_opening(rendered) if context else None
        for turn in same_context:
            if turn in starts:
                continue
            start = None if opening is None else conversation.start_after(ends[turn - 1], opening)
            start = conversation.rendered_start(turn) if start is None else start
            if start is None:
                return None
            starts[turn] = start
    conversation.warn_of_cost(len(messages))
    return [starts[turn] for turn in turns]


class _RenderedConversation:
    """A rendered conversation: its text, its ids, and the spans of message contents in the text."""

    def __init__(self, renderer: ChatRenderer, messages: Sequence[Message], text: str, ids: list[int]) -> None:
        self.renderer, self.messages, self.text, self.ids = renderer, messages, text, ids
        self._prompts: dict[int, str] = {}  # answer → prompt
        self._prompts_rendered, self._start_time = 0, time.perf_counter()
        # For each control token, its character offset and its index in the ids; the start of the text counts as one.
        self._offsets: list[int] = []
        self._indices: list[int] = []

    def align_control_tokens(self) -> None:
        """Locate every control token in text and ids; none if the two disagree."""
        offsets, indices = self.renderer.control_offsets(self.text), self.renderer.control.indices(self.ids)
        aligned = [token_id for _, token_id in offsets] == [token_id for _, token_id in indices]
        if aligned:
            self._offsets = [0, *(offset for offset, _ in offsets)]
            self._indices = [0, *(index for index, _ in indices)]

    def rendered_starts(self, turns: Sequence[int]) -> list[int] | None:
        """Lengths in ids of the rendered prompts of these answers; None if one is not a prefix."""
        starts = []
        for turn in turns:
            self._prompts[turn] = prompt = self.renderer.prompt(self.messages[:turn])
            ids = self.renderer.ids(prompt)
            if self.ids[: len(ids)] != ids:
                return None
            starts.append(len(ids))
        return starts

    def rendered_start(self, turn: int) -> int | None:
        """As `rendered_starts` for one answer, but only the text after the last control token is encoded."""
        prompt = self.renderer.prompt(self.messages[:turn])
        self._prompts_rendered += 1
        start = self.start_after(0, prompt)
        if start is not None:
            return start
        starts = self.rendered_starts([turn])
        return None if starts is None else starts[0]

    def warn_of_cost(self, messages: int) -> None:
        """Warn once per tokenizer if the template made the time grow with the square of the conversation."""
        if self._prompts_rendered < COSTLY_RENDERINGS or self.renderer.tokenizer in _warned:
            return
        _warned.add(self.renderer.tokenizer)
        logger.warning(
            "the chat template changes user messages or the text before an answer, so the prompts of %d answers of a "
            "conversation of %d messages were rendered one by one in %.1f s; the time grows with the square of the "
            "number of messages: split such conversations, or use a template that writes user messages unchanged",
            self._prompts_rendered, messages, time.perf_counter() - self._start_time,
        )  # fmt: skip

    def content_ends(self, *, before: Sequence[int]) -> list[int | None]:
        """Where the content of the message before each of these answers ends in the text; None for other messages.

        Also None where that content is empty, and everywhere if the template changes one of them beyond stripping
        whitespace. It may change the answers, as templates do that drop earlier thoughts.
        """
        unknown: list[int | None] = [None] * len(self.messages)
        preceding = {turn - 1 for turn in before if turn > 0 and (self.messages[turn - 1].get("content") or "").strip()}
        markers = {f"Xq{_NONCE}m{n:07d}x": n for n in sorted(preceding)}
        marked = list(self.messages)
        for name, number in markers.items():
            marked[number] = marked[number] | {"content": name}
        parts = re.split(rf"(Xq{_NONCE}m\d{{7}}x)", self.renderer.conversation(marked))
        texts_between, found_markers = parts[::2], parts[1::2]
        if found_markers != list(markers) or not self.text.startswith(texts_between[0]):
            return unknown
        ends, offset = list(unknown), len(texts_between[0])
        for name, text_between in zip(found_markers, texts_between[1:], strict=True):
            content = self.messages[markers[name]]["content"]
            variants = (content, content.strip(), content.lstrip(), content.rstrip())
            variant = next((x for x in variants if self.text.startswith(x + text_between, offset)), None)
            if variant is None:
                return unknown
            ends[markers[name]] = offset + len(variant)
            offset += len(variant) + len(text_between)
        return ends if offset == len(self.text) else unknown

    def context(self, turn: int, ends: Sequence[int | None]) -> tuple | None:
        """The key that determines how the template opens this answer; None if the preceding content was not located."""
        if turn == 0 or ends[turn - 1] is None:
            return None
        before = self.messages[turn - 1]
        return before["role"], bool(before.get("tool_calls"))

    def common_opening(self, rendered: Mapping[int, tuple[int, int]]) -> str | None:
        """The common suffix of these prompts after their last content; None if `start_after` is wrong for one.

        Args:
            rendered: answer → (end of the preceding content in the text, start of the answer in the ids).
        """
        openings = {self._prompts[turn][end:] for turn, (end, _) in rendered.items()}
        if len(openings) > 1 or not all(self.text.startswith(self._prompts[turn]) for turn in rendered):
            return None
        (opening,) = openings
        agrees = all(self.start_after(end, opening) == start for end, start in rendered.values())
        return opening if agrees else None

    def start_after(self, end: int, opening: str) -> int | None:
        """The id index after an opening that begins at a character of the text; None if the ids do not match it.

        The control token before it starts a segment whose ids do not depend on the preceding text.
        """
        if not self._offsets or not self.text.startswith(opening, end):
            return None
        stop = end + len(opening)
        nearest = bisect.bisect_left(self._offsets, stop) - 1
        offset, index = self._offsets[nearest], self._indices[nearest]
        ids = self.renderer.ids(self.text[offset:stop])
        return index + len(ids) if self.ids[index : index + len(ids)] == ids else None
