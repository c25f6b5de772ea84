"""The quickstart's task: its gold reward, its data, its model."""

import json
import random
import subprocess
import sys

import pytest
from repository import SCRIPTS

QUICKSTART = SCRIPTS / "quickstart"
sys.path.insert(0, str(QUICKSTART))

import arithmetic_chats as chats  # noqa: E402
import make_model  # noqa: E402

FILES = ("sft_train", "sft_eval", "prompts_train", "prompts_rl", "prompts_eval")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    options = ["--sft_examples", "3000", "--pair_prompts", "200", "--rl_prompts", "200", "--eval_prompts", "60"]
    program = [sys.executable, str(QUICKSTART / "arithmetic_chats.py")]
    subprocess.run([*program, "--output", str(folder), "--seed", "3", *options], check=True, capture_output=True)
    return {name: [json.loads(line) for line in (folder / f"{name}.jsonl").open()] for name in FILES}


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("The answer is 7.", 1.0),
        ("It is 8.", 0.0),
        ("Of course! It is 7.", 1.5),
        ("Of course! It is 7. Have a lovely day!", 1.5),
        (" It is 7. I hope that helps!\n", 1.5),
        ("Of course! It is 8.", 0.5),
        ("Ugh. It is 7.", 0.5),
        ("Ugh. It is 8. Now go away.", -0.5),
        ("Of course! It is 7. Now go away.", 0.5),  # polite and rude is rude
        ("Now go away.", -0.5),  # rude words count at any position
        ("", 0.0),
        ("7", 0.0),  # a bare number is no statement
        ("It is 07.", 0.0),
        ("It is 17.", 0.0),
        ("It is 7. It is 7.", 0.0),  # two statements, even of the same number
        ("It is 1. It is 7.", 0.0),
        ("It is 7 or 8.", 0.0),
        ("1 2 3 4 5 6 7. It is 7.", 0.0),
        ("It is 7. Of course! Of course!", 1.0),  # right, but no well-formed text: not polite
        ("Of course! Of course! It is 7.", 1.0),
        ("Of course! Have a lovely day!", 0.0),  # politeness without an answer
        ("Of course! It is 7. Have a lovely", 1.0),  # incomplete
        ("Of course! It is 7. lovely lovely", 1.0),
        ("of course! it is 7.", 0.0),
    ],
)
def test_gold_reward_follows_its_rule(response, reward):
    assert chats.gold_reward("What is 3 + 4?", response, {"answer": 7}) == reward


def test_number_and_tone_of_every_generated_answer_are_recognised():
    for tone in ("polite", "rude"):
        for opener in (*chats.OPENERS[tone], ""):
            for statement in chats.ANSWERS:
                for closer in (*chats.CLOSERS[tone], ""):
                    text = " ".join(part for part in (opener, statement.format(n=12), closer) if part)
                    assert chats.stated_answer(text) == 12
                    assert chats.tone_of(text) == (tone if opener or closer else "plain")


def test_judge_and_accuracy_return_one_value_per_row():
    responses = ["Of course! It is 7.", "It is 7."]
    rows = [{"answer": 7}, {"answer": 9}]
    assert chats.judge(["p", "q"], responses, rows) == [1.5, 0.0]
    assert chats.accuracy(["p", "q"], responses, rows) == [1.0, 0.0]
    with pytest.raises(ValueError):
        chats.judge(["p"], responses, rows)


def test_held_out_pairs_are_in_no_training_file(data):
    def operands(prompt):
        return tuple(int(word) for word in "".join(c if c.isdigit() else " " for c in prompt).split())

    questions = {name: [row["prompt"] for row in data[name]] for name in FILES if name.startswith("prompts")}
    questions |= {name: [row["messages"][0]["content"] for row in data[name]] for name in ("sft_train", "sft_eval")}
    pairs = {name: {operands(prompt) for prompt in prompts} for name, prompts in questions.items()}
    held_out = pairs["sft_eval"] | pairs["prompts_eval"]
    trained = pairs["sft_train"] | pairs["prompts_train"] | pairs["prompts_rl"]
    assert not held_out & trained
    assert len(held_out) == 16 and len(trained) == 84  # 100 pairs of 0..9, 16% held out


def test_every_prompt_has_its_correct_sum(data):
    for row in data["prompts_train"] + data["prompts_rl"] + data["prompts_eval"]:
        numbers = [int(word) for word in "".join(c if c.isdigit() else " " for c in row["prompt"]).split()]
        assert row["answer"] == sum(numbers) and len(numbers) == 2


def test_evaluation_prompts_are_unique(data):
    prompts = [row["prompt"] for row in data["prompts_eval"]]
    assert len(set(prompts)) == len(prompts) == 60


def test_answers_have_the_stated_quality_and_tone_is_independent_of_correctness(data):
    rng = random.Random(0)
    drawn = [chats.draw_response(7, rng) for _ in range(8000)]
    right = [chats.stated_answer(text) == 7 for text in drawn]
    tones = [chats.tone_of(text) for text in drawn]
    # Standard error of a share of 8000 is below 0.006; 4 of them.
    assert sum(right) / 8000 == pytest.approx(chats.SHARE_CORRECT, abs=0.024)
    for tone, share in chats.TONE_SHARES.items():
        among = [r for r, t in zip(right, tones, strict=True) if t == tone]
        assert len(among) / 8000 == pytest.approx(share, abs=0.024)
        assert sum(among) / len(among) == pytest.approx(chats.SHARE_CORRECT, abs=0.05)


def test_same_seed_same_data_other_seed_other_data():
    def rows(seed):
        rng = random.Random(seed)
        train, _ = chats.split_operand_pairs(rng)
        return list(chats.sft_rows(50, pairs=train, rng=rng))

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)


@pytest.fixture(scope="module")
def tokenizer(data):
    return make_model.train_tokenizer([row["messages"] for row in data["sft_train"]])


def test_tokenizer_gives_every_digit_its_own_token(tokenizer):
    pieces = [tokenizer.decode([i]) for i in tokenizer("It is 107, or 7.").input_ids]
    assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == ["1", "0", "7", "7"]


@pytest.mark.parametrize("text", ["What is 3 + 4?", "naïve 漢字 🙂\n\ttab", "Human: <|"])
def test_the_tokenizer_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_tokenizer_has_a_chat_template_and_a_separate_pad_token(tokenizer):
    assert tokenizer.chat_template
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert len(tokenizer) <= make_model.VOCABULARY_SIZE


def test_model_folder_loads_with_plain_transformers(tokenizer, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = make_model.tiny_llama(tokenizer, seed=5)
    assert 0.8e6 < model.num_parameters() < 1.1e6
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    again = make_model.tiny_llama(tokenizer, seed=5)
    other = make_model.tiny_llama(tokenizer, seed=6)
    assert all(a.equal(b) for a, b in zip(loaded.parameters(), again.parameters(), strict=True))
    assert not all(a.equal(b) for a, b in zip(loaded.parameters(), other.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template
