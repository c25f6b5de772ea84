"""The benchmark of the generation engine: its arithmetic, equal conditions for contenders, and one small run."""

import json
import math
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import torch
from repository import SCRIPTS
from tiny_models import tiny_causal_lm
from transformers import AutoModelForCausalLM

BENCHMARK = SCRIPTS / "benchmark"
sys.path.insert(0, str(BENCHMARK))

import generation  # noqa: E402
import shapes  # noqa: E402
import vllm_process  # noqa: E402
from contender import Ready, Setting, Turn  # noqa: E402
from rounds import measure_case  # noqa: E402
from shapes import Case, LengthKind, PromptKind, make_case  # noqa: E402
from table import table  # noqa: E402
from transformers_contenders import generated, left_padded  # noqa: E402
from vllm_process import VLLMProcess  # noqa: E402

CPU = torch.device("cpu")


def case(lengths: str = "lognormal:6", batch: int = 6, prompts: str = "3-5x2") -> Case:
    return make_case(batch, PromptKind.parse(prompts), LengthKind.parse(lengths, 8), vocabulary=67, seed=0)


# Parameters as the models' cards count them; keys and values: 2 · layers · key-value heads · head width · 2 bytes.
@pytest.mark.parametrize(
    ("name", "millions", "kv_bytes"),
    [
        ("tiny", 5.05, 6 * 1024), ("smollm2", 134.5, 23_040), ("qwen2.5-0.5b", 494, 12_288),
        ("qwen2.5-1.5b", 1544, 28_672), ("opt-1.3b", 1316, 196_608), ("llama-3-8b", 8030, 131_072),
    ],
)  # fmt: skip
def test_shapes_are_those_of_the_models(name, millions, kv_bytes):
    config = shapes.SHAPES[name]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=1e-3)
    assert shapes.kv_bytes_per_token(config, torch.bfloat16) == kv_bytes
    # A tied table is read whole, as the head; one that is no head (or numbers positions) is only looked up.
    looked_up = {"tiny": 1024 * 256, "llama-3-8b": 128_256 * 4096, "opt-1.3b": 2050 * 2048}.get(name, 0)
    total = sum(p.numel() for p in model.parameters())
    assert shapes.weight_bytes(model) == 2 * (total - looked_up)


def test_bandwidth_limit_by_hand():
    # Rows of 1 and 3 tokens after prompts of 5 and 7: 3 steps read weights of 100 bytes; the contexts are, for the
    # second row alone, 7 + 1 and 7 + 2 tokens of 10 bytes. 4 useful tokens at 1000 bytes a second.
    two = Case(PromptKind(5, 7, 1), LengthKind("constant", 3), [[3] * 5, [4] * 7], [1, 3])
    assert shapes.bandwidth_limit(two, weights=100, kv=10, bandwidth=1000) == pytest.approx(4 * 1000 / (300 + 170))
    # Constant lengths: B · bandwidth ÷ (weights + B · mean context · kv), up to the prefill's first token.
    many = case("constant:8", batch=32, prompts="5")
    mean = sum(5 + t for t in range(1, 8)) / 8
    assert shapes.bandwidth_limit(many, weights=100, kv=10, bandwidth=1000) == pytest.approx(
        32 * 1000 / (100 + 32 * mean * 10)
    )


def test_lognormal_lengths_are_mostly_short_with_few_at_the_longest():
    lengths = LengthKind.parse("lognormal:100", 1).draw(1000, Random(0))
    assert sorted(lengths)[500] == 20 and lengths != sorted(lengths)
    above = 1 - 0.5 * (1 + math.erf(math.log(5) / 0.8 / math.sqrt(2)))  # P(length > 100), ln 5 ÷ 0.8 deviations up
    assert lengths.count(100) == pytest.approx(1000 * above, abs=3) and max(lengths) == 100 and min(lengths) >= 1
    assert LengthKind.parse("constant", 7).draw(3, Random(0)) == [7, 7, 7]


def test_a_case_is_reproducible_and_samples_of_a_prompt_are_adjacent():
    first = case("lognormal:6", batch=6, prompts="3-9x2")
    assert first == case("lognormal:6", batch=6, prompts="3-9x2")
    assert first.prompts[::2] == first.prompts[1::2] and len(set(map(tuple, first.prompts))) == 3
    assert all(3 <= len(p) <= 9 and min(p) >= 3 for p in first.prompts)
    assert str(first.prompt_kind) == "3-9x2" and str(first.length_kind) == "lognormal:6"


@pytest.mark.parametrize("text", ["0", "9-3", "4x0", "four"])
def test_invalid_prompt_lengths_are_refused(text):
    with pytest.raises(ValueError, match="must be LOW-HIGH or N|invalid literal"):
        PromptKind.parse(text)


def test_generate_stops_when_the_last_row_has_its_length():
    model, drawn = tiny_causal_lm("llama").eval(), case("lognormal:6")
    steps = []
    model.register_forward_hook(lambda *_: steps.append(1))
    responses = generated(model, *left_padded(drawn.prompts, CPU), drawn.limits, do_sample=True)
    assert list(map(len, responses)) == drawn.limits and len(set(drawn.limits)) > 2
    assert len(steps) == max(drawn.limits)


def fake(log: list[str], name: str, *, seconds=(9.0, 1.0, 5.0, 3.0), tokens=None, fails_at=None):
    @contextmanager
    def contender(setting, case):
        turns = iter(seconds)

        def turn():
            log.append(name)
            if log.count(name) == fails_at:
                raise RuntimeError("no more\nof this")
            return Turn(next(turns), case.tokens if tokens is None else tokens)

        yield Ready(turn)
        raise RuntimeError("its clean-up fails")

    return contender


