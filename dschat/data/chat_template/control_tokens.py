"""Control tokens of a chat template, and the encoding of the same strings inside contents as plain text.

A tokenizer encodes "<|im_end|>" as the end-of-turn token wherever it occurs, including in user input. To prevent that,
the template's own control tokens get random private names, and a copy of the tokenizer recognises only these names:
the template's tokens keep their ids, and the same strings inside a content become plain text. Texts without
control-token strings are encoded by the original tokenizer.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import AddedToken, PreTrainedTokenizerBase

Encode = Callable[[str], list[int]]

_NONCE = secrets.token_hex(8)  # random per process: no data can contain it
_BRACKETED = re.compile(r"[<\[{(|＜【｜].*[>\]})|＞】｜]", re.DOTALL)  # bracketed markers, unlike "\n" or "  "
_THOUGHT = re.compile(r"</?(think|thinking|thought|reasoning)>|\[/?THINK\]")  # answers may contain them


class ControlTokens:
    """The control tokens of one tokenizer and its chat template.

    Args:
        ids: token → its id.
        unk_id: the unknown token, which any text may produce; not counted as a control token.
        normalize: the tokenizer's text normalisation, if any.
    """

    def __init__(self, ids: Mapping[str, int], *, unk_id: int | None, normalize: Callable[[str], str] | None) -> None:
        self.ids, self.normalize = dict(ids), normalize
        self.private = {token: f"<|{_NONCE}{number:04d}|>" for number, token in enumerate(ids)}  # token → its name
        self._placeholders = {token: f"Xq{_NONCE}{number:04d}x" for number, token in enumerate(ids)}
        self._control_ids = set(self.ids.values()) - {unk_id}
        self._token_pattern = _any_of(self.ids)
        self._token_or_placeholder_pattern = _any_of([*self.ids, *self._placeholders.values()])
        self._private_name_pattern = _any_of(self.private.values())
        self._encode: Encode | None = None  # of the renamed tokenizer copy, created on first use

    def found_in(self, texts: Iterable[str]) -> list[str]:
        """The control tokens whose strings occur in these texts, each once."""
        if not self.ids:
            return []
        present: dict[str, None] = {}
        for text in texts:
            present |= dict.fromkeys(self._token_pattern.findall(text))
            if self.normalize is not None:
                present |= dict.fromkeys(self._token_pattern.findall(self.normalize(text)))
        return list(present)

    def insert_placeholders(self, value: Any) -> Any:
        """A copy of messages or tools with control-token strings replaced by placeholders."""
        if isinstance(value, str):
            return self._token_pattern.sub(lambda match: self._placeholders[match[0]], value)
        if isinstance(value, Mapping):
            return {self.insert_placeholders(name): self.insert_placeholders(item) for name, item in value.items()}
        return [self.insert_placeholders(item) for item in value] if isinstance(value, (list, tuple)) else value

    def resolve_placeholders(self, rendered: str) -> str:
        """Rendered text of hidden messages, with the template's tokens by private names and contents restored."""
        tokens = {placeholder: token for token, placeholder in self._placeholders.items()}
        return self._token_or_placeholder_pattern.sub(
            lambda match: tokens.get(match[0]) or self.private[match[0]], rendered
        )

    def offsets(self, text: str, *, private: bool) -> list[tuple[int, int]]:
        """(character offset, id) of every control token that the tokenizer recognises in a text, in order."""
        if not self.ids:
            return []
        ids = {name: self.ids[token] for token, name in self.private.items()} if private else self.ids
        pattern = self._private_name_pattern if private else self._token_pattern
        matches = ((match.start(), ids[match[0]]) for match in pattern.finditer(text))
        return [(start, token_id) for start, token_id in matches if token_id in self._control_ids]

    def indices(self, ids: Iterable[int]) -> list[tuple[int, int]]:
        """(index, id) of every control token among ids."""
        return [(index, token_id) for index, token_id in enumerate(ids) if token_id in self._control_ids]

    def encode(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        """Ids of a text in which only private names are control tokens; no BOS or EOS is added.

        Raises: ValueError if the tokenizer still encodes plain text as a control token.
        """
        if self._encode is None:
            self._encode = _encoder_by_private_names(tokenizer, self.private)
        ids = self._encode(text)
        if [token_id for _, token_id in self.indices(ids)] != [x for _, x in self.offsets(text, private=True)]:
            raise ValueError(
                "it contains the string of a control token, which this tokenizer cannot encode as plain text: "
                "remove it, or pass --parse_special_tokens if it is meant as the token"
            )
        return ids


_cache: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[tuple, ControlTokens]] = WeakKeyDictionary()


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> ControlTokens:
    """The special tokens of a tokenizer and the added tokens that delimit turns in its template; cached per tokenizer.

    Thinking tags (<think>) are excluded: answers may contain them.
    """
    state = (tokenizer.chat_template, len(tokenizer), str(tokenizer.special_tokens_map))
    cached_state, tokens = _cache.get(tokenizer, (None, None))
    if tokens is None or cached_state != state:
        tokens = _control_tokens(tokenizer)
        _cache[tokenizer] = (state, tokens)
    return tokens


