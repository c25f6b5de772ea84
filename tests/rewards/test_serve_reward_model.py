"""The reward server: equal to the scores of RewardModel, and robust to bad clients."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from repository import SCRIPTS
from rlhf_models import group_of_one
from test_rewards import ANSWERS, ENDED, MESSAGES, actor_tokenizer, classifier, reward_model, rollout_of
from tiny_tokenizers import BOS_HEADERS, make_tokenizer

from dschat.rewards.retry import RetryPolicy
from dschat.rewards.server.dynamic_batches import DynamicBatches, QueueFull
from dschat.rewards.weighted_sum import ResponseBatch, Rewards, parse_reward

SERVER = SCRIPTS / "serve_reward_model.py"
TOKEN = "a secret"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
CHAT = [{"role": "user", "content": "What is 2 plus 3?"}]


class Server:
    """The program in a process of its own."""

    def __init__(self, folder: Path, *flags: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        environment = os.environ | {"DSCHAT_REWARD_TOKEN": TOKEN, "no_proxy": "127.0.0.1"}
        self.log = open(folder.parent / f"server-{port}.log", "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, SERVER, folder, "--port", str(port), *map(str, flags)], stdout=self.log, stderr=self.log,
            env=environment,
        )  # fmt: skip
        deadline = time.monotonic() + 120
        while "Running on" not in self.output():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def output(self) -> str:
        return Path(self.log.name).read_text()

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def memory(self) -> int:
        """Bytes that are resident."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self.log.close()


@pytest.fixture(scope="module")
def many_files() -> Iterator[None]:
    """1,000 connections are 1,000 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A saved reward model that begins with BOS and reads 64 tokens."""
    path = tmp_path_factory.mktemp("served") / "reward"
    tokenizer = own_tokenizer()
    classifier(tokenizer, positions=64).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def own_tokenizer():
    return make_tokenizer(bos="<s>", eos="</s>", pad="<pad>", template=BOS_HEADERS)


LIMITS = {
    "--max_queue": 300, "--max_rows": 8, "--max_batch_rows": 16, "--max_body": 200_000, "--max_held": 2_000_000,
    "--max_read_seconds": 1, "--max_wait": 0.02,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(folder, many_files) -> Iterator[Server]:
    running = Server(folder, *(word for pair in LIMITS.items() for word in pair))
    yield running
    assert running.stop() == 0 and "Traceback" not in running.output()


def post(server: Server, bodies: list[Any], *, headers: dict | None = None) -> list[tuple[int, dict, dict]]:
    """Status, JSON and headers of each reply; the requests are concurrent, each over its own connection."""

    async def one(session: aiohttp.ClientSession, body: Any) -> tuple[int, dict, dict]:
        data = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
        async with session.post(f"{server.url}/score", data=data, headers=headers or HEADERS) as reply:
            return reply.status, await reply.json(), dict(reply.headers)

    async def all_of_them() -> list[tuple[int, dict, dict]]:
        connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=90)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            return await asyncio.gather(*(one(session, body) for body in bodies))

    return asyncio.run(all_of_them())


def health(server: Server) -> dict:
    async def get() -> dict:
        async with aiohttp.ClientSession() as session, session.get(f"{server.url}/health") as reply:
            assert reply.status == 200
            return await reply.json()

    return asyncio.run(get())


def question(response: str = "It is 5.", **fields: Any) -> dict:
    return {"messages": [CHAT], "responses": [response]} | fields


@contextmanager
def leaves_nothing_behind(server: Server) -> Iterator[None]:
    """Asserts that afterwards no request waits and no further file is open."""
    files = server.open_files()
    yield
    wait_until(lambda: health(server) == {"status": "ok", "requests": 0, "waiting": 0})
    wait_until(lambda: server.open_files() <= files + 1)


def wait_until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_scores_are_those_of_the_reward_model_in_the_run(server, monkeypatch):
    monkeypatch.setenv("DSCHAT_REWARD_TOKEN", TOKEN)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    actor, own = actor_tokenizer(), own_tokenizer()
    long = [[*MESSAGES[0][:-1], {"role": "user", "content": "word " * 200}]]  # cut from the left to 64 tokens
    rollout = rollout_of(actor)
    answers = ResponseBatch([*MESSAGES[:2], *long], ANSWERS, rollout.responses(), [{}] * 3, ENDED, max_tokens=64)
    with group_of_one():
        model = reward_model(classifier(own, positions=64), own, actor)
        expected = model.score(rollout, answers.messages)
        served = Rewards([parse_reward(f"{server.url}/score")], normalize=False,
                         retry_policy=RetryPolicy(seconds=30.0, retries=0)).score(rollout, answers)  # fmt: skip
    assert served.has_score.all()
    torch.testing.assert_close(served.total, expected, atol=1e-5, rtol=1e-4)
    assert len({round(score, 3) for score in expected.tolist()}) == 3


