"""Bandwidth and peak memory of the device a benchmark runs on."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from pathlib import Path

import torch

COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
SAMPLE_SECONDS = 0.005
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, *, repeat: int = 7) -> float:
    """Bytes per second, reads plus writes, of the fastest of several large copies with all threads."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    fastest = float("inf")
    for _ in range(repeat):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * source.numel() / fastest


def resident_bytes() -> int:
    """Resident set size of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def free_memory(device: torch.device) -> None:
    """Release unused cached memory, so that the next peak measurement starts from the baseline."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        ctypes.CDLL(None).malloc_trim(0)


class PeakMemory:
    """Peak memory between entry and exit, minus the memory in use on entry.

    On CUDA the peak of torch's allocator; on CPU that of the resident set, sampled every few milliseconds.

    Attributes:
        peak_bytes: available after exit.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0

    def __enter__(self) -> PeakMemory:
        free_memory(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            self._before = self._highest = resident_bytes()
            self._done = threading.Event()
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._before
        else:
            self._done.set()
            self._sampler.join()
            self.peak_bytes = max(self._highest, resident_bytes()) - self._before

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self._highest = max(self._highest, resident_bytes())
