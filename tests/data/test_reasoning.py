"""Generated tasks: from an entry of --data_path through the prepared rows to the scorer."""

import json

import pytest
from tiny_tokenizers import make_tokenizer

pytest.importorskip("reasoning_gym")

from dschat.data.chat_template import ensure_chat_template  # noqa: E402
from dschat.data.collators import collate_prompts  # noqa: E402
from dschat.data.datasets import DataOptions, build_dataset, data_problems  # noqa: E402
from dschat.data.sources.data_path import load_source, parse_data_path  # noqa: E402
from dschat.data.sources.reasoning_gym import entry_of, row_of, task_of  # noqa: E402
from dschat.rewards.reasoning_gym import answer_of, reasoning_score  # noqa: E402
from dschat.rewards.reasoning_worker import score  # noqa: E402
from dschat.rewards.weighted_sum import prompt_text  # noqa: E402

SUMS = "reasoning_gym:chain_sum?size=12&seed=5&min_terms=2&max_terms=2&max_digits=1"
# Their entries hold tuples (most), numbers as keys (graph_color) or numpy text (knights_knaves); prime_factorization
# raises on words; game_of_life_halting and spell_backward give credit for junk; arc tasks compare tuples by type.
TASKS = ["arc_agi", "rearc", "countdown", "knights_knaves", "maze", "mini_sudoku", "chain_sum", "gsm_symbolic",
         "prime_factorization", "game_of_life_halting", "spell_backward", "letter_jumble", "word_sorting", "n_queens",
         "figlet_font", "zebra_puzzles", "shortest_path", "leg_counting", "family_relationships"]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = make_tokenizer()
    ensure_chat_template(tokenizer)
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """For the prepared rows of all tests: generating them starts a process."""
    return str(tmp_path_factory.mktemp("arrow"))


def build(kind, tokenizer, folder, *paths):
    return build_dataset(kind, tokenizer, DataOptions(list(paths), folder, 256, eval_fraction=0.0))


def sums_of(splits):
    """The two numbers and the operator of every row, and its answer, read from the text alone."""
    rows = [json.loads(row) for row in splits.train["row"]]
    questions = [json.loads(prompt)[0]["content"] for prompt in splits.train["prompt_text"]]
    expressions = [question.split(": ")[1].removesuffix(" =") for question in questions]
    return list(zip(expressions, (row["answer"] for row in rows), strict=True))


def test_rows_hold_the_question_its_answer_and_the_fields_of_the_query(tokenizer, folder):
    sums = sums_of(build("prompt", tokenizer, folder, SUMS))
    assert len(sums) == 12
    for question, answer in sums:
        left, operator, right = question.split()  # min_terms = max_terms = 2
        assert len(left) == len(right) == 1  # max_digits = 1
        assert int(answer) == (int(left) + int(right) if operator == "+" else int(left) - int(right))


def test_the_same_source_feeds_sft(tokenizer, folder):
    first = build("sft", tokenizer, folder, SUMS).train[0]
    question, answer = sums_of(build("prompt", tokenizer, folder, SUMS))[0]
    text = tokenizer.decode(first["input_ids"])
    expected = f"State the final answer to the following arithmetic problem: {question} ="
    assert text == f"\n\nHuman: {expected}\n\nAssistant: {answer}</s>"


def test_prepared_prompts_carry_the_columns_that_their_scorer_needs(tokenizer, folder):
    batch = collate_prompts(list(build("prompt", tokenizer, folder, SUMS).train))
    prompts = [prompt_text(chat) for chat in batch["messages"]]
    answers = [str(eval(prompt.split(": ")[1].removesuffix(" ="))) for prompt in prompts]
    assert reasoning_score(prompts, answers, batch["rows"]) == [1.0] * 12
    assert reasoning_score(prompts, [str(int(answer) + 1) for answer in answers], batch["rows"]) == [0.0] * 12


def test_rows_depend_on_the_seed_alone_not_on_the_hash_seed_of_the_process(monkeypatch):
    """word_ladder walks through sets of strings, whose order Python draws anew for every process."""
    drawn = []
    for hash_seed in ("1", "2"):  # inherited by the process that generates
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        drawn.append([row.fields for row in load_source("reasoning_gym:word_ladder?size=3&seed=1").rows("train")])
    assert drawn[0] == drawn[1] and len(drawn[0]) == 3
    one, other = (f"reasoning_gym:chain_sum?size=3&seed={seed}" for seed in (1, 9))
    assert task_of(one)[0] != task_of(other)[0] and load_source(one).identity() != load_source(other).identity()


def test_two_levels_of_one_task_mix_with_weights(tokenizer, folder):
    hard = "reasoning_gym:chain_sum?size=8&seed=100&min_terms=5&max_terms=5&max_digits=1"
    assert parse_data_path([f"{SUMS}:0.75", f"{hard}:0.25"]) == ([SUMS, hard], [0.75, 0.25])
    assert parse_data_path(["reasoning_gym:chain_sum"]) == (["reasoning_gym:chain_sum"], None)
    splits = build("prompt", tokenizer, folder, f"{SUMS}:0.75", f"{hard}:0.25")
    terms = [len(question.split()) for question, _ in sums_of(splits)]
    assert sorted(terms) == [3] * 15 + [9] * 5  # 20 rows: 0.75 of them a + b, 0.25 of them a + b + c + d + e
    assert len(set(splits.train["row_index"])) == 17  # 12 of the one (three of them twice), 5 of the other


