"""The server of chat.py --web: answers, stopping, queueing, and which requests are refused."""

# ruff: noqa: F811  (imported fixtures are arguments of the tests)

import contextlib
import json
import time

import pytest
import torch
from chat_models import ENDLESS_TOKENS
from chat_server import (  # noqa: F401  (fixtures)
    QUESTION,
    answer,
    answer_body,
    events_of,
    materials,
    models,
    reply,
    request,
    server,
    serving,
    wait_until,
)
from chat_web.access import Access, host_problems
from chat_web.generation_thread import GenerationThread, Job, QueueFull

from dschat.data.chat_template import decode_responses, encode_prompt

TOKEN = "correct-horse-battery"
ENDLESS = {"model": 0, "max_new_tokens": ENDLESS_TOKENS}


def begin_endless(server):
    """(connection, response, job number) of an answer that is being generated."""
    connection, response = request(server, "/answer", answer_body(**ENDLESS))
    job = json.loads(response.readline())["job"]
    assert json.loads(response.readline())["text"]
    return connection, response, job


def test_an_answer_streams_what_transformers_generates(server, models):
    events = answer(server, answer_body())
    model, tokenizer = models[1].engine.engine, models[1].tokenizer
    prompt = torch.tensor([encode_prompt(tokenizer, QUESTION)])
    greedy = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False,
                            pad_token_id=tokenizer.pad_token_id)[0, prompt.shape[1] :].tolist()  # fmt: skip
    assert events[-1]["content"] == decode_responses(tokenizer, [greedy])[0]
    assert "".join(event.get("text", "") for event in events).strip() == events[-1]["content"].strip()
    assert events[-1]["ended"] == (greedy[-1] in models[1].stops) and "job" in events[0]


def test_the_history_and_the_system_message_are_part_of_the_prompt(server):
    history = [*QUESTION, {"role": "assistant", "content": "7"}, {"role": "user", "content": "What is 3 plus 4?"}]
    bodies = [answer_body(), answer_body(messages=history), answer_body(system="Be brief.")]
    assert len({answer(server, body)[-1]["content"] for body in bodies}) == 3


def test_seed_turn_and_sample_decide_an_answer(server):
    hot = {"temperature": 1.5, "max_new_tokens": 12}
    bodies = [{}, {}, {"seed": 1}, {"turn": 2}, {"sample_id": 1}]
    first, again, *others = [answer(server, answer_body(**hot, **body))[-1]["content"] for body in bodies]
    assert first == again and len({first, *others}) == 4


def test_stop_ends_the_generation_and_returns_the_text_so_far(server, models):
    connection, response, job = begin_endless(server)
    with contextlib.closing(connection):
        assert reply(server, "/stop", {"job": job}) == (200, {"stopped": True})
        last = events_of(response)[-1]
    assert last["stopped"] and not last["ended"] and 0 < last["tokens"] < ENDLESS_TOKENS and last["content"]
    wait_until(lambda: not server.jobs)
    assert reply(server, "/stop", {"job": job}) == (200, {"stopped": False})
    rows = models[0].engine.decoded_rows
    assert rows > 0
    time.sleep(0.3)
    assert models[0].engine.decoded_rows == rows, "the model runs no more"


def test_a_closed_connection_ends_the_generation(server):
    connection, response, _ = begin_endless(server)
    response.close()
    connection.close()
    wait_until(lambda: not server.jobs and not any(server.generation._running))


def test_a_second_answer_of_a_model_waits_and_one_of_another_model_does_not(server):
    connection, response, job = begin_endless(server)
    waiting, waiting_response = request(server, "/answer", answer_body(model=0))
    with contextlib.closing(connection), contextlib.closing(waiting):
        assert "content" in answer(server, answer_body(model=1))[-1]
        assert "job" in json.loads(waiting_response.readline())
        assert json.loads(waiting_response.readline()) == {"waiting": 1}
        reply(server, "/stop", {"job": job})
        assert events_of(waiting_response)[-1]["tokens"] == 8
        assert events_of(response)[-1]["stopped"]


