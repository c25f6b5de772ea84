"""Reward sources: parsing of entries, calls of functions, and valid responses of a service."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dschat.arguments import RLHFSettings, flag_values
from dschat.arguments.command_line import SettingsError, parse
from dschat.rewards.functions import load_function
from dschat.rewards.response_batch import ResponseBatch
from dschat.rewards.retry import NoScores, RetryPolicy, pause_before_retry
from dschat.rewards.reward_client import service_scores
from dschat.rewards.specification import model_paths, parse_reward, reward_problems

FUNCTIONS = """
import asyncio
import sys
import time

def by_name(responses, token_ids, messages, *, bonus=0, strict=False):
    return [len(r) + 10 * len(t) + 100 * len(m) + bonus + 0.5 * strict
            for r, t, m in zip(responses, token_ids, messages)]

def swapped(rows, responses, prompts):  # another order than a judge's
    return [row["x"] if prompt == "ask " + str(row["x"]) else -1 for row, prompt in zip(rows, prompts)]

def positional(texts, answers, others):
    return [0.0] * len(texts)

def everything(**arguments):
    return [arguments["max_tokens"] + ended for ended in arguments["ended"]]

def undecided(responses):
    return [None if "?" in response else 1 for response in responses]

async def later(responses):
    await asyncio.sleep(0.01)
    return [len(response) for response in responses]

async def endless(responses):
    try:
        await asyncio.sleep(60)
    finally:
        CANCELLED.append(True)

def fussy(responses):
    if "bad" in responses:
        raise KeyError("bad")
    return [2.0] * len(responses)

def leaves(responses):
    sys.exit("no key")

async def leaves_later(responses):
    sys.exit(3)

def interrupts(responses):
    raise KeyboardInterrupt

async def cancels(responses):
    raise asyncio.CancelledError

class Mine(BaseException):
    pass

def ends(responses):
    raise Mine("enough")

def unnamed(responses, /):
    return [0.0] * len(responses)

def huge(responses):
    return [1e300] * len(responses)