@pytest.mark.parametrize("task", TASKS)
def test_an_entry_survives_json_and_its_expected_answer_scores_one(task):
    name = f"reasoning_gym:{task}?size=3&seed=7"
    for entry in (task_of(name)[i] for i in range(3)):
        row = json.loads(json.dumps(row_of(name, entry), ensure_ascii=False, default=str))
        assert entry_of(row) == entry  # a list is not equal to a tuple
        assert task_of(name).score_answer(row["answer"], entry_of(row)) == 1.0
        responses = [row["answer"], f"So: <answer> {row['answer']}\n</answer>"]
        assert reasoning_score(["q"] * 2, responses, [row] * 2) == [1.0, 1.0]


@pytest.mark.parametrize("task", ["game_of_life_halting", "countdown", "arc_agi", "fraction_simplification"])
def test_a_response_without_an_answer_scores_zero_even_if_the_task_scores_it(task):
    name = f"reasoning_gym:{task}?size=3&seed=7"
    entries = [task_of(name)[i] for i in range(3)]
    texts = ("", "zzz junk", "I am not sure")
    assert any(task_of(name).score_answer(text, entry) > 0 for text in texts for entry in entries)
    for entry in entries:
        assert reasoning_score(["q"] * 3, texts, [row_of(name, entry)] * 3) == [0.0] * 3


def test_a_scorer_that_raises_gives_zero_and_one_warning_for_all(tokenizer):
    name = "reasoning_gym:prime_factorization?size=2&seed=1"
    rows = [row_of(name, task_of(name)[i]) for i in range(2)]
    with pytest.warns(UserWarning, match="prime_factorization.* raised ValueError for 2 responses") as warned:
        scores = reasoning_score(["q"] * 3, ["no idea", "none", rows[0]["answer"]], [rows[0], rows[1], rows[0]])
    assert scores == [0.0, 0.0, 1.0] and len(warned) == 1


def test_scores_are_finite_within_zero_and_one_and_none_for_other_rows(monkeypatch):
    name = "reasoning_gym:chain_sum?size=1"
    row = row_of(name, task_of(name)[0])
    for raw, expected in ((float("nan"), 0.0), (float("inf"), 0.0), (-3, 0.0), (7, 1.0), (0.25, 0.25)):
        monkeypatch.setattr(task_of(name), "score_answer", lambda text, entry, raw=raw: raw * (text == "x"))
        assert score("x", name, row["reasoning_entry"]) == (expected, "")
    assert reasoning_score(["q", "q"], ["x", "y"], [{"answer": "5"}, {}]) == [None, None]


def test_a_correct_answer_other_than_the_expected_one_is_scored_by_the_task():
    """Any right expression counts in countdown, and a wrong one does not."""
    name = "reasoning_gym:countdown?size=1&seed=3&min_numbers=2&max_numbers=2"
    row = row_of(name, task_of(name)[0])
    numbers, target = entry_of(row)["metadata"]["numbers"], entry_of(row)["metadata"]["target"]
    left, right = numbers
    expressions = [f"{a}{operator}{b}" for a, b in ((left, right), (right, left)) for operator in "+-*/"]
    correct = [expression for expression in expressions if eval(expression) == target]
    assert len(correct) == 2 and row["answer"] in ("75 + 81", "81 + 75")
    scores = reasoning_score(["q"] * 8, expressions, [row] * 8)
    assert [value == 1.0 for value in scores] == [eval(expression) == target for expression in expressions]
    assert max(value for value in scores if value < 1.0) == 0.05  # the task's own credit for a wrong expression


def test_the_last_tagged_answer_counts():
    assert answer_of(" 5\n") == "5"
    assert answer_of("<answer>4</answer> no: <answer>\n5 </answer> done") == "5"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("reasoning_gym:chain_sun", "no task 'chain_sun'; did you mean .*chain_sum"),
        ("reasoning_gym:chain_sum?max_term=3", "no field 'max_term'; did you mean max_terms"),
        ("reasoning_gym:chain_sum?max_terms=many", "max_terms=many is not a valid int"),
        ("reasoning_gym:chain_sum?allow_negation=1", "allow_negation=1 is not a valid bool .write true or false."),
        ("reasoning_gym:chain_sum?max_terms", "write FIELD=VALUE&FIELD=VALUE"),
        ("reasoning_gym:chain_sum?min_terms=5&max_terms=2", "rejects this configuration .max_terms must be >="),
    ],
)
def test_unknown_tasks_fields_and_values_are_refused_before_the_run(path, message, tmp_path):
    (problem,) = data_problems("prompt", DataOptions([path], str(tmp_path), 64))
    assert pytest.raises(ValueError, load_source, path).match(message) and message.split(";")[0][:10] in problem


def test_values_are_converted_to_the_type_of_their_field():
    config = task_of("reasoning_gym:number_filtering?min_value=-1.5&size=3&seed=none").config
    assert config.min_value == -1.5 and config.size == 3 and config.seed is None
    assert task_of("reasoning_gym:chain_sum?allow_negation=true").config.allow_negation is True
    assert task_of('reasoning_gym:basic_arithmetic?operators=["%2B"]').config.operators == ["+"]
    assert task_of("reasoning_gym:basic_arithmetic?format_style=natural").config.format_style == "natural"
