"""Free memory of a device, or of this process's share of its host or container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
PROCESS_CGROUPS = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated; on a CPU, this process's share of its node's or container's free memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 1 << 40  # not Linux: treated as unbounded
    return min(available, *_container_memory()) // local_ranks()


def local_ranks() -> int:
    """Processes of this run on this node: LOCAL_WORLD_SIZE from torchrun, LOCAL_SIZE from the deepspeed launcher."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE"):
        if os.environ.get(name):
            return int(os.environ[name])
    return 1


def _container_memory() -> Iterator[int]:
    """Bytes left below each cgroup memory limit of this process; yields at least one number.

    Source: the Linux kernel's cgroup-v1/memory.rst and cgroup-v2.rst. Inactive file cache counts as usage there, but
    is reclaimed before a limit is hit.
    """
    yield 1 << 62
    for group in _memory_groups():
        version = "v2" if (group / "memory.max").exists() else "v1"
        limit, usage, cache = {
            "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
            "v2": ("memory.max", "memory.current", "inactive_file "),
        }[version]
        try:
            limit_text = (group / limit).read_text(encoding="ascii").strip()
            used = int((group / usage).read_text(encoding="ascii"))
            stat = (group / "memory.stat").read_text(encoding="ascii").splitlines()
        except OSError:
            continue  # the root cgroup has no limit files; others may not be mounted here
        if limit_text.isdigit():
            reclaimable = next((int(line.split()[1]) for line in stat if line.startswith(cache)), 0)
            yield max(0, int(limit_text) - used + reclaimable)


def _memory_groups() -> Iterator[Path]:
    """Directories of the memory cgroups of this process and their ancestors."""
    try:
        lines = PROCESS_CGROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = CGROUPS / "memory" if controllers else CGROUPS
        folder = root / path.lstrip("/")
        yield from (parent for parent in (folder, *folder.parents) if parent.is_relative_to(root))
