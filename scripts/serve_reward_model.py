"""Serve a saved reward model over HTTP, for `--reward http://HOST:PORT/score`.

    DSCHAT_REWARD_TOKEN=... python scripts/serve_reward_model.py output/reward --host 0.0.0.0 --port 8000

POST /score takes {"messages": [[{"role": "user", "content": "..."}], ...], "responses": ["...", ...]} and, if some
responses were truncated, "ended": [true, false, ...]; it returns {"scores": [...]}. GET /health returns the number of
queued requests and conversations. Requests are batched. Too large requests get 413, requests beyond the queue 503 with
Retry-After. Idle connections are closed, the oldest first if there are too many. On SIGTERM, accepted requests are
answered before the server exits.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import errno
import resource
import signal
import socket
import sys

import torch
from deepspeed.accelerator import get_accelerator

from dschat.arguments.models import TRUST_HELP
from dschat.arguments.script_inputs import PORTS, exit_on_mistake, number_type
from dschat.distributed.deepspeed_config import DTYPES
from dschat.distributed.terminal import printable
from dschat.models.packed.trial import enable_packing
from dschat.models.scalar_head import TokenScores, has_scalar_head, load_scalar_head
from dschat.models.tokenizer import load_tokenizer
from dschat.rewards.reward_client import TOKEN_VARIABLE, token_of_environment
from dschat.rewards.reward_model import longest_sequence
from dschat.rewards.server.connections import serve
from dschat.rewards.server.limits import Limits
from dschat.rewards.server.reward_server import RewardServer
from dschat.rewards.server.text_scorer import TextScorer
from dschat.runs.validation import model_problems

OTHER_FILES = 128  # file descriptors besides the connections


def load_scorer(
    path: str, *, dtype: torch.dtype, device: str, max_tokens: int, trust_remote_code: bool = False
) -> TextScorer:
    """Load the saved classifier and its tokenizer.

    Args:
        max_tokens: 0: the model's maximum.
        trust_remote_code: run Python code from the model folder.

    Raises: ValueError if there is no model, it has no scalar head, or max_tokens is negative.
    """
    if max_tokens < 0:
        raise ValueError(f"--max_tokens {max_tokens}: must be at least 0")
    if mistakes := model_problems("MODEL", path, tokens=0, lengths="", trust_remote_code=trust_remote_code):
        raise ValueError("\n".join(mistakes))
    if not has_scalar_head(path, trust_remote_code=trust_remote_code):
        raise ValueError(f"{path} has no scalar head: its scores would be random. Name an output folder of step 2.")
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    model = load_scalar_head(path, dtype=dtype, tokenizer=tokenizer, trust_remote_code=trust_remote_code).to(device)
    network = TokenScores(model)
    network.backbone.use_cpu_kernels()
    enable_packing(network, remove_padding=True, share_prompts=False)
    longest = longest_sequence(model.config, tokenizer)
    return TextScorer(network, tokenizer, max_tokens=min(max_tokens or longest, longest))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a reward model, or a hub name")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: this machine only")
    parser.add_argument("--port", type=number_type(int, **PORTS), default=8000, help="port to listen on; 0: any")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on a GPU, fp32 on CPU")
    parser.add_argument("--max_tokens", type=number_type(int), default=0,
                        help="longer conversations are truncated on the left; 0: the model's maximum")  # fmt: skip
    parser.add_argument("--trust_remote_code", action="store_true", help=TRUST_HELP)
    parser.add_argument("--shutdown_seconds", type=number_type(float, at_least=0), default=30.0,
                        help="seconds after SIGTERM to answer the accepted requests")  # fmt: skip
    for limit in dataclasses.fields(Limits):
        parser.add_argument(f"--{limit.name}", type=number_type(type(limit.default)), default=limit.default,
                            help=f"{limit.metadata['help']}; default: {limit.default}")  # fmt: skip
    return parser.parse_args(arguments)


def problems(limits: Limits, *, host: str, token: str | None) -> list[str]:
    """One line for each invalid setting."""
    lines = []
    if token is None and host not in ("127.0.0.1", "localhost", "::1"):
        lines.append(f"--host {host}: others can reach it, so set the environment variable {TOKEN_VARIABLE}")
    for name, value in dataclasses.asdict(limits).items():
        if value < 0 or (value == 0 and name != "max_wait"):
            lines.append(f"--{name} {value}: must be above 0")
    if limits.max_rows > limits.max_queue:
        lines.append(f"--max_rows {limits.max_rows} is more than --max_queue {limits.max_queue}: raise the latter")
    if limits.max_body > limits.max_held:
        lines.append(f"--max_body {limits.max_body} is more than --max_held {limits.max_held}: raise the latter")
    return lines


def check_address(host: str, port: int) -> None:
    """Raise ValueError if the address cannot be bound; checked before the model is loaded."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--host {host}: is not an address of this machine ({error})") from error
    problems = []
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ValueError(f"--port {port}: is in use; end that program, or choose another") from error
            problems.append(error.strerror)
    if len(problems) == len(addresses):  # localhost may resolve to addresses that are not all available
        raise ValueError(f"--host {host} --port {port}: cannot listen there ({problems[0]})")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    with exit_on_mistake("serve_reward_model"):
        return serve_model(options)


def serve_model(options: argparse.Namespace) -> int:
    """Load the model and serve it until a signal arrives; returns the exit status."""
    limits = Limits(**{limit.name: vars(options)[limit.name] for limit in dataclasses.fields(Limits)})
    allowed = allow_files(limits.max_connections + OTHER_FILES) - OTHER_FILES
    if limits.max_connections > allowed:  # at the file limit, accept() fails for every client
        print(f"warning: --max_connections {limits.max_connections}: this system allows {allowed}", file=sys.stderr)
        limits = dataclasses.replace(limits, max_connections=max(allowed, 1))
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    try:
        token = token_of_environment()
        if mistakes := problems(limits, host=options.host, token=token):
            raise ValueError("\n".join(mistakes))
        check_address(options.host, options.port)
        scorer = load_scorer(
            options.model, dtype=DTYPES[options.dtype or ("fp32" if on_cpu else "bf16")],
            device=accelerator.device_name(), max_tokens=options.max_tokens,
            trust_remote_code=options.trust_remote_code,
        )  # fmt: skip
    except ValueError as error:
        print(printable(error), file=sys.stderr)
        return 2
    server = RewardServer(scorer, limits=limits, token=token)
    try:
        asyncio.run(
            serve_until_signal(server, host=options.host, port=options.port, shutdown_seconds=options.shutdown_seconds)
        )
    except OSError as error:
        print(f"--host {options.host} --port {options.port}: cannot listen there ({error})", file=sys.stderr)
        return 2
    return 0


async def serve_until_signal(server: RewardServer, *, host: str, port: int, shutdown_seconds: float) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await serve(
        server.app(), server.connections, host=host, port=port, shutdown_seconds=shutdown_seconds, until=stopped,
        ready=lambda address: print(f"Running on {address} (Ctrl-C ends)", flush=True),
    )  # fmt: skip


def allow_files(limit: int) -> int:
    """Raise the limit of open files to `limit` if the system allows; returns the resulting limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return limit
    return limit if soft == resource.RLIM_INFINITY else soft


if __name__ == "__main__":
    raise SystemExit(main())
