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
import chat_terminal  # noqa: E402
import make_model  # noqa: E402
from chat_model import ChatModel, ChatSettings  # noqa: E402
from conversation import Conversation  # noqa: E402
from streamed_text import Answer, StreamedText  # noqa: E402

from dschat.data.chat_template import encode_prompt, stop_token_ids  # noqa: E402
from dschat.generation import HybridEngine  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():
    rng = random.Random(0)
    pairs = [(a, b) for a in range(10) for b in range(10)]
    return make_model.train_tokenizer([row["messages"] for row in arithmetic_chats.sft_rows(300, pairs=pairs, rng=rng)])


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_model.tiny_llama(tokenizer, seed=0).eval()


def streamed(tokenizer, ids):
    stream = StreamedText(tokenizer)
    return [stream.add(i) for i in ids] + [stream.finish()]


@pytest.mark.parametrize("text", ["The answer is 7.", "naïve café", "漢字と🙂!", "🙂", " a  b\n\n c ", ""])
def test_pieces_join_to_the_text_and_no_piece_has_part_of_a_character(tokenizer, text):
    pieces = streamed(tokenizer, tokenizer(text).input_ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_every_token_of_complete_characters_returns_text(tokenizer):
    ids = tokenizer("The answer is 7.").input_ids
    assert all(streamed(tokenizer, ids)[:-1])


def test_an_incomplete_character_is_returned_by_finish(tokenizer):
    ids = tokenizer("ok🙂").input_ids[:-1]
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces).startswith("ok") and "\ufffd" in pieces[-1]


def test_special_tokens_are_not_printed(tokenizer):
    ids = tokenizer("It is 7.").input_ids
    assert "".join(streamed(tokenizer, [*ids, tokenizer.eos_token_id])) == "It is 7."


