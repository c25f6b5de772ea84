"""The console: main metrics at an interval in a file; on a terminal one live line, never wider than the terminal."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from dschat.runs.console import Console, live_metrics, main_metrics

TRAIN = {"score": 1.5, "reward": 1.4, "kl": 0.02, "response_length": 11.0, "entropy": 1.2, "clip_fraction": 0.1,
         "actor_grad_norm": 0.5, "tokens_per_second": 4200.0, "padding": 0.0}  # fmt: skip
PROGRAM = f"""
import time
from dschat.runs.console import Console
console = Console("step3_rlhf_finetuning", total_steps=12, logging_steps=1)
for step in range(1, 13):
    time.sleep(0.15)
    console.metrics(step, {TRAIN!r}, phase="train", seconds=float(step))
    if step % 4 == 0:
        console.metrics(step, {TRAIN!r}, phase="eval", seconds=float(step))
        console.print("a warning of many words " * 12)
console.close()
"""


def run_on_terminal(columns: int) -> str:
    """What the program writes to a terminal of this width."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=slave, stderr=slave, env=environment | {"TERM": "xterm"}
    )
    os.close(slave)
    written = b""
    try:
        while chunk := os.read(master, 4096):
            written += chunk
    except OSError:  # the end of a pseudo-terminal
        pass
    assert child.wait(60) == 0, written.decode()
    return written.decode()


@pytest.mark.parametrize("columns", [80, 200])
def test_no_line_is_wider_than_the_terminal(columns):
    text = run_on_terminal(columns)
    drawn = [re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", part) for part in re.split(r"[\r\n]", text)]
    assert max(map(len, drawn)) <= columns
    live = [line for line in drawn if "step3 12/12" in line][-1]
    for part in ("score 1.5", "kl 0.02", "len 11", "ent 1.2", "tok/s 4,200"):
        assert part in live, "the live line has five metrics"
    assert sum("eval 4/12" in line for line in drawn) == 1


def test_a_file_gets_one_short_line_per_interval_and_every_evaluation(capsys):
    console = Console("sft", total_steps=10, logging_steps=4)
    for step in range(1, 11):
        console.metrics(step, TRAIN, phase="train", seconds=2.0 * step)
    console.metrics(10, TRAIN, phase="eval", seconds=20.0)
    *train, evaluation = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in train] == ["1/10", "4/10", "8/10", "10/10"]
    assert train[1] == (
        "[sft] train 4/10  score 1.5  kl 0.02  response_length 11  entropy 1.2  tokens_per_second 4200  ETA 0:00:12"
    )
    assert "clip_fraction 0.1" in evaluation and "padding 0" in evaluation


def test_the_live_line_has_as_many_whole_metrics_as_fit():
    values = {"loss": 5.6681, "grad_norm": 6.275, "learning_rate": 6.9e-9, "tokens_per_second": 3876.0}
    assert live_metrics(values, width=100) == "loss 5.67 grad 6.28 lr 6.9e-09 tok/s 3,876"
    assert live_metrics(values, width=25) == "loss 5.67 grad 6.28"
    assert live_metrics(values, width=3) == ""


def test_metrics_without_a_usual_one_are_shown_all_the_same():
    assert main_metrics({"colour": 1.0, "depth": 2.0}) == {"colour": 1.0, "depth": 2.0}