def test_a_full_queue_refuses_with_a_reason():
    never = Job(lambda stopped: iter([{}]))
    thread = GenerationThread(1, max_waiting=2)  # not started: nothing leaves the queue
    assert [thread.submit(0, never) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(QueueFull, match="3 answers of this model are not complete"):
        thread.submit(0, never)


def test_a_failure_ends_one_answer_and_the_next_is_generated():
    def failing(stopped):
        yield {"text": "a"}
        raise torch.OutOfMemoryError("no memory")

    jobs = [Job(failing), Job(lambda stopped: iter([{"text": "b"}]))]
    with GenerationThread(1) as thread:
        for job in jobs:
            thread.submit(0, job)
        first = [jobs[0].events.get(timeout=10) for _ in range(3)]
        second = [jobs[1].events.get(timeout=10) for _ in range(2)]
    assert first == [{"text": "a"}, {"error": "generation failed (OutOfMemoryError: no memory)"}, {}]
    assert second == [{"text": "b"}, {}]


def test_the_end_of_the_server_ends_open_answers(models, tmp_path):
    with serving(models, tmp_path) as server:
        connection, response, _ = begin_endless(server)
    with contextlib.closing(connection):
        assert events_of(response)[-1] == {"error": "chat.py has ended"}


@pytest.mark.parametrize(("change", "reason"), [
    ({"model": 2}, "model 2: must be at least 0 and at most 1"),
    ({"model": True}, "model True: must be a whole number"),
    ({"messages": []}, "messages must be a string or a list of messages"),
    ({"messages": QUESTION * 2}, r"messages\[1\] must be a text of the assistant"),
    ({"messages": [*QUESTION, {"role": "assistant", "content": "7"}]}, "the last message must be of the user"),
    ({"messages": [{"role": "system", "content": "x"}]}, r"messages\[0\] must be a text of the user"),
    ({"messages": [{"role": "user", "content": " "}]}, "is empty"),
    ({"settings": {"temperature": -1, "top_p": 0, "seed": 0.5, "system": 3}}, "temperature -1: must be at least 0 and "
     "at most 100; top_p 0: must be above 0 and at most 1; seed 0.5: must be a whole number; system 3: must be a text"),
    ({"sample_id": 2}, "sample_id 2"),
])  # fmt: skip
def test_an_invalid_request_names_field_value_and_rule(server, change, reason):
    status, body = reply(server, "/answer", answer_body() | change)
    assert status == 400
    with pytest.raises(ValueError, match=reason):
        raise ValueError(body["error"])


def test_bodies_must_be_json_of_bounded_size(server):
    assert reply(server, "/answer", answer_body(), Content_Type="text/plain")[0] == 415
    assert reply(server, "/answer", answer_body(), Content_Length=str(1 << 30))[0] == 413
    assert reply(server, "/nothing", {})[0] == 404 and reply(server, "/nothing")[0] == 404


def test_a_message_beyond_the_positions_is_an_error_that_names_them(server):
    events = answer(server, answer_body(messages=[{"role": "user", "content": "word " * 200}]))
    assert "of the model's 128 positions" in events[-1]["error"]


def test_pages_of_other_sites_are_refused(server):
    body = answer_body()
    ours = f"127.0.0.1:{server.server_port}"
    assert reply(server, "/settings", Host="attacker.example")[0] == 403
    assert reply(server, "/settings", Host=f"localhost:{server.server_port}")[0] == 200
    assert reply(server, "/answer", body, Origin="http://attacker.example")[0] == 403
    assert reply(server, "/answer", body, Origin="null")[0] == 403
    assert reply(server, "/answer", body, Origin="http://127.0.0.1:1")[0] == 403, "another program of this machine"
    assert reply(server, "/settings", Sec_Fetch_Site="cross-site")[0] == 403
    connection, response = request(server, "/answer", body, Origin=f"http://{ours}")
    with contextlib.closing(connection):
        assert response.status == 200 and "content" in events_of(response)[-1]


def test_with_a_token_every_request_must_carry_it(models, tmp_path):
    with serving(models, tmp_path, token=TOKEN) as server:
        bodies = {"/": None, "/settings": None, "/answer": answer_body(), "/rating": {}, "/stop": {}}
        for path, body in bodies.items():
            connection, response = request(server, path, body)
            with contextlib.closing(connection):
                assert response.status == 401, path
                assert TOKEN not in response.read().decode()
        assert reply(server, "/settings", Authorization=f"Bearer {TOKEN}x")[0] == 401
        assert reply(server, "/settings", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert reply(server, "/settings?token=" + TOKEN)[0] == 401, "only the page takes it from its address"
        connection, response = request(server, "/?token=" + TOKEN)
        cookie, location = response.headers["Set-Cookie"], response.headers["Location"]
        connection.close()
        assert (response.status, location) == (303, "/") and "HttpOnly; SameSite=Strict" in cookie
        assert TOKEN not in cookie
        assert reply(server, "/settings", Cookie=cookie.split(";")[0])[0] == 200
        assert reply(server, "/settings", Cookie=cookie.split("=")[0] + "=wrong")[0] == 401


def test_with_a_token_addresses_are_names_of_the_server_and_names_of_others_are_not():
    access = Access("0.0.0.0", token=TOKEN)
    headers, hosts = {"Authorization": f"Bearer {TOKEN}"}, ("192.0.2.1:80", "[::1]:80", "attacker.example")
    address, ipv6, other = (access.problem(headers | {"Host": host}, port=80) for host in hosts)
    assert address is None and ipv6 is None and other[0] == 403
    assert Access("127.0.0.1", token=None).problem({"Host": "192.0.2.1"}, port=80)[0] == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_an_address_that_others_reach_needs_a_token(host):
    (problem,) = host_problems(host, token=None)
    assert f"--host {host}" in problem and "--token" in problem
    assert host_problems(host, token=TOKEN) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_loopback_needs_no_token(host):
    assert host_problems(host, token=None) == []


def test_the_page_and_its_policy_let_nothing_else_in(server):
    connection, response = request(server, "/")
    with contextlib.closing(connection):
        page, policy = response.read().decode(), response.headers["Content-Security-Policy"]
    nonce = policy.split("'nonce-")[1].split("'")[0]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert page.count(f'nonce="{nonce}"') == 2 and "{{" not in page
    assert "innerHTML" not in page and "://" not in page, "text only, and nothing from other servers"
