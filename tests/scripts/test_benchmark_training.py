"""The benchmark of training: its arithmetic, equal work for contenders, and one small run."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from repository import ROOT, SCRIPTS
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

BENCHMARK = SCRIPTS / "benchmark"
sys.path.insert(0, str(BENCHMARK))

import shapes  # noqa: E402
from training_cases import Lengths, Sizes, make_rows, prompt_tokens, sequence_lengths  # noqa: E402
from training_contenders import TrainingContender, chosen_contenders  # noqa: E402
from training_flops import shape_of, training_flop  # noqa: E402
from training_models import EOS, save_model  # noqa: E402
from training_process import TrainingProcess, TrainingTurn  # noqa: E402
from training_reward import token_score  # noqa: E402
from training_rounds import measure_training  # noqa: E402
from training_table import training_table  # noqa: E402

import training  # noqa: E402
from dschat.runs.flops import ModelShape  # noqa: E402

SIZES = Sizes(sequences=16, micro_batch=4, steps=2)


def toy() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=96, tie_word_embeddings=True,
    )  # fmt: skip


@pytest.fixture
def toy_shape(monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "toy", toy)


def test_flop_by_hand():
    # Weights of a layer: query and output 32 x 32, key and value 32 x 16, three of 32 x 48. Head 64 x 32.
    shape = shape_of(toy())
    assert shape == ModelShape(
        2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48), head_parameters=64 * 32, attention_width=64
    )
    # Sequences of 3 and 5 tokens with prompts of 1 and 2: a forward pass of the layers is 2 FLOP per weight and token
    # and, for causal attention, half of 4 · n² · width; the head sees the 5 response tokens.
    body = 2 * shape.layer_parameters * 8 + 2 * shape.attention_width * (9 + 25)
    head = 2 * shape.head_parameters * 5
    assert training_flop(shape, "sft", [3, 5], prompt_tokens=3) == 3 * body + 3 * head
    assert training_flop(shape, "rm", [3, 5], prompt_tokens=3) == 3 * body
    # Rollout, reference, forward and backward of the policy; PPO: also the values, and the critic's update.
    assert training_flop(shape, "grpo", [3, 5], prompt_tokens=3) == 5 * body + 5 * head
    assert training_flop(shape, "grpo", [3, 5], prompt_tokens=3, with_reference=False) == 4 * body + 4 * head
    assert training_flop(shape, "ppo", [3, 5], prompt_tokens=3) == 9 * body + 5 * head


@pytest.mark.parametrize(("name", "low", "high"), [("short", 32, 80), ("lognormal:48", 17, 64), ("shared", 576, 576)])
def test_lengths_of_supervised_rows_are_within_their_bounds(name, low, high):
    for kind in ("sft", "rm", "dpo"):
        rows = make_rows(kind, Lengths.parse(name, kind), SIZES, vocabulary=64, seed=0)
        lengths = sequence_lengths(rows)
        assert len(lengths) == 32 and low <= min(lengths) and max(lengths) <= high
        assert [row["length"] for row in rows] == [max(sequence_lengths([row])) for row in rows]


def test_sequences_of_a_pair_and_of_a_group_share_their_prompt():
    shared = Lengths.parse("6x8/constant:4", "dpo")
    rows = make_rows("dpo", shared, SIZES, vocabulary=64, seed=0)
    prompts = [tuple(ids[: row["prompt_length"]]) for row in rows for ids in (row["chosen_ids"], row["rejected_ids"])]
    assert [len(set(prompts[i : i + 8])) for i in range(0, 32, 8)] == [1] * 4 and len(set(prompts)) == 4
    assert prompt_tokens("dpo", shared, rows) == 32 * 6
    rl = make_rows("grpo", shared, SIZES, vocabulary=64, seed=0)
    assert len(rl) == 4 and prompt_tokens("grpo", shared, rl) == 32 * 6


@pytest.mark.parametrize("text", ["gamma:3", "constant:", "constant:0", "uniform:9-3", "0/constant:4"])
def test_invalid_lengths_are_refused(text):
    with pytest.raises(ValueError, match="must be|at least 1"):
        Lengths.parse(text, "sft")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("probability", [0.125, 0.0])
def test_the_chance_of_eos_does_not_depend_on_the_prefix(tied, probability, monkeypatch, tmp_path):
    monkeypatch.setitem(shapes.SHAPES, "toy", lambda: LlamaConfig(**{**toy().to_dict(), "tie_word_embeddings": tied}))
    folder = save_model("toy", tmp_path, dtype=torch.bfloat16, seed=0, eos_probability=probability)
    ids = torch.randint(3, 64, (4, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        chances = AutoModelForCausalLM.from_pretrained(folder)(ids).logits.float().softmax(-1)  # [4, 20, V]
    torch.testing.assert_close(chances[..., EOS], torch.full((4, 20), probability), rtol=0.02, atol=1e-6)
    assert chances[..., :EOS].max() < 1e-6
    words = AutoTokenizer.from_pretrained(folder)
    assert words(words.decode(ids[0]))["input_ids"] == ids[0].tolist()


def test_reward_by_hand():
    assert token_score([[6, 13, 7], [], [1]]) == [12 / 18, 0.0, 1 / 6]


class FakeProcess:
    note, closed = "", 0

    def __init__(self, log: list[str], name: str, turns: list[TrainingTurn | Exception]) -> None:
        self.log, self.name, self.turns = log, name, iter(turns)

    def turn(self) -> TrainingTurn:
        self.log.append(self.name)
        turn = next(self.turns)
        if isinstance(turn, Exception):
            raise turn
        return turn

    def close(self) -> None:
        FakeProcess.closed += 1


def fake(log: list[str], name: str, *turns: TrainingTurn | Exception) -> Callable[[], FakeProcess]:
    return lambda: FakeProcess(log, name, list(turns))


def test_contenders_alternate_in_order_and_a_failure_does_not_stop_the_others():
    log: list[str] = []
    slow, fast, right = TrainingTurn(9.0, [4, 2], 7), TrainingTurn(1.0, [6], 8), TrainingTurn(3.0, [3, 3], 9)
    results = measure_training(
        {"a": fake(log, "a", slow, fast, slow, right), "b": fake(log, "b", right, RuntimeError("lost\nb")),
         "c": fake(log, "c", TrainingTurn(1.0, [5], 1))},
        turns=3, tokens=6,
    )  # fmt: skip
    assert "".join(log) == "abc" + "ab" + "a" + "a"  # the first turn of each is its warm-up
    assert FakeProcess.closed == 3
    a, b, c = results
    assert a.turns == [fast, slow, right] and a.median(lambda turn: turn.seconds) == 3 and a.peak_bytes == 9
    assert b.failure == "RuntimeError: lost" and b.median(lambda turn: turn.seconds) is None
    assert "trained on 5 tokens instead of 6" in c.failure


def test_every_contender_has_a_row_in_the_table_also_one_that_failed():
    common = {"kind": "sft", "lengths": "short", "samples_per_second": 2.0, "seconds": 1.5, "mfu": 0.123, "note": ""}
    rows = [
        common | {"contender": name, "tokens_per_second": rate, "peak_bytes": 3 << 20}
        for name, rate in (("ours", 50.0), ("fast", 80.0), ("no", None))
    ]
    rows[2]["note"] = "RuntimeError: not here"
    lines = [line.split() for line in training_table(rows).splitlines()]
    assert lines[2] == ["sft", "short", "ours", "50", "2.0", "1.00", "1.50", "12.3", "3"]
    assert lines[3][2:6] == ["fast", "80", "2.0", "0.62"]
    assert lines[4][2:] == ["no", *"––––––", "RuntimeError:", "not", "here"]


def test_plain_and_without_change_the_flags_of_their_parts_only():
    chosen, problems = chosen_contenders("ours,plain", without="packing+sharing", with_parts="compile")
    assert not problems and chosen["ours"].flags == {}
    off = {"remove_padding": False, "share_prompts": False}
    assert chosen["plain"].flags == off | {"compile": False, "kernels": "torch"}
    assert chosen["ours -packing+sharing"].flags == off and chosen["ours +compile"].flags == {"compile": True}


def test_a_checkout_runs_its_own_worker(tmp_path):
    chosen, problems = chosen_contenders("ours", without="", with_parts="", checkout=str(ROOT))
    name = f"ours @{ROOT.name}"
    assert not problems and list(chosen) == ["ours", name] and chosen[name].checkout == ROOT
    _, (problem,) = chosen_contenders("ours", without="", with_parts="", checkout=str(tmp_path))
    assert "has no scripts/benchmark/training_worker.py" in problem


def test_all_mistakes_in_the_arguments_are_reported_together(capsys):
    with pytest.raises(SystemExit):
        training.parse_arguments(
            ["--models", "gpt5", "--kinds", "kto", "--contenders", "ours,magic", "--without", "packing+luck",
             "--micro_batch", "5", "--device", "cpu"]
        )  # fmt: skip
    error = capsys.readouterr().err
    assert all(word in error for word in ("gpt5", "kto", "magic", "luck", "--micro_batch"))


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--kinds", "ppo", "--lengths", "lognormal:9"], "constant or geometric"),
        (["--models", "tiny", "--lengths", "constant:4096"], "2048 positions"),
        (["--models", "opt-1.3b"], "Llama shapes only"),
    ],
)
def test_cases_that_cannot_run_are_refused(argv, problem, capsys):
    with pytest.raises(SystemExit):
        training.parse_arguments(["--device", "cpu", *argv])
    assert problem in capsys.readouterr().err


def test_a_worker_that_fails_raises_the_error_in_its_log(tmp_path):
    worker, case = tmp_path / "worker.py", tmp_path / "case.json"
    worker.write_text("raise ValueError('no such model')")
    case.write_text("{}")
    with pytest.raises(RuntimeError, match="the worker ended: ValueError: no such model"):
        TrainingProcess(sys.executable, worker, case, threads=1, log=tmp_path / "log")


def test_trl_needs_its_environment(tmp_path):
    trl = TrainingContender("trl_worker.py")
    for python, reason in ((None, "is not given"), (str(tmp_path / "python"), "does not exist")):
        with pytest.raises(RuntimeError, match=reason):
            trl.start({}, tmp_path / "run", threads=1, trl_python=python)


def test_a_small_run_gives_a_row_for_each_contender_and_case(toy_shape, tmp_path: Path, capsys):
    path = tmp_path / "rows.jsonl"
    training.main(
        ["--models", "toy", "--kinds", "sft,grpo", "--lengths", "4/constant:6", "--contenders", "ours,plain,trl",
         "--sequences", "16", "--micro_batch", "8", "--turns", "1", "--device", "cpu", "--threads", "1",
         "--json", str(path)]
    )  # fmt: skip
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["kind"], row["contender"]) for row in rows] == [
        (kind, contender) for kind in ("sft", "grpo") for contender in ("ours", "plain", "trl")
    ]
    for row in rows:
        assert (row["model"], row["dtype"], row["lengths"]) == ("toy", "bf16", "4/constant:6")
        if row["contender"] == "trl":
            assert row["tokens_per_second"] is None and "--trl_python is not given" in row["note"]
            continue
        assert row["tokens"] == 16 * (4 + 6), row["note"]  # real tokens, the same for both
        assert row["tokens_per_second"] == pytest.approx(160 / row["seconds"])
        assert row["samples_per_second"] == pytest.approx(16 / row["seconds"])
        assert row["peak_bytes"] > 0 and 0 < row["mfu"] < 1
    assert "plain" in capsys.readouterr().out
