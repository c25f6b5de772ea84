"""Peak memory of the log."""

import subprocess
import sys

import pytest
import torch

from dschat.runs.throughput import peak_memory_gib

# In a process of its own: the peak of this one depends on the tests before.
GROWTH = """
import torch
from dschat.runs.throughput import peak_memory_gib
before = peak_memory_gib(torch.device("cpu"))
block = torch.ones(256 * 2**20 // 4)  # 256 MiB
during = peak_memory_gib(torch.device("cpu"))
del block
print(before, during, peak_memory_gib(torch.device("cpu")))
"""


def test_the_peak_on_a_cpu_grows_with_an_allocation_and_stays():
    printed = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True).stdout
    before, during, after = map(float, printed.split()[-3:])
    assert during - before == pytest.approx(0.25, abs=0.02)
    assert after == pytest.approx(during, abs=0.02)


@pytest.mark.gpu
def test_the_peak_on_a_gpu_is_that_of_its_tensors():
    device = torch.device("cuda", 0)
    torch.cuda.reset_peak_memory_stats(device)
    before = peak_memory_gib(device)
    block = torch.ones(256 * 2**20 // 4, device=device)
    del block
    assert peak_memory_gib(device) - before == pytest.approx(0.25, abs=0.02)
