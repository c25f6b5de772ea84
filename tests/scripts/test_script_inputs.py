"""Programs of scripts/ with bad input: status 2, one message with flag, file or line, no traceback, no output."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from repository import SCRIPTS
from safetensors.torch import save_file

from dschat.arguments import PPOArguments
from dschat.arguments.script_inputs import read_json_lines

METRIC = '{"step": 1, "time": 1.0, "phase": "eval", "perplexity": 2.0}\n'


@cache
def script(name: str) -> ModuleType:
    """The program, imported with the files beside it."""
    path = SCRIPTS / f"{name}.py"
    before = set(sys.modules)
    sys.path.insert(0, str(path.parent))
    try:
        spec = importlib.util.spec_from_file_location(f"script_{name.replace('/', '_')}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look up their module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
        for beside in {file.stem for file in path.parent.glob("*.py")} - before:  # two folders have files of one name
            sys.modules.pop(beside, None)
    return module


def run_script(name: str, argv: list[str], capsys: pytest.CaptureFixture) -> tuple[int, str]:
    """The exit status, and everything that was printed."""
    try:
        code = script(name).main([str(word) for word in argv])
    except SystemExit as exit_:
        code = exit_.code
    printed = capsys.readouterr()
    return (0 if code is None else code), printed.out + printed.err


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder of invalid inputs; the programs must not create anything in it."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "a_file").write_text("text\n")
    (folder / "empty").mkdir()
    (folder / "empty.jsonl").touch()
    (folder / "broken.jsonl").write_text('{"messages": []}\n\n{"messages": \n')
    (folder / "list.jsonl").write_text('[{"messages": []}]\n')
    (folder / "deep.jsonl").write_text("[" * 100_000 + "\n")
    (folder / "bytes.jsonl").write_bytes(b'{"messages": "\xff"}\n')
    (folder / "other.jsonl").write_text('{"text": "x"}\n')
    (folder / "no_chat.jsonl").write_text('{"messages": [3]}\n')
    (folder / "questions.jsonl").write_text('{"prompt": "1 + 1", "answer": 2}\n')
    stamps = folder / "stamps"
    stamps.mkdir()
    (stamps / "sft").write_text("soon\npython …\n")
    for name, content in {"no_metrics": None, "empty_metrics": "", "broken_metrics": "{\n", "one_metric": METRIC,
                          "null_metrics": METRIC.replace("2.0", "null") * 2}.items():  # fmt: skip
        run = folder / name / "sft"
        run.mkdir(parents=True)
        (run / "run.json").write_text('{"name": "sft"}')
        if content is not None:
            (run / "metrics.jsonl").write_text(content)
    strange = folder / "strange"
    (strange / "run.json").mkdir(parents=True)
    (strange / "metrics.jsonl").mkdir()
    exam = folder / "exam" / "data"
    exam.mkdir(parents=True)
    (exam / "sft.jsonl").write_text('{"prompt": "x"}\n{"response": "y"}\n')
    write_dumps(folder)
    return folder


BAD_DUMP_METRICS = {
    "dump_metrics_torn": ('{"policy_loss": 1', "not valid JSON"),
    "dump_metrics_deep": ('{"a":' * 100_000, "not valid JSON"),
    "dump_metrics_list": ('["policy_loss"]', "must be a JSON object, not a list"),
    "dump_metrics_text": ('{"policy_loss": "1"}', "policy_loss is a string, not a number or null"),
    "dump_metrics_nan": ('{"policy_loss": NaN}', "not valid JSON"),
}
BAD_PPO_FLAGS = {
    "algorithm": "warp", "policy_loss": "warp", "loss_aggregation": "sum", "ppo_epochs": 1.5,
    "per_device_training_batch_size": 0, "clip_range_low": "0.2", "dual_clip": True, "whiten_advantages": "yes",
    "gamma": [1.0], "gae_lambda": None,
}  # fmt: skip


def write_dumps(folder: Path) -> None:
    """Folders like those of --dump_step, each with one thing wrong."""
    good = {"processes": 1, "temperature": 1.0, "max_answer_seq_len": 8, "kl_coef": 0.1, "ppo": asdict(PPOArguments())}
    wrong = {
        "dump_broken": "{", "dump_list": "[]", "dump_empty": "{}", "dump_bytes": b"\xff", "dump_deep": "[" * 100_000,
        "dump_few": json.dumps(good | {"ppo": None}), "dump_word": json.dumps(good | {"processes": "two"}),
        "dump_none": json.dumps(good | {"processes": 0}),
        "dump_newer": json.dumps(good | {"ppo": good["ppo"] | {"warp": 9}}),
        "dump_alone": json.dumps(good), "dump_metrics": json.dumps(good), "dump_tensors": json.dumps(good),
        "dump_fields": json.dumps(good), "dump_model": json.dumps(good),
    }  # fmt: skip
    wrong |= {name: json.dumps(good) for name in BAD_DUMP_METRICS}
    wrong |= {f"dump_ppo_{name}": json.dumps(good | {"ppo": good["ppo"] | {name: value}})
              for name, value in BAD_PPO_FLAGS.items()}  # fmt: skip
    for name, content in wrong.items():
        (folder / name).mkdir()
        (folder / name / "settings.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "dump_metrics" / "metrics.json").write_text("{")
    for name, (content, _) in BAD_DUMP_METRICS.items():
        (folder / name / "metrics.json").write_text(content)
    for name in ("dump_tensors", "dump_fields", "dump_model"):
        (folder / name / "metrics.json").write_text("{}")
    (folder / "dump_tensors" / "iteration_rank0.safetensors").write_bytes(b"not tensors at all")
    save_file({"0.warp": torch.zeros(1)}, folder / "dump_fields" / "iteration_rank0.safetensors")


NO_NUMBERS = ("word", "", "1.5", "nan", "1e3", "1_0")
NO_FLOATS = ("word", "", "nan", "inf", "1e999")


def numbers(name: str, argv: list, flags: dict[str, tuple]) -> list[tuple]:
    """A case for each value that is no integer, and for each one out of the flag's bounds."""
    return [(name, [*argv, f"--{flag}={value}"], f"--{flag}") for flag, bad in flags.items()
            for value in (*NO_NUMBERS, *bad)]  # fmt: skip


