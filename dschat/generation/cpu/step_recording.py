"""What CUDA graphs are on a GPU, for a CPU: a step's operations recorded once, then run again without Python's part.

Every tensor that a recorded run made is kept, so views need no work, and each operation writes where it wrote before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from dschat.generation.cpu import cpp_kernels

# More than this is not kept for one recording: with so much arithmetic the calls do not matter.
MOST_BYTES = 256 << 20


def record(run: Callable[[], None]) -> Recording | None:
    """Run a function; return what does its tensor operations again, on the same tensors.

    None where that would not be the same, since the function reads a number out of a tensor, or not worth it, since it
    makes more than MOST_BYTES of tensors.
    """
    library, recorder = cpp_kernels.load(), Recorder()
    if library is not None:
        library.recorder = recorder.calls
    try:
        with recorder:
            run()
    finally:
        if library is not None:
            library.recorder = None
    if recorder.reads or recorder.bytes > MOST_BYTES:
        return None
    return Recording(recorder.calls, recorder.kept, recorder.bytes)


@dataclass(frozen=True)
class Recording:
    """Operations that can be done again; see Recorder."""

    calls: list[Callable[[], Any]]
    kept: list[Tensor]
    nbytes: int

    def __call__(self) -> None:
        for call in self.calls:
            call()


class Recorder(TorchDispatchMode):
    """Notes operations as they run.

    Attributes:
        calls: what has to be called to do it all again.
        kept: the tensors that were made: none may be freed, or another would get its place.
        bytes: of the tensors that were made, as long as they are kept.
        reads: a number was read out of a tensor, so that Python may have gone another way because of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []
        self.kept: list[Tensor] = []
        self.bytes = 0
        self.reads = False

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.reads |= _reads(func) or any(tensor.dtype == torch.bool for tensor in _indices(func, args))
        out = func(*args, **kwargs)
        if self.bytes > MOST_BYTES:  # nothing comes of it, so nothing is held
            self.calls.clear()
            self.kept.clear()
            return out
        made = tensors(out)
        self.kept += made
        if func._schema.is_mutable:
            self.calls.append(partial(func, *args, **kwargs))
            return out
        given = {_place(tensor) for tensor in tensors((*args, *kwargs.values()))}
        if any(_place(tensor) not in given for tensor in made):
            self.bytes += sum(tensor.nbytes for tensor in made)
            if not func.overloadpacket.__name__.startswith(("empty", "new_empty")):
                self.calls.append(_again(func, args, kwargs, out))
        return out


@functools.cache
def _reads(func: OpOverload) -> bool:
    """Whether an operation lets Python see values: as a number, a shape, or a list (which resolves signs first)."""
    if func is torch.ops.aten.index.Tensor:
        return False  # unless a mask is among the indices, which only the call shows
    numbers = any("Tensor" not in str(result.type) for result in func._schema.returns)
    return numbers or torch.Tag.dynamic_output_shape in func.tags or func is torch.ops.aten.resolve_neg.default


def _indices(func: OpOverload, args: tuple) -> list[Tensor]:
    """What an indexing operation indexes with; a mask among it makes a shape of values."""
    return tensors(args[1]) if func is torch.ops.aten.index.Tensor else []


def _place(tensor: Tensor) -> int:
    """Where a tensor's memory begins."""
    return tensor.untyped_storage().data_ptr()


def tensors(given: Any) -> list[Tensor]:
    """The tensors among an operation's arguments or results: single ones, and those in lists."""
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, list | tuple):
        return [tensor for one in given for tensor in tensors(one)]
    return []


def _again(func: OpOverload, args: tuple, kwargs: dict, out: Any) -> Callable[[], Any]:
    """A call that does an operation again and writes the result where it was written the first time."""
    if isinstance(out, Tensor) and (writes := _out_variant(func)) is not None:
        return partial(writes, *args, **kwargs, out=out)
    made = tensors(out)

    def copy() -> None:
        for old, new in zip(made, tensors(func(*args, **kwargs)), strict=True):
            old.copy_(new)

    return copy


@functools.cache
def _out_variant(func: OpOverload) -> OpOverload | None:
    """The overload with the same arguments and one more, `out`."""
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    packet = func.overloadpacket
    for name in packet.overloads():
        arguments = getattr(packet, name)._schema.arguments
        same = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        outs = [argument.name for argument in arguments if argument.is_out]
        if outs == ["out"] and same == wanted:
            return getattr(packet, name)
    return None