def strings_in(value: Any) -> Iterator[str]:
    """Every string inside messages or tools."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from strings_in(name)
            yield from strings_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_in(item)


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> ControlTokens:
    added: dict[int, AddedToken] = tokenizer.added_tokens_decoder
    special = {str(token) for token in tokenizer.all_special_tokens}
    between_turns = _text_between_turns(tokenizer) if tokenizer.chat_template else ""
    ids, normalized = dict(zip(special, tokenizer.convert_tokens_to_ids(list(special)), strict=True)), False
    for token_id, token in added.items():
        opens_or_closes = _BRACKETED.fullmatch(token.content) and token.content in between_turns
        if token.special or token.content in special or opens_or_closes:
            ids[token.content] = token_id
            normalized |= token.normalized
    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast and normalized else None
    tokens = {
        token: token_id
        for token, token_id in sorted(ids.items())
        if token_id is not None and token.strip() and not _THOUGHT.fullmatch(token)
    }
    return ControlTokens(
        tokens,
        unk_id=tokenizer.unk_token_id,
        normalize=None if normalizer is None else normalizer.normalize_str,
    )


def _text_between_turns(tokenizer: PreTrainedTokenizerBase) -> str:
    """A rendered chat with a turn after the answer, because templates render thoughts in the last answer only."""
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}
    for chat in ([user, assistant, user], [user, assistant], [user]):
        try:
            return tokenizer.apply_chat_template(chat, tokenize=False)
        except TemplateError:
            continue
    return ""


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Pattern that matches the longest of these strings, as tokenizers do."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _encoder_by_private_names(tokenizer: PreTrainedTokenizerBase, names: Mapping[str, str]) -> Encode:
    """An encoder like the tokenizer's that recognises control tokens by these private names only."""
    if tokenizer.is_fast:
        core = Tokenizer.from_str(json.dumps(_renamed(json.loads(tokenizer.backend_tokenizer.to_str()), names)))
        return lambda text: core.encode(text, add_special_tokens=False).ids
    slow: Any = copy.deepcopy(tokenizer)
    slow._added_tokens_decoder = {i: _named(token, names) for i, token in tokenizer.added_tokens_decoder.items()}
    slow._added_tokens_encoder = {token.content: i for i, token in slow._added_tokens_decoder.items()}
    slow._special_tokens_map = {
        name: token and _named(token, names) for name, token in tokenizer._special_tokens_map.items()
    }
    slow._extra_special_tokens = [_named(token, names) for token in tokenizer._extra_special_tokens]
    slow.tokens_trie = type(slow.tokens_trie)()
    slow._update_trie()
    return lambda text: list(slow(text, add_special_tokens=False).input_ids)


def _renamed(state: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A serialised fast tokenizer with some tokens renamed and all ids unchanged."""
    added = [token | {"content": names.get(token["content"], token["content"])} for token in state["added_tokens"]]
    model = dict(state["model"])
    if isinstance(model["vocab"], dict):  # BPE, WordPiece, WordLevel
        model["vocab"] = {names.get(token, token): i for token, i in model["vocab"].items()}
    else:  # Unigram
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token"):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if model.get("merges"):  # drop merges that produce or use a renamed token
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [list(pair) for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
    disabled = {"post_processor": None, "truncation": None, "padding": None}
    return state | {"added_tokens": added, "model": model} | disabled


def _named(token: AddedToken | str, names: Mapping[str, str]) -> AddedToken:
    flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word", "normalized", "special")
             if hasattr(token, name)}  # fmt: skip
    return AddedToken(names.get(str(token), str(token)), **flags)