def floats(name: str, argv: list, flags: dict[str, tuple]) -> list[tuple]:
    return [(name, [*argv, f"--{flag}={value}"], f"--{flag}") for flag, bad in flags.items()
            for value in (*NO_FLOATS, *bad)]  # fmt: skip


HUGE = 2**63
REPORT, CHAT, SERVE, REPLAY = "report", "chat", "serve_reward_model", "replay"
CHATS, MODEL, SUMMARY = "quickstart/arithmetic_chats", "quickstart/make_model", "quickstart/summarize"
DATA, CONVERT, SMOLLM2 = "smollm2/prepare_data", "smollm2/prepare_model", "smollm2/summarize"
SUMS, EVALUATE = "chain_sum/worked_sums", "chain_sum/evaluate"
SUMMARY_FLAGS = {"--output": "empty", "--sft": "empty", "--ppo": "empty", "--prompts": "questions.jsonl",
                 "--reward_run": "one_metric/sft", "--stages": "stamps"}  # fmt: skip


def summary_with(**changes: str) -> list[str]:
    flags = SUMMARY_FLAGS | {f"--{name}": value for name, value in changes.items()}
    return [word for pair in flags.items() for word in pair]


CASES: list[tuple[str, list, str]] = [
    (REPORT, [], "RUN"),
    (REPORT, ["missing"], "missing: no such folder"),
    (REPORT, ["a_file"], "a_file: no such folder"),
    (REPORT, ["empty"], "nothing to report"),
    (REPORT, ["no_metrics/sft"], "metrics.jsonl is missing"),
    (REPORT, ["empty_metrics/sft"], "metrics.jsonl is empty"),
    (REPORT, ["broken_metrics/sft"], "1 unreadable line(s), first at line 1"),
    (REPORT, ["strange"], "metrics.jsonl is a folder"),
    (REPORT, ["one_metric/sft", "-o", "empty"], "'empty' is a folder; name a file"),
    (REPORT, ["one_metric/sft", "-o", "a_file/page.html"], "a_file is not a writable folder"),
    (REPORT, ["one_metric/sft", "-o", ""], "is empty; name a file"),
    *numbers(REPORT, ["one_metric/sft"], {"samples": ("-1",)}),
    (CHAT, ["missing/model"], "missing/model"),
    (CHAT, ["./missing"], "./missing"),
    (CHAT, ["a_file"], "a_file"),
    (CHAT, ["empty"], "empty"),
    (CHAT, ["empty", "--dtype", "fp8"], "--dtype"),
    (CHAT, ["empty", "--warp", "9"], "--warp"),
    *numbers(CHAT, ["empty"], {"max_new_tokens": (0, -1), "top_k": (-1,), "seed": (-1, HUGE)}),
    *floats(CHAT, ["empty"], {"temperature": (-0.1,), "top_p": (0, 1.1, -1)}),
    (CHAT, ["a_file", "./missing"], "a_file"),
    (CHAT, ["a_file", "./missing"], "./missing"),
    (CHAT, ["empty", "empty", "empty"], "unrecognized arguments: empty"),
    (CHAT, ["empty", "--web", "--port", "0"], "empty"),
    (CHAT, ["empty", "--web", "--host", "0.0.0.0"], "--host 0.0.0.0: others can reach it"),
    (CHAT, ["empty", "--web", "--host", "no host"], "--host no host: is not an address of this machine"),
    (CHAT, ["empty", "--web", "--port", "{used_port}"], "--port {used_port}: is in use"),
    (CHAT, ["empty", "--web", "--token", "short"], "--token: must be at least 16 ASCII characters"),
    (CHAT, ["empty", "--web", "--host", "192.0.2.1", "--token", "x" * 16], "cannot listen there"),
    (CHAT, ["empty", "--web", "--ratings", "other.jsonl"], "other.jsonl: exists, but its first line is no preference"),
    (CHAT, ["empty", "--web", "--ratings", "empty"], "--ratings: 'empty' is a folder"),
    (CHAT, ["empty", "--ratings", "new.jsonl"], "warning: --ratings has an effect only with --web"),
    *numbers(CHAT, ["empty", "--web"], {"port": (-1, 65536)}),
    (SERVE, ["missing/model"], "missing/model"),
    (SERVE, ["./missing"], "./missing"),
    (SERVE, ["a_file"], "a_file"),
    (SERVE, ["empty"], "empty"),
    (SERVE, ["empty", "--host", "0.0.0.0"], "DSCHAT_REWARD_TOKEN"),
    (SERVE, ["empty", "--port", "{used_port}"], "--port {used_port}: is in use"),
    *numbers(SERVE, ["empty"], {"port": (-1, 65536), "max_tokens": (-1,), "max_batch_rows": (0, -1), "max_queue": (0,),
                                "max_rows": (0,), "max_body": (0,), "max_held": (0,), "max_batch_tokens": (0,)}),
    *floats(SERVE, ["empty"], {"shutdown_seconds": (-1,), "max_wait": (-1,), "max_read_seconds": (0, -1)}),
    (REPLAY, ["missing"], "there is no folder 'missing'"),
    (REPLAY, ["a_file"], "'a_file' is not a folder"),
    (REPLAY, [""], "there is no folder ''"),
    (REPLAY, ["empty"], "empty contains no settings.json"),
    (REPLAY, ["dump_broken"], "dump_broken/settings.json: not valid JSON"),
    (REPLAY, ["dump_list"], "dump_list/settings.json: must be a JSON object, not a list"),
    (REPLAY, ["dump_empty"], "dump_empty/settings.json: processes, temperature"),
    (REPLAY, ["dump_bytes"], "dump_bytes/settings.json: not valid JSON"),
    (REPLAY, ["dump_deep"], "dump_deep/settings.json: not valid JSON"),
    (REPLAY, ["dump_few"], "settings.json: ppo is missing or invalid"),
    (REPLAY, ["dump_word"], "settings.json: processes is missing or invalid"),
    (REPLAY, ["dump_none"], "settings.json: processes is missing or invalid"),
    (REPLAY, ["dump_newer"], "this version has no flag warp"),
    (REPLAY, ["dump_alone"], "dump_alone/metrics.json: No such file"),
    (REPLAY, ["dump_metrics"], "metrics.json: not valid JSON"),
    *((REPLAY, [name], "metrics.json: " + part) for name, (_, part) in BAD_DUMP_METRICS.items()),
    *((REPLAY, [f"dump_ppo_{name}"], f"settings.json: --{name}") for name in BAD_PPO_FLAGS),
    (REPLAY, ["dump_tensors"], "iteration_rank0.safetensors: not readable as safetensors"),
    (REPLAY, ["dump_fields"], "iteration_rank0.safetensors: its tensors are not those of an Experience"),
    (REPLAY, ["dump_model"], "dump_model/iteration_rank0.safetensors"),
    (REPLAY, ["empty", "--device", "warp"], "'warp' is not an available device"),
    *floats(REPLAY, ["empty"], {"tolerance": (-1,)}),
    (CHATS, [], "--output"),
    (CHATS, ["--output", "a_file"], "a_file is not a writable folder"),
    (CHATS, ["--output", "a_file/below"], "a_file is not a writable folder"),
    (CHATS, ["--output", ""], "--output: is empty; name a folder"),
    *numbers(CHATS, ["--output", "new"], {"seed": (-1, HUGE), "sft_examples": (0, -1), "pair_prompts": (0,),
                                          "rl_prompts": (0,), "eval_prompts": (0,)}),
    *((MODEL, ["--output", "new", "--data", name], part) for name, part in {
        "missing": "there is no file 'missing'", "empty": "'empty' is a folder; name a file", "": "there is no file ''",
        "empty.jsonl": "empty.jsonl has no rows", "broken.jsonl": "broken.jsonl:3: not valid JSON",
        "list.jsonl": "list.jsonl:1: must be a JSON object with messages", "deep.jsonl": "deep.jsonl:1: not valid JSON",
        "bytes.jsonl": "bytes.jsonl:1: not valid JSON", "other.jsonl": "other.jsonl:1: must be a JSON object",
        "no_chat.jsonl": "are no chats", "a_file": "a_file:1: not valid JSON",
    }.items()),
    (MODEL, ["--output", "a_file", "--data", "other.jsonl"], "a_file is not a writable folder"),
    *numbers(MODEL, ["--output", "new", "--data", "other.jsonl"], {"seed": (-1, HUGE)}),
    (SUMMARY, [], "--output"),
    (SUMMARY, summary_with(sft="missing"), "--sft: there is no folder 'missing'"),
    (SUMMARY, summary_with(ppo="a_file"), "--ppo: 'a_file' is not a folder"),
    (SUMMARY, summary_with(dpo="missing"), "--dpo: there is no folder"),
    (SUMMARY, summary_with(prompts="empty"), "--prompts: 'empty' is a folder"),
    (SUMMARY, summary_with(prompts="empty.jsonl"), "empty.jsonl has no rows"),
    (SUMMARY, summary_with(prompts="other.jsonl"), "other.jsonl:1: must be a JSON object with prompt, answer"),
    (SUMMARY, summary_with(reward_run="empty"), "empty/metrics.jsonl: No such file"),
    (SUMMARY, summary_with(reward_run="broken_metrics/sft"), "metrics.jsonl:1: not valid JSON"),
    (SUMMARY, summary_with(), "stamps/sft: is not a stamp of a stage"),
    (SUMMARY, summary_with(stages="missing"), "--stages: there is no folder"),
    *numbers(SUMMARY, summary_with(), {"samples": (0,), "seed": (-1,)}),
    (DATA, ["--output", "a_file"], "a_file is not a writable folder"),
    (DATA, ["--output", "new", "--downloads", "a_file/x"], "--downloads: 'a_file/x'"),
    *numbers(DATA, ["--output", "new"], {"seed": (-1,), "sft": (-1,), "preferences": (-1,), "prompts": (-1,),
                                         "eval": (-1,), "max_turns": (1,), "max_chars": (99,)}),
    (CONVERT, ["--output", "a_file"], "a_file is not a writable folder"),
    (CONVERT, ["--output", "new", "--downloads", "a_file"], "--downloads: 'a_file'"),
    (SMOLLM2, [], "output"),
    (SMOLLM2, ["missing"], "there is no folder 'missing'"),
    (SMOLLM2, ["a_file"], "'a_file' is not a folder"),
    (SMOLLM2, ["empty"], "empty/sft/metrics.jsonl: 0 evaluations, two are needed"),
    (SMOLLM2, ["one_metric"], "1 evaluations, two are needed"),
    (SMOLLM2, ["broken_metrics"], "broken_metrics/sft/metrics.jsonl:1: not valid JSON"),
    (SMOLLM2, ["null_metrics"], "an evaluation has no number for perplexity"),
]  # fmt: skip
WITH_REASONING_GYM = [
    (SUMS, [], "--output"),
    (SUMS, ["--output", "a_file"], "a_file is not a writable folder"),
    (SUMS, ["--output", "new", "--min_terms", "4"], "--min_terms 4 is more than --max_terms 3"),
    *numbers(SUMS, ["--output", "new"], {"seed": (-1,), "rows": (0,), "min_terms": (1,), "max_terms": (1, 0),
                                         "max_digits": (0, 99)}),
    (EVALUATE, ["--output", "missing", "--models", "empty"], "--output: there is no folder"),
    (EVALUATE, ["--output", "exam", "--models", "missing"], "--models: there is no folder"),
    (EVALUATE, ["--output", "exam", "--models"], "--models"),
    (EVALUATE, ["--output", "empty", "--models", "empty"], "empty/data/sft.jsonl: No such file"),
    (EVALUATE, ["--output", "exam", "--models", "empty"], "exam/data/sft.jsonl:2: must be a JSON object with prompt"),
    *numbers(EVALUATE, ["--output", "exam", "--models", "empty"], {"sums": (0,)}),
]  # fmt: skip


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def check(cases: list[tuple], inputs: Path, capsys: pytest.CaptureFixture, fill: Callable[[str], str]) -> None:
    before = sorted(inputs.rglob("*"))
    for name, argv, part in cases:
        code, printed = run_script(name, [fill(word) for word in argv], capsys)
        assert code == 2 and fill(part) in printed and "Traceback" not in printed, (name, argv, code, printed)
    assert sorted(inputs.rglob("*")) == before, "nothing is created"


