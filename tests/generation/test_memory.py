"""Memory limits of a process: its share of the node's and of its container's memory."""

import pytest
import torch

from dschat.generation import memory

GIB = 1 << 30
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def node(monkeypatch, tmp_path):
    """A node with 64 GiB available, without launchers and containers."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, text in (("MEMINFO", "MemTotal: 1 kB\nMemAvailable: 67108864 kB\n"), ("PROCESS_CGROUPS", "")):
        file = tmp_path / name
        file.write_text(text)
        monkeypatch.setattr(memory, name, file)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroups")


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "16"}, 4),  # torchrun
        ({"LOCAL_SIZE": "8", "WORLD_SIZE": "16"}, 8),  # the deepspeed launcher
        ({"WORLD_SIZE": "2"}, 2),
    ],
)
def test_ranks_of_a_node_share_its_memory(monkeypatch, environment, ranks):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert memory.free_memory(CPU) == 64 * GIB // ranks


def write_group(folder, limit, used, cache, *, version):
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file {cache}\ntotal_inactive_file {cache}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_free_memory_follows_the_tightest_limit_of_a_container_and_ignores_file_cache(monkeypatch, version):
    root = memory.CGROUPS / "memory" if version == 1 else memory.CGROUPS
    memory.PROCESS_CGROUPS.write_text("5:cpu:/x\n4:memory:/pod/task\n" if version == 1 else "0::/pod/task\n")
    write_group(root / "pod", 16 * GIB, 10 * GIB, 2 * GIB, version=version)  # 8 GiB are left
    write_group(root / "pod" / "task", "max" if version == 2 else 2**63 - 4096, GIB, 0, version=version)
    assert memory.free_memory(CPU) == 8 * GIB
    write_group(root / "pod" / "task", 4 * GIB, GIB, 0, version=version)
    assert memory.free_memory(CPU) == 3 * GIB
    monkeypatch.setenv("LOCAL_SIZE", "2")
    assert memory.free_memory(CPU) == 3 * GIB // 2
    write_group(root / "pod" / "task", 4 * GIB, 5 * GIB, 0, version=version)
    assert memory.free_memory(CPU) == 0


def test_inside_a_container_its_own_cgroup_is_the_root():
    memory.PROCESS_CGROUPS.write_text("4:memory:/outside/of/view\n0::/\n")
    write_group(memory.CGROUPS / "memory", 6 * GIB, 2 * GIB, GIB, version=1)
    assert memory.free_memory(CPU) == 5 * GIB
