"""Counts the bytes of the tensors that torch operations allocate, on any device; on "meta" without computing them."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocatedBytes(TorchDispatchMode):
    """Inside, the storages that operations return are counted; those made outside are not.

    Attributes:
        live: bytes allocated now.
        peak: largest value of live.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._bytes: dict[int, int] = {}  # by address of the storage

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            self._count(tensor, new=False)
        outputs = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            self._count(tensor, new=True)
        return outputs

    def _count(self, tensor: Any, *, new: bool) -> None:
        if not isinstance(tensor, Tensor) or tensor.untyped_storage()._cdata in self._bytes:
            return
        storage = tensor.untyped_storage()
        self._bytes[storage._cdata] = storage.nbytes() if new else 0
        self.live += self._bytes[storage._cdata]
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, address: int) -> None:
        self.live -= self._bytes.pop(address)
