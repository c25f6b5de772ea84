"""Model answers are scored but never executed, although several reasoning-gym scorers call eval on them."""

import subprocess
import sys

import pytest

pytest.importorskip("reasoning_gym")

from dschat.data.sources.reasoning_gym import row_of, task_of  # noqa: E402
from dschat.rewards.guarded_scorers import evaluate_literal, parse_formula  # noqa: E402
from dschat.rewards.reasoning_gym import reasoning_score  # noqa: E402

EVALUATING = ["string_insertion", "spiral_matrix", "binary_matrix", "n_queens"]
PARSING = ["countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"]


def row(task: str, index: int = 0) -> dict:
    name = f"reasoning_gym:{task}?size=3"
    return row_of(name, task_of(name)[index])


@pytest.mark.parametrize("task", [*EVALUATING, *PARSING])
def test_code_in_an_answer_is_not_run_and_scores_0(task, tmp_path):
    marker = tmp_path / "was_run"
    code = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    answers = [code, f"[{code}]", f"(lambda: {code})()", f"eval({code!r})"]
    assert reasoning_score([""] * 4, answers, [row(task)] * 4) == [0.0] * 4
    assert not marker.exists()


def test_code_in_a_rows_own_entry_is_not_run(tmp_path):
    """A data file need not be trusted: this scorer evaluates the problem in the row."""
    marker = tmp_path / "was_run"
    bitwise = row("bitwise_arithmetic")
    text = bitwise["reasoning_entry"]
    problem = task_of(bitwise["reasoning_task"])[0]["metadata"]["problem"]
    changed = eval(repr(text).replace(repr(problem), repr(f"open({str(marker)!r}, 'w').close() or 0x1")))
    assert changed != text
    reasoning_score([""], ["0x1"], [bitwise | {"reasoning_entry": changed, "answer": "0x2"}])
    assert not marker.exists()
    assert reasoning_score([""], [str(int(bitwise["answer"], 16))], [bitwise]) == [1.0], "its own problem is evaluated"


@pytest.mark.parametrize("task", [*EVALUATING, *PARSING])
def test_correct_answers_score_1_with_the_guards(task):
    for index in range(3):
        entry = task_of(f"reasoning_gym:{task}?size=3")[index]
        assert entry["answer"] is not None
        written = f" {entry['answer']} "  # not the exact text, which would score without the scorer
        (score,) = reasoning_score([""], [f"<answer>{written}</answer>"], [row(task, index) | {"answer": None}])
        assert score == 1.0


def test_a_list_of_the_correct_letters_scores_one_tenth():
    entry = task_of("reasoning_gym:string_insertion?size=3")[0]
    assert reasoning_score([""], [repr(list(entry["answer"]))], [row("string_insertion")]) == [0.1]


@pytest.mark.parametrize("text", [
    "[1, -2.5, 'a', (True, None)]", "{'a': {1, 2}}", "(0x1f << 2) + ~3 ^ 7 % 4", "2**10 / 4",
])  # fmt: skip
def test_literals_and_arithmetic_are_evaluated(text):
    assert evaluate_literal(text) == eval(text)


@pytest.mark.parametrize(
    "text",
    ["print(1)", "x", "[x for x in [1]]", "'a' * 9", "[0] * 9", "9**9**9", "1 << 99999", "().__class__", "f'{1}'",
     "lambda: 1"],
)  # fmt: skip
def test_other_expressions_are_refused(text):
    with pytest.raises(ValueError):
        evaluate_literal(text)


@pytest.mark.parametrize("text", [
    "2*x**2 + 3/4", "sin(x)*exp(-x) + C", "(96 - 4)*x", "sqrt(2)", "5!", "log(x, 2)", "1.5e3",
])  # fmt: skip
def test_formulas_are_parsed_as_sympy_does(text):
    from sympy.parsing.sympy_parser import parse_expr

    assert parse_formula(text) == parse_expr(text)


@pytest.mark.parametrize(
    "text",
    ["x.func", "(1).__class__", "f(x)", "eval(x)", "(eval)(x)", "open('x')", "'x'", "x[0]", "x if x else 1",
     "lambda x: x", "sympify(x)", "__import__", "breakpoint", "x = 1", "x; y", "{x}",
     "\N{FULLWIDTH LATIN SMALL LETTER E}val(x)"],
)  # fmt: skip
def test_text_that_is_not_a_formula_is_refused(text):
    with pytest.raises(ValueError):
        parse_formula(text)


def test_the_guards_do_not_change_the_generated_rows():
    """The generators of some tasks call eval too; a process that has scored must draw the same rows."""
    tasks = ["bitwise_arithmetic", "basic_arithmetic", "gsm_symbolic", "countdown", "simple_integration"]
    script = (
        "import sys\nfrom dschat.data.sources.reasoning_gym import task_of\n"
        f"tasks = [task_of('reasoning_gym:' + name + '?size=4') for name in {tasks!r}]\n"
        "if sys.argv[1] == 'guarded':\n    from dschat.rewards.guarded_scorers import guard_scorers\n"
        "    guard_scorers()\n"
        "print([[(entry['question'], entry['answer']) for entry in task] for task in tasks])\n"
    )
    plain, guarded = (
        subprocess.run(
            [sys.executable, "-c", script, mode], capture_output=True, text=True, check=True, timeout=300
        ).stdout
        for mode in ("plain", "guarded")
    )
    assert plain == guarded and len(plain) > 500
