"""The Triton kernels of generation: correct where they can run, compiled for GPUs where they cannot."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from repository import ROOT

from dschat.generation.cuda import triton_kernels
from dschat.generation.kv_pool.attention import Contexts, Scoring

CASES = Path(__file__).with_name("triton_kernel_cases.py")


def test_the_kernels_agree_with_plain_torch():
    """On the GPU, or interpreted: triton decides that while it is imported, so for a whole process."""
    pytest.importorskip("triton")
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]


class Recorder:
    """Replaces a kernel and records its launch arguments."""

    def __init__(self, kernel, launches: list) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((self.kernel, grid, args, options))


def signature_type(value) -> str:
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.long: "i64"}
    if isinstance(value, torch.Tensor):
        return "*" + names[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def shared_memory(launch, capability: int) -> int:
    """Compile a launch as Triton does at run time; returns bytes of shared memory per program."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, grid, args, options = launch
    assert all(size <= 65535 for size in grid[1:])
    names = kernel.arg_names
    constants = {name: value for name, value in options.items() if name in names}
    options = {name: value for name, value in options.items() if name not in names}
    values = dict(zip(names, args, strict=False))
    types = {name: signature_type(values[name]) if name in values else "constexpr" for name in names}
    # Pointers, and strides that are multiples of 16, are known to be aligned.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if isinstance(values.get(name), torch.Tensor) or (name in values and values[name] % 16 == 0)
    }
    source = ASTSource(kernel, types, {(names.index(name),): value for name, value in constants.items()}, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert len(compiled.asm["cubin"]) > 0
    return compiled.metadata.shared


@pytest.mark.parametrize("capability", [80, 90])
def test_every_launch_compiles_and_fits_into_shared_memory_also_without_a_gpu(capability, monkeypatch, tmp_path):
    """The interpreter does not check tile sizes, types that change in a loop, or shared memory."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1 replaces the compiler")
    from dschat.generation.cuda import attention, kv_writes, sampling

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches: list = []
    for module, name in (
        (attention, "_attend"), (attention, "_combine"), (kv_writes, "_write"), (sampling, "_measure_blocks"),
        (sampling, "_draw"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), launches))
    spans = torch.zeros(2, 4, dtype=torch.long)
    for dtype, kv_heads, group, width, splits in [
        (torch.bfloat16, 2, 4, 128, 1),
        (torch.bfloat16, 2, 1, 80, 8),
        (torch.bfloat16, 1, 71, 64, 1),
        (torch.bfloat16, 2, 2, 256, 64),
        (torch.float32, 1, 3, 256, 1),
        (torch.float32, 1, 1, 8, 1),
    ]:
        query = torch.zeros(2, kv_heads * group, width, dtype=dtype)
        pool = torch.zeros(9, kv_heads, width, dtype=dtype)
        softcap = 50.0 if width == 256 else None
        contexts, scoring = Contexts(pool, pool, spans, longest=9), Scoring(scale=0.1, softcap=softcap, window=5)
        attention.decode_attention(query, contexts, scoring, splits=splits)
    kv_writes.write_kv(pool, pool, query, query, spans[:, 0])
    for dtype, vocabulary, temperature in [(torch.bfloat16, 151_936, 0.7), (torch.float32, 50_257, 0)]:
        sampling.sample(torch.zeros(2, vocabulary, dtype=dtype), torch.zeros(2), temperature=temperature)
    assert len(launches) == 6 + 2 + 1 + 4
    # 99 KiB: the limit per program on consumer GPUs of compute capability 8.6 and 8.9.
    assert max(shared_memory(launch, capability) for launch in launches) <= 99 * 1024


def test_on_the_cpu_kernels_are_available_only_if_triton_is_installed_and_interprets_them(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton_kernels, "_triton_is_installed", lambda: True)
    assert not triton_kernels.available(torch.zeros(1))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton_kernels.available(torch.zeros(1))
    monkeypatch.setattr(triton_kernels, "_triton_is_installed", lambda: False)
    assert not triton_kernels.available(torch.zeros(1))