CANCELLED = []
LOADED = []
NUMBER = 3
"""


@pytest.fixture
def functions(tmp_path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def answers_of(responses: list[str], **changes: Any) -> ResponseBatch:
    count = len(responses)
    fields = {
        "messages": [[{"role": "user", "content": f"ask {n}"}] for n in range(count)], "responses": responses,
        "token_ids": [[5] * (n + 1) for n in range(count)], "rows": [{"x": n} for n in range(count)],
        "ended": [n % 2 == 0 for n in range(count)], "max_tokens": 7,
    } | changes  # fmt: skip
    return ResponseBatch(**fields)


def scores(entry: str, responses: list[str], *, seconds: float = 5.0, retries: int = 0, **changes: Any) -> list:
    values = parse_reward(entry).scores(answers_of(responses, **changes), RetryPolicy(seconds=seconds, retries=retries))
    return ["no score" if score is not None and math.isnan(score) else score for score in values]


@pytest.mark.parametrize(
    ("entry", "name", "weight"),
    [
        ("exact", "exact", 1.0),
        ("exact?column=truth&case=true@0.5", "exact", 0.5),
        ("repetition@-2e-1", "repetition", -0.2),
        ("http://localhost:8000/score?model=a@b", "localhost:8000", 1.0),  # this @ belongs to the URL
        ("https://rewards.example/score?key=1@3", "rewards.example", 3.0),
        ("some-owner/some-model@2", "some-model", 2.0),
    ],
)
def test_an_entry_is_parsed_into_a_source_and_a_weight(entry, name, weight):
    source = parse_reward(entry)
    assert (source.name, source.weight, source.entry) == (name, weight, entry)
    assert [source.model, source.function, source.url].count(None) == 2


def test_a_url_keeps_its_query_without_the_weight():
    assert parse_reward("http://localhost:8000/score?model=a@0.5").url == "http://localhost:8000/score?model=a"


def test_a_path_is_a_reward_model_even_if_its_name_is_that_of_a_rule(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exact").mkdir()
    assert parse_reward("./exact@2").model == "./exact" and parse_reward("exact").model is None
    assert parse_reward("./exact@2").name == "exact"
    entries = [f"{tmp_path}/exact", "length?max=3", f"{tmp_path}/exact@2", "owner/name"]
    assert model_paths(entries) == [f"{tmp_path}/exact", "owner/name"]


BAD = {
    "length?max=0": "one of target=TOKENS and max=TOKENS",
    "length?max=many": "max=many: must be a whole number",
    "length?longest=3": "no option longest; choose from: target, max",
    "length?max": "must be key=value pairs",
    "length?max=1&max=2": "an option occurs twice",
    "exact?case=maybe": "case=maybe: must be true or false",
    "overlong?buffer=8&factor=nan": "factor=nan: must be finite",
    "overlong": "buffer=0: must be the number of penalised tokens",
    "exact@0": "@0: a weight is a number other than 0",
    "exact@inf": "@inf: a weight",
    "lenght": "no rule of that name: did you mean length",
    "nothing": "name a folder or hub name of a reward model, FILE.py:FUNCTION, http",
    "/no/such/folder": "there is no folder /no/such/folder",
    "http://": "write http://HOST:PORT/score",
    "http://host/a b": "without spaces",
    "http://host:99999999/score": "is not an address",
    "https://me:secret@host/score": "DSCHAT_REWARD_TOKEN",
    "missing.py:f": "no Python file missing.py",
    "{file}:none": "has no function none",
    "{file}:NUMBER": "has no function NUMBER",
    "{file}": "none named",
    "{file}:positional": "its parameters are (texts, answers, others), but they are bound by name, and none of them is",
    "{file}:unnamed": "responses is positional-only: use prompts, responses, rows",
    "{file}:by_name?bonus=x": "bonus=x: must be a whole number",
    "{file}:by_name?rows=x": "no option rows; choose from: bonus, strict",
    "{folder}?a=b": "a reward model has no options",
}


@pytest.mark.parametrize(("entry", "part"), BAD.items(), ids=BAD)
def test_an_invalid_entry_is_one_line_with_flag_and_remedy(entry, part, functions):
    entry = entry.format(file=functions, folder=functions.parent)
    (line,) = reward_problems([entry])
    assert line.startswith(f"--reward {entry}: ") and part in line, line


def test_all_mistakes_are_reported_together_and_valid_entries_have_none(functions):
    good = ["exact", "boxed@2", f"{functions}:later", "http://localhost:1/score", str(functions.parent)]
    assert reward_problems(good) == []
    assert len(reward_problems([*good, "lenght", "exact@0"])) == 2
    (line,) = reward_problems(["exact", "exact"])
    assert "occurs twice" in line


def test_rules_about_length_must_fit_the_longest_response():
    assert reward_problems(["overlong?buffer=8"], max_tokens=8) == []
    (line,) = reward_problems(["overlong?buffer=9"], max_tokens=8)
    assert "buffer=9: must be the number of penalised tokens at the end, 1 to 8" in line


def test_a_file_that_cannot_be_imported_is_reported_as_a_mistake(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_module")
    (line,) = reward_problems([f"{tmp_path}/broken.py:f"])
    assert "cannot be imported (ModuleNotFoundError: No module named 'no_such_module')" in line


def test_a_file_is_imported_once_for_all_its_functions(functions):
    first, second = load_function(f"{functions}:by_name"), load_function(f"{functions}:swapped")
    first.__globals__["LOADED"].append(1)
    assert second.__globals__["LOADED"] == [1]


def test_a_function_gets_the_arguments_that_it_names(functions):
    # len("ab") + 10 · 1 token + 100 · 1 message; len("c") + 10 · 2 tokens + 100 · 1 message.
    assert scores(f"{functions}:by_name", ["ab", "c"]) == [112, 121]
    assert scores(f"{functions}:by_name?bonus=1000&strict=true", ["ab", "c"]) == [1112.5, 1121.5]
    assert scores(f"{functions}:swapped", ["a", "b"]) == [0, 1]
    # Names of its own, three of them: prompts, responses, rows. len("ask 1") = 5.
    assert scores(f"{functions}:everything", ["a", "b"]) == [7 + 1, 7 + 0]


def test_an_async_function_is_awaited_and_cancelled_at_the_timeout(functions, capsys):
    assert scores(f"{functions}:later", ["a", "bb"]) == [1, 2]
    assert scores(f"{functions}:endless", ["a", "b"], seconds=0.2) == [None, None]
    printed = capsys.readouterr().err
    assert "endless returned no score for 2 of 2 responses (TimeoutError: no result within 0.2 s)" in printed
    cancelled, deadline = load_function(f"{functions}:endless").__globals__["CANCELLED"], time.monotonic() + 5
    while not cancelled and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cancelled


def test_none_from_a_function_is_not_a_failure_and_an_exception_is_one(functions, capsys):
    assert scores(f"{functions}:undecided", ["a", "b?"]) == [1, "no score"]
    assert capsys.readouterr().err == ""
    assert scores(f"{functions}:fussy", ["a", "bad", "c"], retries=1) == [2, None, 2]
    printed = capsys.readouterr().err
    assert f"the reward {functions}:fussy returned no score for 1 of 3 responses (KeyError: 'bad')" in printed
    assert scores(f"{functions}:huge", ["a"]) == [None]
    assert "returned 1e+300 for the response 'a': scores must be finite" in capsys.readouterr().err


class Service:
    """An HTTP server with prepared replies that records its requests."""

    def __init__(self, port: int = 0) -> None:
        self.requests: list[tuple[dict, dict]] = []
        self.replies: list[Callable[[dict], tuple[int, Any, dict]]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.requests.append((dict(self.headers), body))
                reply = service.replies.pop(0) if service.replies else lengths
                status, answer, headers = reply(body)
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(content))}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


def lengths(body: dict) -> tuple[int, Any, dict]:
    return 200, {"scores": [len(response) for response in body["responses"]]}, {}


def status(code: int, **headers: str) -> Callable[[dict], tuple[int, Any, dict]]:
    return lambda body: (code, {"error": "because"}, {name.replace("_", "-"): value for name, value in headers.items()})


def reply_of(answer: Any) -> Callable[[dict], tuple[int, Any, dict]]:
    return lambda body: (200, answer, {})


@pytest.fixture
def service(monkeypatch) -> Iterator[Service]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("DSCHAT_REWARD_TOKEN", raising=False)
    running = Service()
    yield running
    running.server.shutdown()
    running.server.server_close()


def test_a_service_gets_one_post_with_the_token_of_the_environment(service, monkeypatch):
    assert scores(f"{service.url}@3", ["a", "bbb"]) == [1, 3]
    monkeypatch.setenv("DSCHAT_REWARD_TOKEN", "secret")
    service.replies = [reply_of({"scores": [None, 0.5]})]
    assert scores(service.url, ["a", "bbb"]) == ["no score", 0.5]
    (bare, body), (signed, _) = service.requests
    assert "Authorization" not in bare and signed["Authorization"] == "Bearer secret"
    chats = [[{"role": "user", "content": f"ask {n}"}] for n in range(2)]
    assert body == {"messages": chats, "prompts": ["ask 0", "ask 1"], "responses": ["a", "bbb"],
                    "rows": [{"x": 0}, {"x": 1}], "ended": [True, False],
                    "query": ["ask 0a", "ask 1bbb"], "labels": [None, None]}  # fmt: skip


def test_a_service_may_reply_as_openrlhfs_do(service):
    service.replies = [reply_of({"rewards": [1.5, 2], "scores": [0, 1], "extra_logs": {}})]
    assert scores(service.url, ["a", "bbb"]) == [1.5, 2]


@pytest.mark.parametrize("token", ["two\nlines", "gr\u00fcn", "\x07bell"])
def test_a_token_that_is_invalid_in_a_header_is_refused_and_not_printed(service, monkeypatch, token, capsys):
    monkeypatch.setenv("DSCHAT_REWARD_TOKEN", token)
    assert scores(service.url, ["a"]) == [None] and service.requests == []
    printed = capsys.readouterr().err
    assert "DSCHAT_REWARD_TOKEN: a token is made of printable ASCII" in printed
    assert not any(part in printed for part in (token, repr(token), "lines", "bell"))
    monkeypatch.setenv("DSCHAT_REWARD_TOKEN", " plain\n")  # surrounding white space is removed
    assert scores(service.url, ["a"]) == [1] and service.requests[0][0]["Authorization"] == "Bearer plain"


@pytest.mark.parametrize("code", [429, 503])
def test_a_busy_service_is_retried_after_the_time_in_retry_after(service, code, capsys):
    service.replies = [status(code, Retry_After="1"), status(code, Retry_After="0")]
    started = time.monotonic()
    assert scores(service.url, ["a"], retries=0) == [1]  # a request to wait is not a failure
    assert 1.5 <= time.monotonic() - started < 4 and len(service.requests) == 3
    assert capsys.readouterr().err == ""


def test_a_service_that_stays_busy_gives_no_scores_and_is_not_retried_row_by_row(service, capsys):
    service.replies = [status(503, Retry_After="0")] * 9
    assert scores(service.url, ["a", "b"], seconds=2.2, retries=9) == [None, None]
    assert 2 <= len(service.requests) <= 5  # at 0, 0.5, 1.0, 1.5 and 2.0 s, later on a busy machine
    printed = capsys.readouterr().err
    assert (
        f"the reward {service.url} returned no score for 2 of 2 responses (Unavailable: " in printed
        and "503" in printed
    )


def test_without_retry_after_a_service_is_retried_with_growing_pauses_until_the_timeout(service):
    service.replies = [status(503), status(502)]
    started = time.monotonic()
    assert scores(service.url, ["a"], retries=0) == [1] and len(service.requests) == 3
    assert time.monotonic() - started >= 1.5  # 0.5 and 1 s
    service.replies = [status(504)] * 9
    assert scores(service.url, ["a"], seconds=0.8, retries=0) == [None]
    assert len(service.requests) == 3 + 3  # at 0 and 0.5 s, and when the time is up


def test_a_service_that_starts_late_scores_everything(monkeypatch, capsys):
    """It is unavailable for longer than the pauses that two retries would take (0.5 + 1 s, and a request)."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    received: list = []
    url = f"http://127.0.0.1:{port}/score"
    client = threading.Thread(target=lambda: received.extend(scores(url, ["a", "bbb"], seconds=120.0, retries=0)))
    client.start()
    time.sleep(4.0)
    late = Service(port)
    client.join(60)
    late.server.shutdown()
    late.server.server_close()
    assert received == [1, 3] and len(late.requests) == 1
    printed = capsys.readouterr().err
    assert "is not available" in printed and "retrying for 120 s" in printed and "no score" not in printed


