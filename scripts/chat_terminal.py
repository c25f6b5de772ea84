"""Chat in the terminal with one model, or with two that answer the same prompt."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from typing import TextIO

from chat_columns import MIN_COLUMNS, stream_columns
from chat_model import ChatModel, ChatSettings
from conversation import Conversation
from streamed_text import Answer

from dschat.distributed.terminal import printable

HELP = "/reset clears the conversation, /quit exits, Ctrl-C interrupts an answer."
LABELS = "AB"


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


def chat(models: Sequence[ChatModel], lines: Iterator[str], *, settings: ChatSettings, out: TextIO) -> None:
    """Answer every input line. Each model has a conversation of its own, with its own answers."""
    conversations = [model.conversation(settings) for model in models]
    with contextlib.ExitStack() as stack:
        for model in models:
            stack.enter_context(model.engine.generation())
        for line in messages_of(lines, conversations, out=out):
            answers = [
                start_answer(model, conversation, line, settings=settings, label=label, out=out)
                for model, conversation, label in zip(models, conversations, labels_of(models), strict=True)
            ]
            write_answers(models, answers, out=out)
            for conversation, answer in zip(conversations, answers, strict=True):
                if answer is not None:
                    conversation.add_answer(answer.text)


def labels_of(models: Sequence[ChatModel]) -> list[str]:
    """What notes about a model begin with: "" where there is only one."""
    return [""] if len(models) == 1 else [f"{label}: " for label in LABELS[: len(models)]]


def messages_of(lines: Iterator[str], conversations: Sequence[Conversation], *, out: TextIO) -> Iterator[str]:
    """The lines that are messages; commands are run."""
    for line in lines:
        if line == "/reset":
            for conversation in conversations:
                conversation.reset()
            out.write("[conversation cleared]\n")
        elif line.startswith("/"):
            out.write(printable(f"[unknown command {line.split()[0]}: {HELP}]\n"))
        else:
            yield line


def start_answer(
    model: ChatModel, conversation: Conversation, line: str, *, settings: ChatSettings, label: str, out: TextIO
) -> Answer | None:
    """Add a message to the conversation; None, with a note, if it does not fit."""
    try:
        ids, max_new_tokens, dropped = conversation.add_user_message(line)
    except ValueError as error:
        out.write(printable(f"[{label}{error}]\n"))
        return None
    if dropped:
        out.write(f"[{label}{dropped} oldest turn(s) dropped: the conversation exceeds the model's positions]\n")
    return model.answer(ids, settings, max_new_tokens=max_new_tokens, iteration=conversation.count)


def write_answers(models: Sequence[ChatModel], answers: Sequence[Answer | None], *, out: TextIO) -> None:
    """Stream the answers: side by side on a wide terminal, else one after the other."""
    size = shutil.get_terminal_size()
    movable = out.isatty() and os.environ.get("TERM", "dumb") != "dumb"  # rows can be written again
    if len(models) > 1 and movable and size.columns >= MIN_COLUMNS:
        headings = [label + model.name for label, model in zip(labels_of(models), models, strict=True)]
        stream_columns(answers, headings=headings, size=size, out=out)
        return
    for number, (model, label, answer) in enumerate(zip(models, labels_of(models), answers, strict=True)):
        if answer is not None:
            if label:
                out.write(printable(("\n" if number else "") + f"{label}{model.name}\n"))
            write_answer(answer, out=out)


def write_answer(answer: Answer, *, out: TextIO) -> None:
    """Stream an answer to the terminal; Ctrl-C stops it, and the printed part stays its text."""
    begun = False
    try:
        for piece in answer:
            piece = piece if begun else piece.lstrip()
            begun = begun or bool(piece)
            out.write(printable(piece))
            out.flush()
    except KeyboardInterrupt:
        out.write(" [interrupted]")
    out.write("\n")
    out.flush()
