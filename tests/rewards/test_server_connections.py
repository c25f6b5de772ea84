"""Idle connections are closed, and complete requests are served whatever the number of other connections."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from aiohttp import web
from test_rewards import classifier
from tiny_tokenizers import BOS_HEADERS, make_tokenizer

from dschat.models.scalar_head import TokenScores
from dschat.rewards.server.connections import Connections, serve
from dschat.rewards.server.limits import Limits
from dschat.rewards.server.reward_server import RewardServer
from dschat.rewards.server.score_request import TooLarge, parse_score_request
from dschat.rewards.server.text_scorer import TextScorer

TOKEN = "a secret"
QUESTION = {"messages": [[{"role": "user", "content": "What is 2 plus 3?"}]], "responses": ["It is 5."]}
HALF = b"POST /score HTTP/1.1\r\nHost: x\r\nX-Slow: "  # a header without end


def request_of(question: Any, *, token: str | None = TOKEN) -> bytes:
    body = json.dumps(question).encode()
    head = f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    return (head + (f"Authorization: Bearer {token}\r\n" if token else "") + "\r\n").encode() + body


class Running:
    """A server in a thread of this process, and the clients of a test."""

    def __init__(self, port: int, connections: Connections, clients: ExitStack) -> None:
        self.port, self.connections, self._clients = port, connections, clients

    def connect(self, sent: bytes = b"", *, source: str = "127.0.0.1", **options: int) -> socket.socket:
        client = self._clients.enter_context(socket.socket())
        client.settimeout(60)
        for name, value in options.items():
            client.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        client.bind((source, 0))
        client.connect(("127.0.0.1", self.port))
        client.sendall(sent)
        return client

    def ask(
        self, question: Any = QUESTION, *, source: str = "127.0.0.1", token: str | None = TOKEN
    ) -> tuple[int, dict]:
        """Status and JSON of the answer to one request over a connection of its own."""
        with self.connect(request_of(question, token=token), source=source) as client:
            reply = client.makefile("rb")
            status = int(reply.readline().split()[1])
            size = 0
            while (line := reply.readline().strip()) != b"":
                name, _, value = line.partition(b":")
                size = int(value) if name.lower() == b"content-length" else size
            return status, json.loads(reply.read(size))


def is_closed(client: socket.socket) -> bool:
    """Whether the server has closed it; waits for as long as the client's time-out."""
    try:
        while client.recv(65536):
            pass
    except (ConnectionResetError, BrokenPipeError):
        return True
    except TimeoutError:
        return False
    return True


@contextmanager
def running(app: web.Application, connections: Connections) -> Iterator[Running]:
    started: list[str] = []
    known = threading.Event()
    loop, until = asyncio.new_event_loop(), asyncio.Event()

    def ready(address: str) -> None:
        started.append(address)
        known.set()

    def work() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(
            serve(app, connections, host="127.0.0.1", port=0, shutdown_seconds=5, ready=ready, until=until)
        )
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert known.wait(60)
        with ExitStack() as clients:
            yield Running(int(started[0].rpartition(":")[2]), connections, clients)
    finally:
        loop.call_soon_threadsafe(until.set)
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def scorer() -> TextScorer:
    tokenizer = make_tokenizer(bos="<s>", eos="</s>", pad="<pad>", template=BOS_HEADERS)
    return TextScorer(TokenScores(classifier(tokenizer, positions=64)), tokenizer, max_tokens=64)


@contextmanager
def reward_server(scorer: TextScorer, **limits: Any) -> Iterator[Running]:
    server = RewardServer(scorer, limits=Limits(**limits), token=TOKEN)
    with running(server.app(), server.connections) as found:
        yield found


def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_headers_that_never_end_lock_nobody_out(scorer):
    with reward_server(scorer, max_connections=100, max_header_seconds=600) as server:
        half = [server.connect(HALF) for _ in range(250)]
        for _ in range(3):
            status, reply = server.ask()
            assert status == 200 and len(reply["scores"]) == 1
            assert len(server.connections) <= 100
        assert all(is_closed(client) for client in half[:150]), "the oldest made room"
        for client in half[160:]:
            client.settimeout(0.001)
            assert not is_closed(client)


def test_headers_that_never_end_are_closed(scorer):
    with reward_server(scorer, max_header_seconds=1) as server:
        half = [server.connect(HALF) for _ in range(20)]
        with pytest.raises(OSError):  # sending byte by byte does not help: the timeout covers the whole header
            for _ in range(1200):
                half[0].sendall(b"a")
                time.sleep(0.05)
        assert all(is_closed(client) for client in half)
        eventually(lambda: len(server.connections) == 0)


def test_silence_after_an_answer_has_its_time_too(scorer):
    with reward_server(scorer, max_header_seconds=0.5) as server:
        client = server.connect(request_of(QUESTION))
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        assert is_closed(client)
        assert is_closed(server.connect()), "one that never said anything"