def test_pauses_double_up_to_a_limit_and_the_last_retry_is_at_the_timeout():
    pauses = [pause_before_retry(None, refusals, remaining=1e9) for refusals in (*range(6), 10_000)]
    assert pauses == [0.5, 1, 2, 4, 8, 8, 8]
    assert pause_before_retry(None, 3, remaining=0.25) == 0.25 and pause_before_retry(None, 3, remaining=0.0) is None
    assert pause_before_retry(None, 3, remaining=math.inf) == 4
    # The Retry-After of the service, bounded; no retry if it exceeds the remaining time.
    pauses = [pause_before_retry(retry_after, 9, remaining=40.0) for retry_after in (0.0, 7.0, 3600.0)]
    assert pauses == [0.5, 7.0, 30.0]
    assert pause_before_retry(7.0, 0, remaining=6.9) is None


@pytest.mark.parametrize("seconds", [math.inf, 1e300])
def test_an_infinite_timeout_is_valid_for_functions_and_services(service, functions, seconds, capsys):
    assert scores(service.url, ["a", "bbb"], seconds=seconds) == [1, 3]
    assert scores(f"{functions}:by_name", ["ab"], seconds=seconds) == [112]
    assert scores(f"{functions}:later", ["a", "bb"], seconds=seconds) == [1, 2]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("seconds", "retries"), [(0, 0), (-1.0, 0), (math.nan, 0), (1.0, -1)])
