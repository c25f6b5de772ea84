"""Records a decoding step's operations on a CPU and replays them without Python overhead, like a CUDA graph.

All tensors created by the recorded run are kept, so views need no work, and each operation writes to its old output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from dschat.generation.cpu import cpp_kernels
from dschat.models.cpu.library import CompiledLibrary

# Maximum tensor memory kept per recording: above this, arithmetic dominates the call overhead.
MAX_BYTES = 256 << 20
MATRIX_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution", "mv", "addmv", "einsum"}
GRAIN_SIZE = 1 << 15  # of at::parallel_for: elements below which one thread runs an operation


def record(run: Callable[[], None]) -> Recording | None:
    """Run a function and record its tensor operations, for replay on the same tensors.

    Returns None if a replay could differ, because the function reads values of a tensor into Python, or if it creates
    more than MAX_BYTES of tensors.
    """
    recorder = Recorder()
    CompiledLibrary.recorder = recorder.calls
    try:
        with recorder:
            run()
    finally:
        CompiledLibrary.recorder = None
    if recorder.reads or recorder.bytes > MAX_BYTES:
        return None
    return Recording(recorder.calls, recorder.kept, recorder.bytes, with_team=not recorder.threads_of_torch)


class Recording:
    """Recorded operations, replayed by calling it; see Recorder.

    Attributes:
        with_team: the threads of our kernels stay awake during a replay, in which torch's operations run in one thread.
    """

    def __init__(self, calls: list[Callable[[], Any]], kept: list[Tensor], nbytes: int, *, with_team: bool) -> None:
        self.calls, self.kept, self.nbytes = calls, kept, nbytes
        self.with_team = with_team and cpp_kernels.load() is not None
        self._team_function = cpp_kernels.TEAM_FUNCTION(self._replay_and_keep_error)
        self._error: BaseException | None = None

    def __call__(self) -> None:
        threads = torch.get_num_threads()
        if not self.with_team or threads == 1:
            self._replay()
            return
        cpp_kernels.load().run_with_team(self._team_function, threads=threads)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _replay(self) -> None:
        for call in self.calls:
            call()

    def _replay_and_keep_error(self) -> None:
        try:
            self._replay()
        except BaseException as error:  # an exception cannot pass through C++; KeyboardInterrupt is one, too
            self._error = error


class Recorder(TorchDispatchMode):
    """Records operations as they run.

    Attributes:
        calls: the calls that replay the run, in order.
        kept: the tensors created: kept alive so that their memory is not reused.
        bytes: total size of the created tensors.
        reads: True if a tensor value was read into Python, which may have changed the control flow.
        threads_of_torch: True if an operation of torch is large enough to run in several threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []
        self.kept: list[Tensor] = []
        self.bytes = 0
        self.reads = False
        self.threads_of_torch = False

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.reads |= _reads_values(func) or any(tensor.dtype == torch.bool for tensor in _indices(func, args))
        out = func(*args, **kwargs)
        if self.bytes > MAX_BYTES:  # the recording will be discarded, so free it
            self.calls.clear()
            self.kept.clear()
            return out
        created = tensors(out)
        self.kept += created
        if func._schema.is_mutable:
            self.calls.append(partial(func, *args, **kwargs))
            return out
        inputs = {_storage_address(tensor) for tensor in tensors((*args, *kwargs.values()))}
        if any(_storage_address(tensor) not in inputs for tensor in created):
            self.bytes += sum(tensor.nbytes for tensor in created)
            if not func.overloadpacket.__name__.startswith(("empty", "new_empty")):
                self.threads_of_torch |= _uses_threads(func, created)
                self.calls.append(_replay_call(func, args, kwargs, out))
        return out


def _uses_threads(func: OpOverload, created: list[Tensor]) -> bool:
    """Whether torch may run the operation in several threads: matrix products, and results above its grain size."""
    name = func.overloadpacket.__name__
    return name in MATRIX_PRODUCTS or "attention" in name or any(tensor.numel() > GRAIN_SIZE for tensor in created)


@functools.cache
def _reads_values(func: OpOverload) -> bool:
    """Whether an operation exposes values to Python: as a number, a shape, or a list (tolist calls resolve_neg)."""
    if func is torch.ops.aten.index.Tensor:
        return False  # except with a boolean mask as index, which is checked per call
    numbers = any("Tensor" not in str(result.type) for result in func._schema.returns)
    return numbers or torch.Tag.dynamic_output_shape in func.tags or func is torch.ops.aten.resolve_neg.default


def _indices(func: OpOverload, args: tuple) -> list[Tensor]:
    """The index tensors of an indexing operation; with a boolean mask the output shape depends on values."""
    return tensors(args[1]) if func is torch.ops.aten.index.Tensor else []


def _storage_address(tensor: Tensor) -> int:
    """Start address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def tensors(value: Any) -> list[Tensor]:
    """The tensors in an operation's arguments or results, lists and tuples flattened."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def _replay_call(func: OpOverload, args: tuple, kwargs: dict, out: Any) -> Callable[[], Any]:
    """A call that repeats an operation and writes the result to its original output tensors."""
    if isinstance(out, Tensor) and (out_variant := _out_variant(func)) is not None:
        return partial(out_variant, *args, **kwargs, out=out)
    created = tensors(out)

    def copy() -> None:
        for old, new in zip(created, tensors(func(*args, **kwargs)), strict=True):
            old.copy_(new)

    return copy


@functools.cache
def _out_variant(func: OpOverload) -> OpOverload | None:
    """The overload with the same arguments plus `out`, or None."""
    expected = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    packet = func.overloadpacket
    for name in packet.overloads():
        arguments = getattr(packet, name)._schema.arguments
        same = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        outs = [argument.name for argument in arguments if argument.is_out]
        if outs == ["out"] and same == expected:
            return getattr(packet, name)
    return None
