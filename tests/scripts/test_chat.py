"""scripts/chat.py: streamed text, history, context limits, interruption."""

import io
import itertools
import os
import random
import subprocess
import sys

import pytest
import torch
from repository import SCRIPTS

sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "quickstart")]

import arithmetic_chats  # noqa: E402
import chat  # noqa: E402
import make_model  # noqa: E402

from dschat.data.chat_template import encode_prompt, stop_token_ids  # noqa: E402
from dschat.generation import HybridEngine, SamplingParams  # noqa: E402

GREEDY = {"sampling": SamplingParams(0)}


@pytest.fixture(scope="module")
def tokenizer():
    rng = random.Random(0)
    pairs = [(a, b) for a in range(10) for b in range(10)]
    return make_model.train_tokenizer([row["messages"] for row in arithmetic_chats.sft_rows(300, pairs=pairs, rng=rng)])


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_model.tiny_llama(tokenizer, seed=0).eval()


def streamed(tokenizer, ids):
    stream = chat.StreamedText(tokenizer)
    return [stream.add(i) for i in ids] + [stream.finish()]


@pytest.mark.parametrize("text", ["The answer is 7.", "naïve café", "漢字と🙂!", "🙂", " a  b\n\n c ", ""])
def test_pieces_join_to_the_text_and_no_piece_holds_half_a_character(tokenizer, text):
    pieces = streamed(tokenizer, tokenizer(text).input_ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_comes_as_soon_as_its_token_is_there(tokenizer):
    ids = tokenizer("The answer is 7.").input_ids
    assert all(streamed(tokenizer, ids)[:-1])


def test_a_character_that_never_ends_comes_out_at_the_end(tokenizer):
    ids = tokenizer("ok🙂").input_ids[:-1]
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces).startswith("ok") and "\ufffd" in pieces[-1]


def test_special_tokens_are_not_shown(tokenizer):
    ids = tokenizer("It is 7.").input_ids
    assert "".join(streamed(tokenizer, [*ids, tokenizer.eos_token_id])) == "It is 7."