def test_invalid_timeouts_and_retries_are_refused(seconds, retries):
    with pytest.raises(ValueError, match="above 0"):
        RetryPolicy(seconds=seconds, retries=retries)


@pytest.mark.parametrize("name", ["reward_timeout", "judge_timeout", "reward_retries", "judge_retries"])
def test_timeout_and_retry_flags_refuse_invalid_values(name):
    settings = RLHFSettings
    for value in ("0", "-3", "nan", "-inf") if name.endswith("timeout") else ("-1", "inf", "nan"):
        with pytest.raises(SettingsError, match=f"--{name} "):
            parse(settings, [f"--{name}={value}"], description="")
    if name.endswith("timeout"):
        needed = ["--actor_model_name_or_path", "a", "--data_path", "d"]
        assert flag_values(parse(settings, [*needed, f"--{name}", "inf"], description=""))[name] == math.inf


@pytest.mark.parametrize(
    ("name", "reason"),
    [("leaves", "SystemExit(no key)"), ("leaves_later", "SystemExit(3)"), ("interrupts", "KeyboardInterrupt()"),
     ("cancels", "CancelledError()"), ("ends", "Mine(enough)")],
)  # fmt: skip
def test_a_function_that_would_end_the_process_counts_as_failed(functions, name, reason, capsys):
    assert scores(f"{functions}:{name}", ["a", "b"], retries=1) == [None, None]
    assert f"returned no score for 2 of 2 responses (RuntimeError: it raised {reason})" in capsys.readouterr().err


