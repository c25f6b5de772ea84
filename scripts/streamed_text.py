"""Text of a stream of tokens, for printing it while it is generated."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from transformers import PreTrainedTokenizerBase


class StreamedText:
    """Incremental detokenizer that never emits part of a character.

    A byte-level token may be part of a character, which decodes to U+FFFD until it is complete. So text is buffered
    while it ends with U+FFFD, and each piece is the difference of two decodings that start at the same earlier token,
    because a tokenizer may decode a token differently at the start of a text (no leading space).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self._start = 0  # both decodings start at this token
        self._returned = 0  # tokens whose text has been returned

    def add(self, token_id: int) -> str:
        """Text completed by this token; empty while a character is incomplete."""
        self.ids.append(token_id)
        piece = self._new_text()
        if not piece or piece.endswith("\ufffd"):
            return ""
        self._start, self._returned = self._returned, len(self.ids)
        return piece

    def finish(self) -> str:
        """The buffered text; bytes of an incomplete character become U+FFFD."""
        piece = self._new_text()
        self._returned = len(self.ids)
        return piece

    def _new_text(self) -> str:
        returned = self._decode(self.ids[self._start : self._returned])
        return self._decode(self.ids[self._start :])[len(returned) :]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Answer:
    """An answer while it is generated: iterating runs the model, and yields the text that each token completes.

    Attributes:
        ids: the tokens so far, without the stop token.
        text: of these tokens, as far as their characters are complete.
        ended: whether a stop token ended the answer; False while it is generated, interrupted or at the length limit.
    """

    def __init__(self, tokens: Iterator[int], tokenizer: PreTrainedTokenizerBase, *, stops: Collection[int]) -> None:
        self._tokens, self._stops = tokens, stops
        self._streamed = StreamedText(tokenizer)
        self.text = ""
        self.ended = False

    @property
    def ids(self) -> list[int]:
        return self._streamed.ids

    def __iter__(self) -> Iterator[str]:
        """A piece for each token, which may be empty, so that the caller can stop between any two tokens."""
        for token in self._tokens:
            if token in self._stops:
                self.ended = True
            else:
                yield self._append(self._streamed.add(token))
        yield self._append(self._streamed.finish())

    def _append(self, piece: str) -> str:
        self.text += piece
        return piece
