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
from conversation import Conversation
from deepspeed.accelerator import get_accelerator
from streamed_text import StreamedText
from transformers import PreTrainedTokenizerBase

from dschat.arguments.models import TRUST_HELP
from dschat.arguments.script_inputs import SEEDS, exit_on_mistake, number_type, unicode_text
from dschat.data.chat_template import stop_token_ids
from dschat.distributed.terminal import printable
from dschat.generation import HybridEngine, SamplingParams
from dschat.models.causal_lm import load_causal_lm, load_tokenizer
from dschat.models.positions import position_limit
from dschat.models.tokenizer import id_limit
from dschat.runs.validation import model_problems

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HELP = "/reset clears the conversation, /quit exits, Ctrl-C interrupts an answer."


def write_answer(tokens: Iterator[int], tokenizer: PreTrainedTokenizerBase, *, stops: list[int], out: TextIO) -> str:
    """Stream an answer to the terminal and return it; Ctrl-C stops it and keeps the printed part."""
    streamed, answer = StreamedText(tokenizer), ""

    def write(piece: str) -> None:
        nonlocal answer
        piece = piece if answer else piece.lstrip()
        answer += piece
        out.write(printable(piece))
        out.flush()

    try:
        for token in tokens:
            if token not in stops:
                write(streamed.add(token))
        write(streamed.finish())
    except KeyboardInterrupt:
        out.write(" [interrupted]")
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
                out.write("[conversation cleared]\n")
                continue
            if line.startswith("/"):
                out.write(printable(f"[unknown command {line.split()[0]}: {HELP}]\n"))
                continue
            try:
                ids, max_new_tokens, dropped = conversation.add_user_message(line)
            except ValueError as error:
                out.write(printable(f"[{error}]\n"))
                continue
            if dropped:
                out.write(f"[{dropped} oldest turn(s) dropped: the conversation exceeds the model's positions]\n")
            tokens = engine.stream(
                ids, max_new_tokens=max_new_tokens, eos_token_ids=stops, iteration=conversation.count, **sampling
            )
            conversation.add_answer(write_answer(tokens, tokenizer, stops=stops, out=out))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=HELP)
    parser.add_argument("model", help="folder of an exported model, or a hub name")
    parser.add_argument("--max_new_tokens", type=number_type(int, at_least=1), default=256,
                        help="longest answer, in tokens")  # fmt: skip
    parser.add_argument("--temperature", type=number_type(float, at_least=0), default=0.7,
                        help="0: greedy")  # fmt: skip
    parser.add_argument("--top_p", type=number_type(float, above=0, at_most=1), default=0.95,
                        help="sample from the most likely tokens with this total probability")  # fmt: skip
    parser.add_argument("--top_k", type=number_type(int, at_least=0), default=0,
                        help="sample from this many most likely tokens; 0: all")  # fmt: skip
    parser.add_argument("--seed", type=number_type(int, **SEEDS), default=0,
                        help="the same seed and lines give the same answers")  # fmt: skip
    parser.add_argument("--system", type=unicode_text, help="system message")
    parser.add_argument("--parse_special_tokens", action="store_true", help="encode control-token strings "
                        "(such as <|im_end|>) in a line as control tokens; default: as plain text")  # fmt: skip
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
        params = SamplingParams(options.temperature, options.top_k, options.top_p, vocabulary_size=id_limit(tokenizer))
        lines = lines_of(sys.stdin, out=sys.stdout)
        chat(HybridEngine(model), conversation, lines, stops=stops, sampling={"sampling": params, "seed": options.seed},
             out=sys.stdout)  # fmt: skip
    except ValueError as error:
        print(printable(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