def test_contenders_alternate_in_order_and_a_failure_does_not_stop_the_others():
    log: list[str] = []
    names = {"a": fake(log, "a"), "b": fake(log, "b"), "c": fake(log, "c", fails_at=1), "d": fake(log, "d", tokens=1)}
    setting = Setting(None, CPU, 0, None, None)
    results = {result.contender: result for result in measure_case(setting, case(), names, repeat=3)}
    assert "".join(log) == "abcd" + "ab" + "ba" + "ab"  # the first turn of each is its warm-up
    assert results["a"].seconds == [1, 5, 3] and results["a"].median == 3
    assert results["c"].failure == "RuntimeError: no more" and results["c"].median is None
    assert "generated 1 tokens instead of" in results["d"].failure


def test_every_contender_has_a_row_also_one_that_failed():
    common = {"batch": 8, "prompts": "16", "lengths": "constant:4", "peak_bytes": 3 << 20, "warmup_seconds": 0.5}
    common |= {"percent_of_bandwidth": 12.34, "note": "", "best_tokens_per_second": 100.0}
    rows = [
        common | {"contender": c, "tokens_per_second": r} for c, r in (("ours", 50.0), ("fast", 80.0), ("no", None))
    ]
    rows[2]["note"] = "RuntimeError: not here"
    lines = [line.split() for line in table(rows).splitlines()]
    assert lines[2] == ["8", "16", "constant:4", "ours", "50", "100", "1.00", "12.3", "0.5", "3"]
    assert lines[3][3:7] == ["fast", "80", "100", "0.62"]
    assert lines[4][3:] == ["no", *"––––––", "RuntimeError:", "not", "here"]


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    """A module named vllm that returns the requested number of tokens; the worker is the real one."""
    folder = tmp_path / "environment"
    folder.mkdir()
    (folder / "vllm_worker.py").write_text((BENCHMARK / "vllm_worker.py").read_text())
    (folder / "vllm.py").write_text(
        """
from types import SimpleNamespace as SamplingParams
__version__ = "0"
class LLM:
    def __init__(self, model, **_):
        print("noise on standard output", flush=True)
        assert model != "broken", "these are no weights"
    def reset_prefix_cache(self):
        self.fresh = True
    def generate(self, prompts, sampling, use_tqdm):
        assert self.fresh and all(s.ignore_eos for s in sampling)
        self.fresh = False
        rows = [list(range(s.max_tokens)) for p, s in zip(prompts, sampling) if p["prompt_token_ids"]]
        return [SamplingParams(outputs=[SamplingParams(token_ids=row)]) for row in rows]
"""
    )
    monkeypatch.setattr(vllm_process, "WORKER", folder / "vllm_worker.py")
    return tmp_path / "log"


def test_the_vllm_process_is_stopped_between_turns_and_ends_with_close(fake_vllm):
    process = VLLMProcess(sys.executable, threads=1, log=fake_vllm, model="weights")
    stat = Path(f"/proc/{process._process.pid}/stat")
    process.set_requests([[3, 4], [5]], [2, 7])
    for _ in range(2):
        seconds, tokens = process.turn()
        assert tokens == 9 and 0 <= seconds < 1
        deadline = time.monotonic() + 5  # a signal is sent, and arrives
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
    assert process.version == "0" and process.peak_bytes() > 1 << 20
    process.close()
    assert not stat.exists() and "noise" in fake_vllm.read_text()


def test_a_vllm_that_does_not_start_raises_the_last_line_of_its_log(fake_vllm):
    with pytest.raises(RuntimeError, match="vLLM ended: AssertionError: these are no weights"):
        VLLMProcess(sys.executable, threads=1, log=fake_vllm, model="broken")


def test_all_mistakes_in_the_arguments_are_reported_together(capsys):
    with pytest.raises(SystemExit):
        generation.parse_arguments(
            ["--models", "gpt5", "--contenders", "ours,magic", "--without", "graphs+luck", "--device", "cpu"]
        )
    error = capsys.readouterr().err
    assert all(word in error for word in ("gpt5", "magic", "luck"))


def test_a_small_run_gives_a_row_for_each_contender_and_case(tmp_path, capsys):
    threads = torch.get_num_threads()
    generation.main(
        ["--models", "tiny", "--device", "cpu", "--batch", "4", "--prompts", "4-8,70x2", "--lengths",
         "lognormal:6", "--contenders", "ours,dynamic,static,continuous,vllm,vllm-colocated", "--without", "sharing",
         "--repeat", "1", "--threads", str(threads), "--json", str(tmp_path / "rows.jsonl")]
    )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 7
    columns = {"model", "dtype", "device", "batch", "lengths", "contender", "tokens_per_second", "percent_of_bandwidth"}
    assert all(columns | {"peak_bytes", "warmup_seconds"} <= row.keys() for row in rows)
    for row in rows:
        if row["contender"] == "vllm":
            assert row["tokens_per_second"] is None and "--vllm_python is not given" in row["note"]
        elif row["contender"] == "vllm-colocated" and row["tokens_per_second"] is None:
            assert "vLLM is not installed" in row["note"]
        else:
            assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"][0]), row["note"]
        equal, of = row["equal_greedy_tokens"]
        assert equal == of > 0
    printed = capsys.readouterr().out
    assert "ours -sharing" in printed and "greedy tokens in float32 equal to generate's" in printed