def test_a_file_that_ends_the_process_when_imported_is_reported_as_a_mistake(tmp_path):
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit('set API_KEY first')")
    (line,) = reward_problems([f"{tmp_path}/leaving.py:f"])
    assert "cannot be imported (SystemExit: set API_KEY first)" in line


def test_too_many_consecutive_calls_without_any_score_raise(functions):
    retry_policy = RetryPolicy(seconds=5.0, retries=0, max_failed_calls=2)
    dead, alive = parse_reward(f"{functions}:leaves"), parse_reward(f"{functions}:fussy")
    for responses in (["a"], ["bad", "b"], ["bad"], ["b"], ["bad"]):
        alive.scores(answers_of(responses), retry_policy)  # never two in a row without any score
    dead.scores(answers_of(["a"]), retry_policy)
    alive.scores(answers_of(["a"]), retry_policy)  # another source
    with pytest.raises(NoScores, match=r"leaves returned no score .* in 2 consecutive batches .*SystemExit\(no key\)"):
        dead.scores(answers_of(["a"]), retry_policy)


@pytest.mark.parametrize(
    ("code", "part", "requests"),
    [
        (401, "set the environment variable DSCHAT_REWARD_TOKEN", 1),
        (413, "lower --per_device_generation_batch_size", 3),
        (400, "the service rejects the request as invalid", 3),
        (404, "no service at this path", 3),
        (500, "it failed", 3),
    ],
)
def test_an_error_status_is_reported_with_its_remedy(service, code, part, requests, capsys):
    service.replies = [status(code)] * 9
    assert scores(service.url, ["a", "b"]) == [None, None]
    printed = capsys.readouterr().err
    assert part in printed and "because" in printed
    assert len(service.requests) == requests  # a wrong token fails every row; another error may be of one row only


def test_the_text_of_a_service_is_printed_without_control_characters_and_secrets(service, monkeypatch, capsys):
    monkeypatch.setenv("DSCHAT_REWARD_TOKEN", "our-token")
    text = "\x1b[2J\u202e you sent our-token to http://me:pw@host/?key=inner"
    service.replies = [lambda body: (400, text.encode(), {})] * 2
    assert scores(f"{service.url}?api_key=outer", ["a"]) == [None]
    printed = capsys.readouterr().err
    assert "\x1b" not in printed and r"\x1b[2J\u202e you sent *** to http://***@host/?key=***" in printed
    assert f"the reward {service.url}?api_key=*** returned no score" in printed and "outer" not in printed
    assert service.requests[0][0]["Authorization"] == "Bearer our-token"


def test_a_batch_that_is_too_large_is_sent_row_by_row(service):
    service.replies = [status(413)]
    assert scores(service.url, ["a", "bbb"]) == [1, 3]


def test_a_redirect_is_not_followed_because_the_token_would_be_sent_there(service, capsys):
    service.replies = [status(302, Location="http://127.0.0.1:1/elsewhere")] * 2
    assert scores(service.url, ["a"]) == [None]
    assert "redirects to http://127.0.0.1:1/elsewhere: use that address" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        ({"scores": [1.0]}, "returned 1 scores for 2 responses"),
        ({"scores": [1.0, "2"]}, "is expected"),
        ({"scores": [1.0, True]}, "is expected"),
        ({"scores": 3}, "is expected"),
        ({"values": []}, "is expected"),
        ([1, 2], "is expected"),
        (b"<html>", "is expected"),
        (b'{"scores": [1, NaN]}', "returned nan for the response"),
        (b'{"scores": [1, 1e999]}', "returned inf for the response"),
        (b"[" * 100_000, "is expected"),
    ],
)
def test_a_reply_without_one_finite_number_per_response_is_refused(service, answer, part):
    service.replies = [reply_of(answer)]
    with pytest.raises(ValueError, match=part):
        service_scores(service.url, answers_of(["a", "b"]), seconds=5)


def test_a_silent_and_an_unreachable_service_end_at_the_timeout(monkeypatch, capsys):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts connections and sends nothing
        port = listener.getsockname()[1]
        started = time.monotonic()
        assert scores(f"http://127.0.0.1:{port}", ["a", "b"], seconds=0.3) == [None, None]
        assert time.monotonic() - started < 3
    assert "TimeoutError" in capsys.readouterr().err
    started = time.monotonic()
    assert scores(f"http://127.0.0.1:{port}", ["a"], seconds=0.7) == [None]
    assert 0.7 <= time.monotonic() - started < 5  # retried until the time is up
    assert "cannot be reached (" in capsys.readouterr().err
