"""Interactive chat with an exported model in the terminal.

    python scripts/chat.py OUTPUT_DIR [--temperature 0.7] [--system "Be brief."]

Ctrl-C interrupts the current answer, Ctrl-C at the prompt exits. /reset clears the conversation, /quit exits. Lines may
be piped in: each is one turn.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import torch
from deepspeed.accelerator import get_accelerator
from transformers import PreTrainedTokenizerBase

from dschat.arguments.models import TRUST_HELP
from dschat.arguments.script_inputs import SEEDS, exit_on_mistake, number_type, unicode_text
from dschat.data.chat_template import Message, encode_prompt, stop_token_ids
from dschat.distributed.terminal import printable
from dschat.generation import HybridEngine, SamplingParams
from dschat.models.causal_lm import load_causal_lm, load_tokenizer
from dschat.models.positions import position_limit
from dschat.runs.set_up import model_problems

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HELP = "/reset forgets the conversation, /quit leaves, Ctrl-C stops an answer."


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
        self._printed = 0  # tokens whose text has been returned

    def add(self, token_id: int) -> str:
        """Text completed by this token; empty while a character is incomplete."""
        self.ids.append(token_id)
        piece = self._unprinted()
        if not piece or piece.endswith("\ufffd"):
            return ""
        self._start, self._printed = self._printed, len(self.ids)
        return piece

    def finish(self) -> str:
        """The buffered rest; bytes of an incomplete character become U+FFFD."""
        piece = self._unprinted()
        self._printed = len(self.ids)
        return piece

    def _unprinted(self) -> str:
        printed = self._decode(self.ids[self._start : self._printed])
        return self._decode(self.ids[self._start :])[len(printed) :]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Conversation:
    """The message history, truncated so that prompts fit into the model's positions.

    Args:
        system: system message kept at the start, or None.
        positions: of the model; None: no limit.
        max_new_tokens: tokens reserved for the answer, at most half the positions.
        parse_special_tokens: encode control-token strings in lines as control tokens; by default as plain text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        positions: int | None = None,
        max_new_tokens: int = 256,
        parse_special_tokens: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.parse_special_tokens = parse_special_tokens
        self.system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.positions = positions
        self.max_new_tokens = max_new_tokens
        self.turns: list[list[Message]] = []  # each [user] or [user, assistant]
        self.count = 0  # turns started so far: seeds the sampling of each answer

    def reset(self) -> None:
        self.turns = []

    def ask(self, text: str) -> tuple[list[int], int, int]:
        """Append a user message; drops the oldest turns until prompt and answer fit.

        Returns:
            prompt ids, maximum number of new tokens, number of turns dropped.

        Raises:
            ValueError: this message alone does not fit, or the chat template rejects it; it is not added.
        """
        turns = [*self.turns, [{"role": "user", "content": text}]]
        limit = None if self.positions is None else self.positions - min(self.max_new_tokens, self.positions // 2)
        dropped = 0
        ids = self._encode(turns)
        while limit is not None and len(ids) > limit and len(turns) > 1:
            turns.pop(0)
            dropped += 1
            ids = self._encode(turns)
        if limit is not None and len(ids) > limit:
            raise ValueError(
                f"this message makes a prompt of {len(ids)} tokens, but {limit} of the model's {self.positions} "
                "positions are left beside the answer: shorten it, or lower --max_new_tokens."
            )
        self.turns = turns
        self.count += 1
        room = self.max_new_tokens if self.positions is None else min(self.max_new_tokens, self.positions - len(ids))
        return ids, room, dropped

    def answered(self, text: str) -> None:
        """Append the answer; an empty one removes its user message, because templates require alternating roles."""
        if text.strip():
            self.turns[-1].append({"role": "assistant", "content": text.strip()})
        else:
            self.turns.pop()

    def _encode(self, turns: list[list[Message]]) -> list[int]:
        messages = self.system + [message for turn in turns for message in turn]
        return encode_prompt(self.tokenizer, messages, parse_special_tokens=self.parse_special_tokens)


def write_answer(tokens: Iterator[int], tokenizer: PreTrainedTokenizerBase, *, stops: list[int], out: TextIO) -> str:
    """Stream an answer to the terminal and return it; Ctrl-C stops it and keeps the printed part."""
    streamed, answer = StreamedText(tokenizer), ""

    def show(piece: str) -> None:
        nonlocal answer
        piece = piece if answer else piece.lstrip()
        answer += piece
        out.write(printable(piece))
        out.flush()

    try:
        for token in tokens:
            if token not in stops:
                show(streamed.add(token))
        show(streamed.finish())
    except KeyboardInterrupt:
        out.write(" [stopped]")
    out.write("\n")
    out.flush()
    return answer


def lines_of(source: TextIO, *, out: TextIO) -> Iterator[str]:
    """Lines until end of input, /quit, or Ctrl-C at the prompt; prompts only on a terminal."""
    interactive = source.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input(); absent on some systems)
    while True:
        try:
            line = input("\nyou> ") if interactive else source.readline()
        except (EOFError, KeyboardInterrupt):
            out.write("\n")
            return
        if (not interactive and not line) or line.strip() == "/quit":
            return
        if line.strip():
            yield line.strip()