@pytest.mark.parametrize("name", sorted({case[0] for case in CASES}))
def test_bad_input_is_one_message_and_status_2(name, inputs, used_port, monkeypatch, capsys):
    monkeypatch.chdir(inputs)
    monkeypatch.delenv("DSCHAT_REWARD_TOKEN", raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    check(
        [case for case in CASES if case[0] == name],
        inputs,
        capsys,
        lambda text: text.replace("{used_port}", str(used_port)),
    )
    assert len(CASES) > 250


@pytest.mark.parametrize("host", ["no host", "x" * 99, "192.0.2.1"])
def test_a_reward_server_listens_at_addresses_of_this_machine_only(host, inputs, monkeypatch, capsys):
    monkeypatch.setenv("DSCHAT_REWARD_TOKEN", "token")
    code, printed = run_script(SERVE, [inputs / "empty", "--host", host, "--port", "0"], capsys)
    assert code == 2 and f"--host {host}" in printed
    assert "is not an address" in printed or "cannot listen there" in printed


@pytest.mark.parametrize("name", [SUMS, EVALUATE])
def test_bad_input_of_programs_that_need_reasoning_gym(name, inputs, monkeypatch, capsys):
    pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(inputs)
    check([case for case in WITH_REASONING_GYM if case[0] == name], inputs, capsys, str)


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0",
                                         "PYTHONCOERCECLOCALE": "0"}], ids=["ascii", "C"])  # fmt: skip
def test_a_console_that_is_not_utf_8_gets_escapes(environment, tmp_path):
    folder = tmp_path / "Läufe → neu"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    done = subprocess.run(
        [sys.executable, SCRIPTS / "report.py", folder, "-o", folder / "page.html"], capture_output=True, timeout=120,
        env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    assert b"neu: run.json is missing" in done.stdout and b"wrote" in done.stdout and done.stdout.isascii()
    assert (folder / "page.html").is_file()


def test_every_line_is_a_row_and_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "x\u2028y"}\r\n\n{"a": 2, "b": 3}', encoding="utf-8")
    assert read_json_lines(path, fields=["a"]) == [{"a": "x\u2028y"}, {"a": 2, "b": 3}]
    with pytest.raises(ValueError, match=r"rows.jsonl:1: must be a JSON object with a, b"):
        read_json_lines(path, fields=["a", "b"])