def test_a_thousand_concurrent_requests_are_answered_or_refused(server):
    responses = [f"It is {number}." for number in range(1000)]
    ((_, reply, _),) = post(server, [{"messages": [CHAT] * 8, "responses": responses[:8]}])
    expected = dict(enumerate(reply["scores"]))
    post(server, [question(response) for response in responses[:400]])  # pools and caches reach their final size
    before = server.memory()
    with leaves_nothing_behind(server):
        replies = post(server, [question(response) for response in responses])
        statuses = [status for status, _, _ in replies]
        assert set(statuses) <= {200, 503} and statuses.count(200) >= LIMITS["--max_queue"]
        assert statuses.count(503) > 0, "the queue has a bound"
        for number, (status, reply, headers) in enumerate(replies):
            assert headers["Retry-After"] == "1" if status == 503 else len(reply["scores"]) == 1
            if status == 200 and number in expected:
                assert reply["scores"][0] == pytest.approx(expected[number], abs=1e-5)
    assert server.memory() - before < 64 << 20


def test_a_missing_or_wrong_token_is_refused_before_the_body_is_read(server):
    with leaves_nothing_behind(server):
        for headers in ({"X": "y"}, {"Authorization": "Bearer a secreT"}, {"Authorization": TOKEN},
                        {"Authorization": "Bearer gr\u00fcn"}, {"Authorization": ""}):  # fmt: skip
            ((status, reply, _),) = post(server, [b"x" * 1000], headers=headers)
            assert status == 401 and "Bearer TOKEN" in reply["error"]


async def in_pieces(count: int, size: int = 50_000) -> Any:
    for _ in range(count):
        yield b"[" * size


def test_a_body_too_large_is_refused_whatever_its_headers_declare(server):
    with leaves_nothing_behind(server):
        compressed = gzip.compress(b'["' + b"x" * 50_000_000 + b'"]')
        assert len(compressed) < 100_000
        (whole,) = post(server, [b"x" * 200_001])
        (streamed,) = post(server, [in_pieces(100)])
        for status, reply, _ in (whole, streamed):
            assert status == 413 and "split it" in reply["error"]
        ((status, reply, _),) = post(server, [compressed], headers=HEADERS | {"Content-Encoding": "gzip"})
        assert status == 400 and "not JSON" in reply["error"]  # it is not decompressed


BAD = {
    b"": "not JSON",
    b"{": "not JSON",
    b"[" * 100_000: "not JSON",
    b"\xff\xfe\x00": "not JSON",
    b"3": "must be an object",
    b"{}": "responses must be a list of texts",
    b'{"responses": []}': "responses must be a list of texts",
    b'{"responses": [1], "messages": [[]]}': "responses must be a list of texts",
    b'{"responses": ["a"]}': "messages must be a list of chats",
    b'{"responses": ["a"], "messages": [[{"role": "user"}]]}': "messages must be a list of chats",
    b'{"responses": ["a"], "messages": ["a"]}': "messages must be a list of chats",
    b'{"responses": ["a", "b"], "messages": [[]]}': "the numbers must be equal",
    b'{"responses": ["a"], "messages": [[]], "ended": [1]}': "ended must be",
    b'{"responses": ["\\ud800"], "messages": [[]]}': "lone surrogate",
    json.dumps({"responses": ["a"] * 9, "messages": [[]] * 9}).encode(): "9 responses exceed the limit of 8",
}


def test_an_invalid_request_gets_status_400_and_the_reason(server):
    with leaves_nothing_behind(server):
        for body, part in BAD.items():
            ((status, reply, _),) = post(server, [body])
            assert status == 400 and part in reply["error"], (body[:60], reply)


def test_further_fields_do_not_change_the_scores(server):
    (plain,) = post(server, [question()])
    more = [{"role": "user", "content": CHAT[0]["content"], "tool_calls": [{"name": "f"}], "name": "me"}]
    (extended,) = post(server, [question(messages=[more], rows=[{"a": 1}], prompts=["p"], add_generation_prompt=True)])
    assert extended[1]["scores"] == [pytest.approx(plain[1]["scores"][0], abs=1e-6)]
    openrlhf = {"query": [CHAT[0]["content"] + "It is 5."], "prompts": [CHAT[0]["content"]], "labels": ["5"]}
    for (reply,), fields in ((post(server, [body]), body) for body in (openrlhf, question(response="It is 5."))):
        assert reply[0] == 200 and reply[1]["rewards"] == reply[1]["scores"], fields


def test_other_paths_and_methods_are_refused(server):
    async def statuses() -> list[int]:
        async with aiohttp.ClientSession() as session:
            codes = []
            for method, path in (("GET", "/score"), ("POST", "/health"), ("GET", "/../etc/passwd"), ("GET", "/")):
                async with session.request(method, server.url + path) as reply:
                    codes.append(reply.status)
            return codes

    assert asyncio.run(statuses()) == [405, 405, 404, 404]


def test_rows_of_clients_that_disconnect_are_dropped(server):
    body = json.dumps(question()).encode()
    head = (
        f"POST /score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    with leaves_nothing_behind(server):
        for sent in (head + body, head + body[:10], head, head[:20], b"\x00\x01nonsense\r\n\r\n"):
            gone = [socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) for _ in range(40)]
            for connection in gone:
                connection.sendall(sent)
            for connection in gone:
                connection.close()
        (after,) = post(server, [question()])
        assert after[0] == 200