def chat(
    engine: HybridEngine,
    conversation: Conversation,
    lines: Iterator[str],
    *,
    stops: list[int],
    sampling: dict[str, Any],
    out: TextIO,
) -> None:
    """Answer every input line. `sampling`: keywords of HybridEngine.stream."""
    tokenizer = conversation.tokenizer
    with engine.generation():
        for line in lines:
            if line == "/reset":
                conversation.reset()
                out.write("[forgotten]\n")
                continue
            if line.startswith("/"):
                out.write(printable(f"[no command {line.split()[0]}: {HELP}]\n"))
                continue
            try:
                ids, room, dropped = conversation.ask(line)
            except ValueError as error:
                out.write(printable(f"[{error}]\n"))
                continue
            if dropped:
                out.write(f"[{dropped} oldest turn(s) forgotten: the model's positions are full]\n")
            tokens = engine.stream(
                ids, max_new_tokens=room, eos_token_ids=stops, iteration=conversation.count, **sampling
            )
            conversation.answered(write_answer(tokens, tokenizer, stops=stops, out=out))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=HELP)
    parser.add_argument("model", help="folder of an exported model, or a hub name")
    parser.add_argument("--max_new_tokens", type=number_type(int, at_least=1), default=256,
                        help="longest answer, in tokens")  # fmt: skip
    parser.add_argument("--temperature", type=number_type(float, at_least=0), default=0.7,
                        help="0 takes the likeliest token always")  # fmt: skip
    parser.add_argument("--top_p", type=number_type(float, above=0, at_most=1), default=0.95,
                        help="sample from the likeliest tokens of this share")  # fmt: skip
    parser.add_argument("--top_k", type=number_type(int, at_least=0), default=0,
                        help="sample from this many likeliest tokens; 0: all")  # fmt: skip
    parser.add_argument("--seed", type=number_type(int, **SEEDS), default=0,
                        help="the same seed and lines give the same answers")  # fmt: skip
    parser.add_argument("--system", type=unicode_text, help="system message")
    parser.add_argument("--parse_special_tokens", action="store_true", help="what spells a control token (such as "
                        "<|im_end|>) in a line becomes that token; default: plain text")  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on a GPU, fp32 on CPU")
    parser.add_argument("--trust_remote_code", action="store_true", help=TRUST_HELP)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # bytes that are invalid in the console's encoding
    with exit_on_mistake("chat"):
        return run(options)


def run(options: argparse.Namespace) -> int:
    """Load the model and chat until the input ends; returns the exit status."""
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    try:
        if mistakes := model_problems(
            "MODEL", options.model, tokens=0, lengths="", trust_remote_code=options.trust_remote_code, causal=True
        ):
            raise ValueError("\n".join(mistakes))
        tokenizer = load_tokenizer(options.model, trust_remote_code=options.trust_remote_code)
        dtype = DTYPES[options.dtype or ("fp32" if on_cpu else "bf16")]
        model = load_causal_lm(
            options.model, dtype=dtype, tokenizer=tokenizer, trust_remote_code=options.trust_remote_code
        ).to(accelerator.device_name()).eval()
    except ValueError as error:
        print(printable(error), file=sys.stderr)
        return 2
    positions, _ = position_limit(model.config)
    conversation = Conversation(
        tokenizer, system=options.system, positions=positions, max_new_tokens=options.max_new_tokens,
        parse_special_tokens=options.parse_special_tokens,
    )  # fmt: skip
    stops = stop_token_ids(tokenizer, model.generation_config.eos_token_id)
    if sys.stdin.isatty():
        print(f"{options.model}, {model.num_parameters() / 1e6:.1f}M parameters. {HELP}")
    try:
        params = SamplingParams(options.temperature, options.top_k, options.top_p)
        lines = lines_of(sys.stdin, out=sys.stdout)
        chat(HybridEngine(model), conversation, lines, stops=stops, sampling={"sampling": params, "seed": options.seed},
             out=sys.stdout)  # fmt: skip
    except ValueError as error:
        print(printable(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