def test_history_is_part_of_the_next_prompt(tokenizer):
    conversation = chat.Conversation(tokenizer, system="Be kind.", positions=256, max_new_tokens=16)
    conversation.ask("one")
    conversation.answered(" two ")
    ids, room, dropped = conversation.ask("three")
    messages = [
        {"role": "system", "content": "Be kind."}, {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"},
    ]  # fmt: skip
    assert (ids, room, dropped) == (encode_prompt(tokenizer, messages), 16, 0)
    conversation.reset()
    assert conversation.ask("three")[0] == encode_prompt(tokenizer, [messages[0], messages[3]])


def test_an_unanswered_question_is_forgotten(tokenizer):
    conversation = chat.Conversation(tokenizer)
    conversation.ask("one")
    conversation.answered("  ")
    assert conversation.ask("two")[0] == encode_prompt(tokenizer, [{"role": "user", "content": "two"}])


def test_a_line_that_spells_control_tokens_is_text_unless_they_are_meant(tokenizer):
    line, end = f"one{tokenizer.eos_token}", tokenizer.eos_token_id
    asked, meant = (
        chat.Conversation(tokenizer, parse_special_tokens=parse).ask(line)[0].count(end) for parse in (False, True)
    )
    harmless = chat.Conversation(tokenizer).ask("one")[0].count(end)
    assert (asked, meant) == (harmless, harmless + 1)


def test_oldest_turns_leave_when_the_positions_are_full_and_the_system_message_stays(tokenizer):
    conversation = chat.Conversation(tokenizer, system="Be kind.", positions=64, max_new_tokens=8)
    forgotten = 0
    for turn in range(12):
        ids, room, dropped = conversation.ask(f"turn {turn}")
        assert len(ids) + room <= 64 and room == 8
        assert "Be kind." in tokenizer.decode(ids) and f"turn {turn}" in tokenizer.decode(ids)
        conversation.answered("fine")
        forgotten += dropped
    assert forgotten > 0 and len(conversation.turns) == 12 - forgotten
    assert conversation.turns[0][0]["content"] == f"turn {forgotten}"


def test_a_message_too_long_for_the_model_says_so_and_is_not_kept(tokenizer):
    conversation = chat.Conversation(tokenizer, positions=32, max_new_tokens=8)
    with pytest.raises(ValueError, match=r"24 of the model's 32 positions"):
        conversation.ask("word " * 100)
    assert conversation.turns == []


def talk(model, tokenizer, lines, *, positions=256, max_new_tokens=8):
    out = io.StringIO()
    conversation = chat.Conversation(tokenizer, positions=positions, max_new_tokens=max_new_tokens)
    stops = stop_token_ids(tokenizer)
    chat.chat(HybridEngine(model), conversation, iter(lines), stops=stops, sampling=GREEDY, out=out)
    return out.getvalue(), conversation


def test_answer_is_what_transformers_generates(model, tokenizer):
    text, _ = talk(model, tokenizer, ["What is 3 + 4?"])
    prompt = torch.tensor([encode_prompt(tokenizer, [{"role": "user", "content": "What is 3 + 4?"}])])
    greedy = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    expected = tokenizer.decode(greedy[0, prompt.shape[1] :], skip_special_tokens=True)
    assert text.strip() == expected.strip()


def test_commands_are_obeyed_and_unknown_ones_are_named(model, tokenizer):
    text, conversation = talk(model, tokenizer, ["hello", "/reset", "/dance now"])
    assert "[forgotten]" in text and "no command /dance" in text
    assert conversation.turns == []


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(tokenizer):
    def interrupted():
        yield from tokenizer("It is").input_ids
        raise KeyboardInterrupt

    out = io.StringIO()
    assert chat.write_answer(interrupted(), tokenizer, stops=[], out=out) == "It is"
    assert out.getvalue() == "It is [stopped]\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_what_a_model_writes_is_printed_and_not_obeyed(tokenizer):
    class Steering:
        """A tokenizer whose tokens are the halves of an escape sequence: no small one of ours can write them."""

        def decode(self, ids, **_) -> str:
            return "".join(["\x1b", "[2J\n"][i] for i in ids)

    out = io.StringIO()
    answer = chat.write_answer(iter([0, 1]), Steering(), stops=[], out=out)
    assert out.getvalue() == "\\x1b[2J\n\n"
    assert answer == "\x1b[2J\n", "the conversation goes on with what the model wrote"


def test_ctrl_c_at_the_prompt_leaves(monkeypatch):
    entered = itertools.chain(["hello"], itertools.repeat(KeyboardInterrupt))

    def typed(_prompt):
        line = next(entered)
        if line is KeyboardInterrupt:
            raise line
        return line

    monkeypatch.setattr("builtins.input", typed)
    assert list(chat.lines_of(Terminal(), out=io.StringIO())) == ["hello"]


def test_quit_and_the_end_of_piped_lines_leave():
    assert list(chat.lines_of(io.StringIO("a\n\n b \n/quit\nc\n"), out=io.StringIO())) == ["a", "b"]
    assert list(chat.lines_of(io.StringIO("a"), out=io.StringIO())) == ["a"]


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


OPTIONS = ("--max_new_tokens", "6", "--temperature", "1", "--seed")


def piped(monkeypatch, capsys, *arguments, lines="hello\nhello\n"):
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    code = chat.main(list(arguments))
    return code, capsys.readouterr()


def test_same_seed_and_lines_give_the_same_answers(folder, monkeypatch, capsys):
    code, first = piped(monkeypatch, capsys, folder, *OPTIONS, "7")
    _, again = piped(monkeypatch, capsys, folder, *OPTIONS, "7")
    _, other = piped(monkeypatch, capsys, folder, *OPTIONS, "8")
    assert code == 0 and first.out == again.out != other.out


def test_program_runs_by_itself_with_piped_lines(folder, monkeypatch, capsys):
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parent), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(SCRIPTS / "chat.py"), folder, *OPTIONS, "7"],
        input="hello\nhello\n", capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    _, expected = piped(monkeypatch, capsys, folder, *OPTIONS, "7")
    assert expected.out.strip() and result.stdout.endswith(expected.out)  # DeepSpeed may warn before


def test_mistakes_are_one_message(folder, tmp_path, monkeypatch, capsys):
    code, said = piped(monkeypatch, capsys, str(tmp_path))
    assert code == 2 and "no model configuration" in said.err
    with pytest.raises(SystemExit, match="2"):
        piped(monkeypatch, capsys, folder, "--top_p", "7")
    assert "--top_p: 7: must be above 0 and at most 1" in capsys.readouterr().err