def test_a_request_that_arrives_too_slowly_gets_status_408(server):
    with leaves_nothing_behind(server):

        async def slow() -> Any:
            yield b'{"responses"'
            await asyncio.sleep(1.5)
            yield b": []}"

        ((status, reply, _),) = post(server, [slow()])
        assert status == 408 and "within 1 s" in reply["error"]


def test_on_sigterm_the_queued_requests_are_answered(folder):
    server = Server(folder, "--max_wait", 1.5)  # a row stays queued at least this long

    async def interrupted() -> tuple[int, dict]:
        async with aiohttp.ClientSession(headers=HEADERS) as session:
            request = asyncio.create_task(session.post(f"{server.url}/score", json=question()))
            await asyncio.sleep(0.5)
            server.process.terminate()
            reply = await request
            return reply.status, await reply.json()

    status, reply = asyncio.run(interrupted())
    assert status == 200 and len(reply["scores"]) == 1
    assert server.process.wait(30) == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--host", "0.0.0.0"], "DSCHAT_REWARD_TOKEN"),
        (["--max_rows", "0"], "--max_rows 0: must be above 0"),
        (["--max_rows", "10", "--max_queue", "9"], "--max_rows 10 is more than --max_queue 9"),
        (["--max_body", "10", "--max_held", "9"], "--max_body 10 is more than --max_held 9"),
        (["--max_tokens", "-1"], "--max_tokens -1"),
    ],
)
def test_invalid_settings_are_refused(flags, part, folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SERVER.parent))
    monkeypatch.delenv("DSCHAT_REWARD_TOKEN", raising=False)
    from serve_reward_model import main

    assert main([str(folder), *flags]) == 2
    assert part in capsys.readouterr().err


def test_a_model_without_scalar_head_is_refused(tiny_llama_folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SERVER.parent))
    from serve_reward_model import main

    assert main([str(tiny_llama_folder)]) == 2
    assert "has no scalar head" in capsys.readouterr().err


class Recorder:
    """Work that records its batches; the score of a row is its length."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.batches: list[list[int]] = []
        self.seconds = seconds

    def __call__(self, rows: list) -> list[float]:
        self.batches.append([len(row) for row in rows])
        time.sleep(self.seconds)
        if any(len(row) == 13 for row in rows):
            raise RuntimeError("thirteen")
        return [float(len(row)) for row in rows]


def concurrent_scores(work: Recorder, requests: list[list[int]], **limits: Any) -> list[Any]:
    """The results of concurrent requests for rows of these lengths."""

    async def run() -> list[Any]:
        settings = {"max_rows": 4, "max_tokens": 100, "max_wait": 0.05, "max_queue": 100} | limits
        batches = DynamicBatches(work, **settings)
        worker = asyncio.create_task(batches.run())
        calls = (batches.scores([[0] * length for length in lengths]) for lengths in requests)
        results = await asyncio.gather(*calls, return_exceptions=True)
        worker.cancel()
        assert not batches.waiting
        return results

    return asyncio.run(run())


def test_rows_of_several_requests_share_batches_and_each_gets_its_own_scores():
    work = Recorder()
    assert concurrent_scores(work, [[1], [2, 3], [4], [5, 6]]) == [[1], [2, 3], [4], [5, 6]]
    assert work.batches == [[1, 2, 3, 4], [5, 6]]


def test_a_batch_has_at_most_max_tokens_with_padding_and_a_longer_row_is_a_batch_of_its_own():
    work = Recorder()
    concurrent_scores(work, [[10], [40], [30], [200], [1]])
    # 40 · 2 = 80 fits, 40 · 3 = 120 does not; nothing fits beside 200.
    assert work.batches == [[10, 40], [30], [200], [1]]


def test_a_failing_batch_fails_only_its_own_requests():
    results = concurrent_scores(Recorder(), [[13, 1], [2, 3], [4]])
    assert [type(one) for one in results[:2]] == [RuntimeError] * 2 and results[2] == [4]


def test_a_request_that_does_not_fit_into_the_queue_is_refused_as_a_whole():
    results = concurrent_scores(Recorder(), [[1, 1], [1, 1], [1, 1, 1], [1]], max_queue=5)
    assert isinstance(results[2], QueueFull) and [results[0], results[1], results[3]] == [[1, 1], [1, 1], [1]]


def test_a_caller_that_is_cancelled_leaves_no_row_behind():
    work = Recorder(seconds=0.2)

    async def run() -> None:
        batches = DynamicBatches(work, max_rows=1, max_tokens=100, max_wait=0.0, max_queue=100)
        worker = asyncio.create_task(batches.run())
        first, second = (asyncio.create_task(batches.scores([[0] * n, [0] * n])) for n in (1, 2))
        await asyncio.sleep(0.1)  # the first row is being worked on
        second.cancel()
        await asyncio.sleep(0.01)
        assert [len(row.ids) for row in batches.waiting] == [1]
        assert await first == [1, 1]
        worker.cancel()

    asyncio.run(run())
    assert work.batches == [[1], [1]]
