"""A chat server in a thread of the test, with two small models, and requests to it. Import its fixtures by name."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
import threading
import time

import pytest
from chat_models import write_endless_model
from repository import SCRIPTS
from step_materials import write_materials
from tiny_tokenizers import make_tokenizer

sys.path.insert(0, str(SCRIPTS))

from chat_model import ChatSettings, load_chat_models  # noqa: E402
from chat_web.ratings import RatingsFile  # noqa: E402
from chat_web.server import bound_server, serve_chat  # noqa: E402

QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]
GREEDY = {"temperature": 0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def materials(tmp_path_factory):
    folder = tmp_path_factory.mktemp("materials")
    write_materials(folder, make_tokenizer(eos="</s>", pad="<pad>"))
    return folder


@pytest.fixture(scope="module")
def models(materials):
    """Two small models; the answers of the first take minutes unless they are stopped."""
    write_endless_model(materials / "endless", materials / "actor")
    return load_chat_models([str(materials / name) for name in ("endless", "actor")], dtype="fp32",
                            trust_remote_code=False)  # fmt: skip


def wait_until(condition, seconds=20):
    """Raise AssertionError if the condition is not true within these seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def accepts_connections(port):
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True


@contextlib.contextmanager
def serving(models, folder, *, host="127.0.0.1", token=None):
    """A server of these models in a thread; its ratings go to folder/ratings.jsonl."""
    with bound_server(host, 0, token=token) as server:
        arguments = {"settings": ChatSettings(), "ratings": RatingsFile(folder / "ratings.jsonl")}
        thread = threading.Thread(target=serve_chat, args=(server, models), kwargs=arguments)
        thread.start()
        wait_until(lambda: accepts_connections(server.server_port))
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server(models, tmp_path):
    with serving(models, tmp_path) as server:
        yield server


def request(server, path, body=None, **headers):
    """(connection, response): POST with a body, else GET."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is None:
        connection.request("GET", path, headers=headers)
    else:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"} | headers)
    return connection, connection.getresponse()


def reply(server, path, body=None, **headers):
    """Status and JSON value."""
    connection, response = request(server, path, body, **headers)
    with contextlib.closing(connection):
        return response.status, json.loads(response.read())


def answer_body(model=1, *, messages=QUESTION, turn=1, sample_id=0, **settings):
    return {"model": model, "messages": messages, "turn": turn, "sample_id": sample_id, "settings": GREEDY | settings}


def events_of(response):
    return [json.loads(line) for line in response.read().splitlines()]


def answer(server, body):
    """The events of an answer, to its end."""
    connection, response = request(server, "/answer", body)
    with contextlib.closing(connection):
        return events_of(response)
