"""Chat with an exported model, or with two side by side, in the terminal or on a local web page.

    python scripts/chat.py OUTPUT_DIR [--temperature 0.7] [--system "Be brief."]
    python scripts/chat.py OUTPUT_DIR OTHER_DIR
    python scripts/chat.py OUTPUT_DIR OTHER_DIR --web [--ratings output/chat_ratings.jsonl]

Ctrl-C interrupts the current answer, Ctrl-C at the prompt exits. /reset clears the conversation, /quit exits. Lines may
be piped in: each is one turn. On the page of --web, ratings of two answers are appended to a file of preference pairs
for step 2; Ctrl-C in the terminal ends it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from chat_model import DTYPES, ChatSettings, load_chat_models
from chat_terminal import HELP, chat, lines_of
from chat_web.access import TOKEN_VARIABLE, host_problems
from chat_web.ratings import RatingsFile
from chat_web.server import bound_server, serve_chat

from dschat.arguments.models import TRUST_HELP
from dschat.arguments.script_inputs import PORTS, SEEDS, exit_on_mistake, new_file, number_type, unicode_text
from dschat.distributed.terminal import printable

WEB_DEFAULTS = {"host": "127.0.0.1", "port": 8080, "token": None, "ratings": Path("output/chat_ratings.jsonl")}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=HELP)
    parser.add_argument("model", help="folder of an exported model, or a hub name")
    parser.add_argument("other_model", nargs="?", help="a second model, which answers the same prompts")
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
    add_web_flags(parser)
    return parser.parse_args(arguments)


def add_web_flags(parser: argparse.ArgumentParser) -> None:
    web = parser.add_argument_group("web page")
    web.add_argument("--web", action="store_true", help="serve a page for the browser instead of the terminal chat")
    web.add_argument("--ratings", type=new_file, metavar="FILE", help="jsonl file that ratings are appended to, for "
                     f"--data_path of step 2; default: {WEB_DEFAULTS['ratings']}")  # fmt: skip
    web.add_argument("--host", type=unicode_text, help="address to listen on; default: 127.0.0.1, which only this "
                     "machine reaches; others need --token")  # fmt: skip
    web.add_argument("--port", type=number_type(int, **PORTS),
                     help=f"port to listen on; 0: any; default: {WEB_DEFAULTS['port']}")  # fmt: skip
    web.add_argument("--token", type=unicode_text, help="secret that every request must carry; also read from the "
                     f"environment variable {TOKEN_VARIABLE}, which others cannot list")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # bytes that are invalid in the console's encoding
    with exit_on_mistake("chat"):
        return run(options)


def run(options: argparse.Namespace) -> int:
    """Load the models and chat until the input ends; returns the exit status."""
    names = list(vars(ChatSettings()))
    settings = ChatSettings(**{name: value for name, value in vars(options).items() if name in names})
    try:
        return run_web(options, settings) if options.web else run_terminal(options, settings)
    except ValueError as error:
        print(printable(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while models are loaded, or a second one
        print(file=sys.stderr)
        return 130


def run_terminal(options: argparse.Namespace, settings: ChatSettings) -> int:
    for name in WEB_DEFAULTS:
        if vars(options)[name] is not None:
            print(f"warning: --{name} has an effect only with --web", file=sys.stderr)
    models = load_chat_models(paths_of(options), dtype=options.dtype, trust_remote_code=options.trust_remote_code)
    if sys.stdin.isatty():
        for model in models:
            print(printable(f"{model.name}, {model.parameters / 1e6:.1f}M parameters."))
        print(HELP)
    chat(models, lines_of(sys.stdin, out=sys.stdout), settings=settings, out=sys.stdout)
    return 0


def run_web(options: argparse.Namespace, settings: ChatSettings) -> int:
    given = {name: value for name in WEB_DEFAULTS if (value := vars(options)[name]) is not None}
    web = argparse.Namespace(**(WEB_DEFAULTS | {"token": os.environ.get(TOKEN_VARIABLE)} | given))
    if problems := host_problems(web.host, token=web.token):
        raise ValueError("\n".join(problems))
    ratings = RatingsFile(web.ratings)
    with bound_server(web.host, web.port, token=web.token) as server:  # before the models load
        models = load_chat_models(paths_of(options), dtype=options.dtype, trust_remote_code=options.trust_remote_code)
        serve_chat(server, models, settings=settings, ratings=ratings)
    return 0


def paths_of(options: argparse.Namespace) -> list[str]:
    return [options.model] if options.other_model is None else [options.model, options.other_model]


if __name__ == "__main__":
    raise SystemExit(main())