def test_a_connection_serves_many_requests_and_the_time_counts_anew(scorer):
    with reward_server(scorer, max_header_seconds=4) as server:
        client = server.connect()
        for _ in range(5):
            time.sleep(1)
            client.sendall(request_of(QUESTION))
            assert client.recv(10000).startswith(b"HTTP/1.1 200")


def test_one_address_has_its_share_and_the_others_theirs(scorer):
    with reward_server(scorer, max_connections=60, max_connections_per_client=40, max_header_seconds=60) as server:
        greedy = [server.connect(HALF) for _ in range(80)]
        quiet = [server.connect(HALF, source="127.0.0.2") for _ in range(5)]
        eventually(lambda: len(server.connections) == 45)
        assert all(is_closed(client) for client in greedy[:40])
        more = [server.connect(HALF, source=f"127.0.0.{3 + i % 5}") for i in range(40)]
        assert server.ask(source="127.0.0.9")[0] == 200
        for client in (*quiet, *more):  # room is made where most is waited for
            client.settimeout(0.01)
            assert not is_closed(client)
        assert len(server.connections) <= 60


def test_no_token_no_connection(scorer):
    with reward_server(scorer) as server:
        client = server.connect(request_of(QUESTION, token=None))
        assert client.recv(1000).startswith(b"HTTP/1.1 401") and is_closed(client)
        assert server.ask(token="another")[0] == 401


def test_where_all_connections_are_being_answered_a_new_one_is_refused():
    answer = threading.Event()

    async def slow(_: web.Request) -> web.Response:
        await asyncio.get_running_loop().run_in_executor(None, answer.wait)
        return web.Response(text="done")

    connections = Connections(max_connections=2, max_per_client=9, seconds=0.3)
    app = web.Application(middlewares=[connections.middleware()])
    app.router.add_post("/score", slow)
    with running(app, connections) as server:
        asked = [server.connect(request_of({})) for _ in range(2)]
        eventually(lambda: len(server.connections) == 2 and not connections._deadlines)
        assert is_closed(server.connect(request_of({})))
        time.sleep(0.6)  # longer than the client timeout, but here the server is the slow one
        answer.set()
        assert all(client.recv(1000).startswith(b"HTTP/1.1 200") for client in asked)


def test_a_client_that_does_not_read_its_answer_is_closed():
    async def large(_: web.Request) -> web.Response:
        return web.Response(body=bytes(64 << 20))

    connections = Connections(max_connections=9, max_per_client=9, seconds=0.5)
    app = web.Application(middlewares=[connections.middleware()])
    app.router.add_post("/score", large)
    with running(app, connections) as server:
        client = server.connect(request_of({}), SO_RCVBUF=4096)
        eventually(lambda: len(connections) == 1)
        eventually(lambda: len(connections) == 0)
        assert is_closed(client)


def chat_of(messages: int) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": "Add 2 and 3, please."} for i in range(messages)]


def test_too_many_messages_or_characters_are_refused_before_a_template_reads_them(scorer, monkeypatch):
    with reward_server(scorer, max_messages=50, max_characters=2000) as server:
        assert server.ask({"messages": [chat_of(25)] * 2, "responses": ["a"] * 2})[0] == 200
        monkeypatch.setattr(scorer, "encode", lambda _: pytest.fail("the template was rendered"))
        status, reply = server.ask({"messages": [chat_of(26), chat_of(25)], "responses": ["a"] * 2})
        assert status == 413 and reply["error"].startswith("51 messages exceed the limit of 50")
        for question in (
            QUESTION | {"responses": ["x" * 2000]},
            QUESTION | {"messages": [[{"role": "x" * 2000, "content": ""}]]},
        ):
            status, reply = server.ask(question)
            assert status == 413 and "characters exceed the limit of 2000" in reply["error"]
        monkeypatch.undo()
        assert server.ask()[0] == 200


def test_the_default_limits_let_a_batch_of_a_run_through():
    rows = 512
    body = json.dumps({"messages": [chat_of(5)] * rows, "responses": ["word " * 800] * rows}).encode()
    assert len(parse_score_request(body, Limits()).responses) == rows
    with pytest.raises(TooLarge, match="messages"):
        parse_score_request(json.dumps({"messages": [chat_of(9000)], "responses": ["a"]}).encode(), Limits())


def test_a_chat_of_3001_messages_is_rendered_a_few_times_only(scorer, monkeypatch):
    """It held the server for more than 15 s: every turn was rendered with all turns before it."""
    rendered, render = [], type(scorer.tokenizer).apply_chat_template
    monkeypatch.setattr(
        type(scorer.tokenizer), "apply_chat_template",
        lambda this, chat, **options: (rendered.append(len(chat)), render(this, chat, **options))[1],
    )  # fmt: skip
    with reward_server(scorer) as server:
        status, reply = server.ask({"messages": [chat_of(3001)], "responses": ["It is 5."]})
    assert status == 200 and len(reply["scores"]) == 1 and torch.isfinite(torch.tensor(reply["scores"])).all()
    assert sum(rendered) < 5 * 3001