def test_history_is_part_of_the_next_prompt(tokenizer):
    conversation = Conversation(tokenizer, system="Be kind.", positions=256, max_new_tokens=16)
    conversation.add_user_message("one")
    conversation.add_answer(" two ")
    ids, max_new_tokens, dropped = conversation.add_user_message("three")
    messages = [
        {"role": "system", "content": "Be kind."}, {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"},
    ]  # fmt: skip
    assert (ids, max_new_tokens, dropped) == (encode_prompt(tokenizer, messages), 16, 0)
    conversation.reset()
    assert conversation.add_user_message("three")[0] == encode_prompt(tokenizer, [messages[0], messages[3]])


def test_a_message_with_an_empty_answer_is_removed(tokenizer):
    conversation = Conversation(tokenizer)
    conversation.add_user_message("one")
    conversation.add_answer("  ")
    assert conversation.add_user_message("two")[0] == encode_prompt(tokenizer, [{"role": "user", "content": "two"}])


def test_control_token_strings_are_text_unless_parse_special_tokens(tokenizer):
    line, end = f"one{tokenizer.eos_token}", tokenizer.eos_token_id
    as_text = Conversation(tokenizer).add_user_message(line)[0].count(end)
    as_tokens = Conversation(tokenizer, parse_special_tokens=True).add_user_message(line)[0].count(end)
    without = Conversation(tokenizer).add_user_message("one")[0].count(end)
    assert (as_text, as_tokens) == (without, without + 1)


def test_the_oldest_turns_are_dropped_at_the_position_limit_but_not_the_system_message(tokenizer):
    conversation = Conversation(tokenizer, system="Be kind.", positions=64, max_new_tokens=8)
    dropped_turns = 0
    for turn in range(12):
        ids, max_new_tokens, dropped = conversation.add_user_message(f"turn {turn}")
        assert len(ids) + max_new_tokens <= 64 and max_new_tokens == 8
        assert "Be kind." in tokenizer.decode(ids) and f"turn {turn}" in tokenizer.decode(ids)
        conversation.add_answer("fine")
        dropped_turns += dropped
    assert dropped_turns > 0 and len(conversation.turns) == 12 - dropped_turns
    assert conversation.turns[0][0]["content"] == f"turn {dropped_turns}"


def test_a_message_longer_than_the_positions_is_an_error_and_is_not_added(tokenizer):
    conversation = Conversation(tokenizer, positions=32, max_new_tokens=8)
    with pytest.raises(ValueError, match=r"only 24 of the model's 32 positions"):
        conversation.add_user_message("word " * 100)
    assert conversation.turns == []


def chat_model(model, tokenizer, *, name="model", positions=256):
    return ChatModel(name, HybridEngine(model), tokenizer, stop_token_ids(tokenizer), positions, model.num_parameters())


def converse(models, lines, **settings):
    out = io.StringIO()
    settings = {"temperature": 0, "max_new_tokens": 8} | settings
    chat_terminal.chat(models, iter(lines), settings=ChatSettings(**settings), out=out)
    return out.getvalue()


def test_answer_is_what_transformers_generates(model, tokenizer):
    text = converse([chat_model(model, tokenizer)], ["What is 3 + 4?"])
    prompt = torch.tensor([encode_prompt(tokenizer, [{"role": "user", "content": "What is 3 + 4?"}])])
    greedy = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    expected = tokenizer.decode(greedy[0, prompt.shape[1] :], skip_special_tokens=True)
    assert text.strip() == expected.strip()


def test_reset_clears_the_conversation_and_unknown_commands_are_named(model, tokenizer):
    speaker = chat_model(model, tokenizer)
    first, again = (converse([speaker], lines) for lines in (["hello"], ["hello", "/reset", "hello", "/dance now"]))
    assert again.split("[conversation cleared]\n")[1].startswith(first), "the second answer has no history"
    assert "unknown command /dance" in again


def test_each_of_two_models_answers_as_it_would_alone(model, tokenizer):
    models = [chat_model(model, tokenizer, name="one"), chat_model(make_model.tiny_llama(tokenizer, seed=1).eval(),
                                                                   tokenizer, name="two")]  # fmt: skip
    lines, settings = ["hello", "and then?"], {"temperature": 1.0, "seed": 3}
    alone = [converse([single], lines, **settings).splitlines() for single in models]
    together = converse(models, lines, **settings).splitlines()
    assert alone[0] != alone[1] and len(alone[0]) == 2, "texts of one line, for the comparison below"
    expected = [["A: one", first, "", "B: two", second] for first, second in zip(*alone, strict=True)]
    assert together == expected[0] + expected[1]


def test_a_message_that_one_of_two_models_cannot_take_is_answered_by_the_other(model, tokenizer):
    models = [chat_model(model, tokenizer, positions=24), chat_model(model, tokenizer)]
    text = converse(models, ["word " * 20])
    assert "[A: this message makes a prompt of" in text and "B: model\n" in text and "A: model" not in text


def test_ctrl_c_interrupts_the_answer_and_keeps_its_text(tokenizer):
    def interrupted():
        yield from tokenizer("It is").input_ids
        raise KeyboardInterrupt

    out, answer = io.StringIO(), Answer(interrupted(), tokenizer, stops=[])
    chat_terminal.write_answer(answer, out=out)
    assert (answer.text, answer.ended) == ("It is", False)
    assert out.getvalue() == "It is [interrupted]\n"


def test_an_answer_has_ended_only_if_a_stop_token_was_generated(tokenizer):
    ids = tokenizer("It is 7.").input_ids
    cut, ended = (Answer(iter(tokens), tokenizer, stops=[9]) for tokens in (ids, [*ids, 9]))
    assert ["".join(cut), "".join(ended)] == ["It is 7."] * 2
    assert (cut.ended, ended.ended) == (False, True) and cut.ids == ended.ids == ids


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_escape_sequences_of_the_model_are_printed_as_text(tokenizer):
    class EscapeTokenizer:
        """A tokenizer whose two tokens join to an escape sequence."""

        def decode(self, ids, **_) -> str:
            return "".join(["\x1b", "[2J\n"][i] for i in ids)

    out, answer = io.StringIO(), Answer(iter([0, 1]), EscapeTokenizer(), stops=[])
    chat_terminal.write_answer(answer, out=out)
    assert out.getvalue() == "\\x1b[2J\n\n"
    assert answer.text == "\x1b[2J\n", "the history keeps the model's own text"


def test_ctrl_c_at_the_prompt_exits(monkeypatch):
    entered = itertools.chain(["hello"], itertools.repeat(KeyboardInterrupt))

    def typed(_prompt):
        line = next(entered)
        if line is KeyboardInterrupt:
            raise line
        return line

    monkeypatch.setattr("builtins.input", typed)
    assert list(chat_terminal.lines_of(Terminal(), out=io.StringIO())) == ["hello"]


def test_quit_and_the_end_of_piped_lines_end_the_chat():
    assert list(chat_terminal.lines_of(io.StringIO("a\n\n b \n/quit\nc\n"), out=io.StringIO())) == ["a", "b"]
    assert list(chat_terminal.lines_of(io.StringIO("a"), out=io.StringIO())) == ["a"]


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


def test_the_program_answers_piped_lines(folder, monkeypatch, capsys):
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parent), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(SCRIPTS / "chat.py"), folder, *OPTIONS, "7"],
        input="hello\nhello\n", capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    _, expected = piped(monkeypatch, capsys, folder, *OPTIONS, "7")
    assert expected.out.strip() and result.stdout.endswith(expected.out)  # DeepSpeed may warn before


def test_a_mistake_is_one_message_and_status_2(folder, tmp_path, monkeypatch, capsys):
    code, printed = piped(monkeypatch, capsys, str(tmp_path))
    assert code == 2 and "no model configuration" in printed.err
    with pytest.raises(SystemExit, match="2"):
        piped(monkeypatch, capsys, folder, "--top_p", "7")
    assert "--top_p: 7: must be above 0 and at most 1" in capsys.readouterr().err
