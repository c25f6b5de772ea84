"""The page of chat.py --web in a headless Chromium, served by the program itself."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from chat_models import write_endless_model
from chromium import CHROMIUM, open_tab
from repository import SCRIPTS
from step_materials import write_materials
from tiny_tokenizers import make_tokenizer

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium or Chrome on the PATH")

ANSWERS = "document.querySelectorAll('.answer .text')"
RATABLE = "document.querySelectorAll('.rating button:not(:disabled)').length"
MARKUP = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"


@pytest.fixture(scope="module")
def materials(tmp_path_factory):
    folder = tmp_path_factory.mktemp("materials")
    write_materials(folder, make_tokenizer(eos="</s>", pad="<pad>"))
    write_endless_model(folder / "endless", folder / "actor")
    return folder


@contextlib.contextmanager
def program(folder, *arguments):
    """chat.py --web in this folder; yields the page's address, and ends it with Ctrl-C, which must be status 0."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "chat.py"), *map(str, arguments), "--web", "--port", "0", "--temperature", "0",
         "--max_new_tokens", "8"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ,
    )  # fmt: skip
    printed = []
    try:
        for line in process.stdout:
            printed.append(line)
            if line.startswith("Ratings are appended to"):
                break
        address = re.search(r"Open (http://\S+) in a browser", "".join(printed))
        assert address, "".join(printed)
        yield address[1]
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
        assert process.returncode == 0 and rest.endswith("\nEnded.\n") and "Traceback" not in rest, rest
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def served(materials, tmp_path_factory):
    """(address, working directory) of a program with a model that ends its answers and one that does not."""
    folder = tmp_path_factory.mktemp("working")
    with program(folder, materials / "actor", materials / "endless") as address:
        yield address, folder


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with open_tab(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def page(served, chromium):
    chromium.resize(1200, 800)
    chromium.open(served[0])
    chromium.wait_for("document.getElementById('models').textContent && document.activeElement.id == 'message'")
    yield chromium
    assert chromium.errors == [], "errors and violations of the page's policy"


def setting(page, name, value):
    page.evaluate(f"document.querySelector('[name={name}]').value = {json.dumps(value)}")


def texts(page):
    return page.evaluate(f"[...{ANSWERS}].map((node) => node.textContent)")


def pairs(folder):
    path = folder / "output" / "chat_ratings.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def test_the_better_of_two_answers_is_saved_and_continues_the_chat(page, served):
    page.type("What is 3 plus 4?\n")
    page.wait_for(f"{RATABLE} == 3")
    first, second = texts(page)
    assert first and second and first != second
    assert page.evaluate("document.querySelectorAll('.rating button')[1].textContent") == "B is better"
    page.click(".rating button:nth-of-type(2)")
    page.wait_for("document.querySelector('.saved')")
    assert page.evaluate("document.querySelectorAll('.answer')[1].classList.contains('kept')")
    row = pairs(served[1])[-1]
    assert [row[name][0]["content"].strip() for name in ("chosen", "rejected")] == [second, first]
    page.type("And 5 plus 1?\n")
    page.wait_for(f"{RATABLE} == 3")
    page.click(".rating button:not(:disabled)")
    page.wait_for("document.querySelectorAll('.saved').length == 2")
    contents = [message["content"] for message in pairs(served[1])[-1]["prompt"]]
    assert contents == ["What is 3 plus 4?", second, "And 5 plus 1?"]


def test_stop_ends_an_answer_that_streams_and_the_next_is_generated_at_once(page):
    setting(page, "max_new_tokens", 60000)
    page.type("Count.\n")
    page.wait_for(f"{ANSWERS}[1].textContent.length > 50")
    length = len(texts(page)[1])
    page.wait_for(f"{ANSWERS}[1].textContent.length > {length}")
    assert page.evaluate("document.getElementById('send').hidden"), "Stop is in its place"
    page.press("Escape", 27)
    page.wait_for(f"{RATABLE} == 3")
    assert "stopped" in page.evaluate("document.querySelectorAll('.numbers')[1].textContent")
    setting(page, "max_new_tokens", 4)
    page.click("#reset")
    page.type("Again.\n")
    page.wait_for(f"{RATABLE} == 3")
    assert len(texts(page)) == 2, "the chat began anew"


def test_texts_are_shown_as_text_and_never_run(page):
    page.type(MARKUP + "\n")
    page.wait_for(f"{RATABLE} == 3")
    page.evaluate(f"showEvent(turns[0].answers[0], {{ text: {json.dumps(MARKUP)} }})")
    page.evaluate(f"showEvent(turns[0].answers[1], {{ error: {json.dumps(MARKUP)} }})")
    shown = page.evaluate("document.getElementById('turns').innerText")
    assert shown.count(MARKUP) == 3
    assert page.evaluate("document.querySelectorAll('#turns img, #turns script').length") == 0
    assert page.evaluate("document.title") == "Chat"


def test_blind_names_the_models_only_when_they_are_rated(page):
    page.click("#blind")
    page.type("What is 1 plus 1?\n")
    page.wait_for(f"{RATABLE} == 3")
    labels = "[...document.querySelectorAll('.answer .label')].map((node) => node.textContent)"
    assert page.evaluate(labels) == ["Answer 1", "Answer 2"]
    page.click(".rating button:last-of-type")
    page.wait_for("document.querySelector('.saved')")
    assert sorted(label[:2] for label in page.evaluate(labels)) == ["A:", "B:"]


def test_an_error_of_the_server_is_shown_with_what_to_do(page):
    page.type("word " * 200 + "\n")
    page.wait_for("document.querySelector('.answer .error')")
    assert "shorten it, or lower" in page.evaluate("document.querySelector('.answer .error').textContent")
    page.evaluate("document.getElementById('stop').hidden || stop()")
    page.wait_for("document.getElementById('stop').hidden")
    assert page.evaluate(RATABLE) == 0, "only one model has answered"
    setting(page, "top_p", 7)
    page.type("hello\n")
    assert page.evaluate("document.getElementById('panel').open && turns.length == 1"), "nothing is sent"


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_a_phone_and_follows_the_colour_scheme(page, dark):
    page.resize(390, 844, mobile=True, dark=dark)
    page.type("What is 3 plus 4?" + "x" * 100 + "\n")
    page.wait_for(f"{RATABLE} == 3")
    page.click("#panel summary")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    tops = page.evaluate("[...document.querySelectorAll('.answer')].map((node) => node.getBoundingClientRect().left)")
    assert tops[0] == tops[1], "one below the other"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == dark


def test_one_model_can_be_compared_with_itself_and_the_token_opens_the_page(materials, chromium, tmp_path):
    token = "correct-horse-battery"
    with program(tmp_path, materials / "actor", "--token", token, "--ratings", "mine.jsonl") as address:
        chromium.open(address)
        assert "Token that chat.py was started with" in chromium.evaluate("document.body.innerText")
        chromium.type(token + "\n")
        chromium.wait_for("document.getElementById('models')?.textContent")
        assert chromium.evaluate("location.search") == "", "the token does not stay in the address"
        chromium.click("#compare")
        setting(chromium, "temperature", 2)
        chromium.evaluate("document.getElementById('message').focus()")
        chromium.type("What is 3 plus 4?\n")
        chromium.wait_for(f"{RATABLE} == 3")
        assert len(set(texts(chromium))) == 2
        chromium.click(".rating button")
        chromium.wait_for("document.querySelector('.saved')")
    (row,) = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    assert row["chosen_model"] == row["rejected_model"] == str(materials / "actor")
