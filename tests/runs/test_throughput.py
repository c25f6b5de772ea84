"""Memory in the log."""

import subprocess
import sys

import pytest
import torch

from dschat.runs.throughput import peak_memory_gib

# In a process of its own: the peak of this one depends on the tests before.
GROWTH = """
import torch
from dschat.runs.throughput import memory_gib, peak_memory_gib
device = torch.device("cpu")
print(peak_memory_gib(device), memory_gib(device))
block = torch.ones(256 * 2**20 // 4)  # 256 MiB
print(peak_memory_gib(device), memory_gib(device))
del block
print(peak_memory_gib(device), memory_gib(device))
"""


def test_on_a_cpu_the_peak_stays_where_the_memory_in_use_falls():
    printed = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True).stdout
    peaks, current = zip(*(map(float, line.split()) for line in printed.splitlines()[-3:]), strict=True)
    assert peaks[1] - peaks[0] == pytest.approx(0.25, abs=0.02) and peaks[2] == pytest.approx(peaks[1], abs=0.02)
    assert current[1] - current[0] == pytest.approx(0.25, abs=0.02)
    assert current[1] - current[2] == pytest.approx(0.25, abs=0.02)


@pytest.mark.gpu
def test_the_peak_on_a_gpu_is_that_of_its_tensors():
    device = torch.device("cuda", 0)
    torch.cuda.reset_peak_memory_stats(device)
    before = peak_memory_gib(device)
    block = torch.ones(256 * 2**20 // 4, device=device)
    del block
    assert peak_memory_gib(device) - before == pytest.approx(0.25, abs=0.02)
