"""The quickstart's task: seeded chats about small sums, and the gold reward of an answer.

    python scripts/quickstart/arithmetic_chats.py --output DIR --seed 1

writes `sft_train.jsonl`, `sft_eval.jsonl`, `prompts_train.jsonl`, `prompts_rl.jsonl` and `prompts_eval.jsonl`.
The operand pairs of the eval files occur in no other file, although the reversed pair may, so a model must generalise
rather than memorise questions. The answers of the SFT files are deliberately of mixed quality: right or wrong, and
polite, plain or rude, drawn independently.

`judge` and `accuracy` are reward functions for the suite: (prompts, responses, rows) → one number per response.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from dschat.arguments.script_inputs import SEEDS, exit_on_mistake, new_folder, number_type

LARGEST_OPERAND = 9
HELD_OUT_SHARE = 0.16  # of the operand pairs
SHARE_CORRECT = 0.6
LARGEST_ERROR = 2  # small errors teach the magnitude of a sum before its exact value, which speeds up learning
TONE_SHARES = {"polite": 0.3, "plain": 0.35, "rude": 0.35}

QUESTIONS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "What do I get when I add {a} and {b}?",
    "Could you add {a} and {b} for me?",
    "Please work out {a} + {b}.",
    "How much is {a} plus {b}?",
    "Add {a} and {b}.",
    "Tell me the sum of {a} and {b}.",
    "I have {a} apples and find {b} more. How many are there now?",
    "There are {a} cats and {b} dogs. How many animals is that?",
)
ANSWERS = (
    "The answer is {n}.",
    "It is {n}.",
    "That makes {n}.",
    "The sum is {n}.",
    "You get {n}.",
    "I count {n}.",
)
OPENERS = {
    "polite": ("Of course!", "Happy to help!", "Good question!", "With pleasure!", "Thank you for asking!"),
    "rude": ("Ugh.", "Are you serious?", "What a silly question.", "Not you again.", "How boring."),
}
CLOSERS = {
    "polite": ("Have a lovely day!", "I hope that helps!", "You are very welcome!", "Ask me any time!"),
    "rude": ("Now go away.", "Stop wasting my time.", "Use your own head.", "Even a child knows that."),
}
PHRASES = {tone: OPENERS[tone] + CLOSERS[tone] for tone in ("polite", "rude")}


def _one_of(phrases: tuple[str, ...]) -> str:
    return "(?:" + "|".join(re.escape(phrase) for phrase in phrases) + ")"


STATEMENT = _one_of(ANSWERS).replace(re.escape("{n}"), r"(?:0|[1-9]\d*)")
ANY_OPENER = _one_of(OPENERS["polite"] + OPENERS["rude"])
ANY_CLOSER = _one_of(CLOSERS["polite"] + CLOSERS["rude"])
WELL_FORMED = re.compile(f"(?:{ANY_OPENER} )?{STATEMENT}(?: {ANY_CLOSER})?")


def stated_answer(response: str) -> int | None:
    """The number that a response states as its answer, or None.

    The text must contain exactly one number, within one of the sentences of `ANSWERS`; a list of all numbers, a bare
    number and a number inside other words do not count.
    """
    numbers = re.findall(r"\d+", response)
    statements = re.findall(rf"(?<!\S){STATEMENT}(?!\S)", response)
    return int(numbers[0]) if len(numbers) == 1 and len(statements) == 1 else None


def tone_of(response: str) -> str:
    """The tone of a response: "polite", "rude" or "plain".

    Rude: the text contains a rude phrase. Polite: no rude phrase, at least one polite one, and the whole text is well
    formed: at most one opener, one answer sentence, at most one closer, nothing else. So repetition, polite words
    without an answer and truncated text earn no bonus.
    """
    if re.search(rf"(?<!\S){_one_of(PHRASES['rude'])}(?!\S)", response):
        return "rude"
    polite = re.search(rf"(?<!\S){_one_of(PHRASES['polite'])}(?!\S)", response)
    return "polite" if polite and WELL_FORMED.fullmatch(response.strip()) else "plain"


def gold_reward(prompt: str, response: str, row: dict) -> float:
    """The true reward: 1 for the correct answer, plus 0.5 when polite, minus 0.5 when rude (range −0.5 to 1.5).

    Args:
        prompt: the question (unused; only the row's `answer` is needed).
        response: text of the response, without special tokens.
        row: the prompt's other columns; `answer` is the true sum.
    """
    correct = stated_answer(response) == row["answer"]
    return float(correct) + {"polite": 0.5, "plain": 0.0, "rude": -0.5}[tone_of(response)]


def judge(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
    """`gold_reward` of every response."""
    return [gold_reward(*triple) for triple in zip(prompts, responses, rows, strict=True)]


def accuracy(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
    """1.0 for each response that states the true sum, else 0.0."""
    return [
        float(stated_answer(response) == row["answer"])
        for _, response, row in zip(prompts, responses, rows, strict=True)
    ]


def split_operand_pairs(rng: random.Random) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All ordered operand pairs, split into (train, held out)."""
    pairs = [(a, b) for a in range(LARGEST_OPERAND + 1) for b in range(LARGEST_OPERAND + 1)]
    rng.shuffle(pairs)
    held_out = round(HELD_OUT_SHARE * len(pairs))
    return pairs[held_out:], pairs[:held_out]


def draw_prompt(pairs: list[tuple[int, int]], rng: random.Random) -> dict:
    a, b = rng.choice(pairs)
    return {"prompt": rng.choice(QUESTIONS).format(a=a, b=b), "answer": a + b}


def draw_response(answer: int, rng: random.Random) -> str:
    """An answer of mixed quality: `SHARE_CORRECT` are right, the others off by at most `LARGEST_ERROR`."""
    if rng.random() >= SHARE_CORRECT:
        near = range(max(0, answer - LARGEST_ERROR), answer + LARGEST_ERROR + 1)
        answer = rng.choice([number for number in near if number != answer])
    tone = rng.choices(list(TONE_SHARES), weights=list(TONE_SHARES.values()))[0]
    statement = rng.choice(ANSWERS).format(n=answer)
    if tone == "plain":
        return statement
    opener, closer = rng.choice(((True, False), (False, True), (True, True)))
    parts = [rng.choice(OPENERS[tone])] * opener + [statement] + [rng.choice(CLOSERS[tone])] * closer
    return " ".join(parts)


def sft_rows(count: int, *, pairs: list[tuple[int, int]], rng: random.Random) -> Iterator[dict]:
    for _ in range(count):
        row = draw_prompt(pairs, rng)
        response = draw_response(row["answer"], rng)
        yield {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": response}]}


def prompt_rows(count: int, *, pairs: list[tuple[int, int]], rng: random.Random) -> Iterator[dict]:
    for _ in range(count):
        yield draw_prompt(pairs, rng)


def every_prompt(pairs: list[tuple[int, int]], *, rng: random.Random) -> list[dict]:
    """Every question about every pair once, shuffled: a fixed evaluation set, not a sample."""
    rows = [{"prompt": question.format(a=a, b=b), "answer": a + b} for a, b in pairs for question in QUESTIONS]
    rng.shuffle(rows)
    return rows


def write_jsonl(path: Path, rows: Iterator[dict] | list[dict]) -> int:
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=new_folder, required=True, help="folder for the jsonl files")
    parser.add_argument("--seed", type=number_type(int, **SEEDS), default=1)
    rows = number_type(int, at_least=1)
    parser.add_argument("--sft_examples", type=rows, default=25600, help="rows of sft_train.jsonl")
    parser.add_argument("--pair_prompts", type=rows, default=2000, help="rows of prompts_train.jsonl, to make pairs of")
    parser.add_argument("--rl_prompts", type=rows, default=6400, help="rows of prompts_rl.jsonl")
    parser.add_argument("--eval_prompts", type=rows, default=160, help="rows of prompts_eval.jsonl (held-out sums)")
    options = parser.parse_args(arguments)
    with exit_on_mistake("arithmetic_chats"):
        write_files(options)


def write_files(options: argparse.Namespace) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    rng = random.Random(options.seed)
    train, held_out = split_operand_pairs(rng)
    files = {
        "sft_train": sft_rows(options.sft_examples, pairs=train, rng=rng),
        "sft_eval": sft_rows(512, pairs=held_out, rng=rng),
        "prompts_train": prompt_rows(options.pair_prompts, pairs=train, rng=rng),
        "prompts_rl": prompt_rows(options.rl_prompts, pairs=train, rng=rng),
        "prompts_eval": every_prompt(held_out, rng=rng)[: options.eval_prompts],
    }
    for name, rows in files.items():
        print(f"{options.output / name}.jsonl: {write_jsonl(options.output / f'{name}.jsonl', rows)} rows")


if __name__ == "__main__":
    main()
