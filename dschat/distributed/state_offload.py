"""Moves states that rollouts do not need from the device to host memory, and back to the same addresses in tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from dschat.distributed import watchdog


class StateOffload:
    """Holds states in host memory inside `offloaded()`.

    Storages are copied to the host and emptied, and filled again afterwards: tensors, views and flat buffers stay the
    same objects at every ZeRO stage, and no bit changes. Do not use the states inside the context.

    Args:
        policy: the engine that rollouts are generated from: its optimizer states move, its weights stay.
        trained: other engines in training: weights and optimizer states move.
        frozen: engines without an optimizer: their weights move.
        device: whose storages move; default: this rank's device.
    """

    def __init__(
        self,
        policy: DeepSpeedEngine,
        *,
        trained: Sequence[DeepSpeedEngine] = (),
        frozen: Sequence[nn.Module] = (),
        device: torch.device | None = None,
    ) -> None:
        self.policy, self.trained, self.frozen = policy, trained, frozen
        self._host: list[torch.UntypedStorage] = []  # kept, as pinned memory is slow to allocate
        self.device = device or torch.device(get_accelerator().current_device_name())

    def storages(self) -> list[torch.UntypedStorage]:
        """Storages that can move now, each once."""
        moving = [tensor for engine in [self.policy, *self.trained] for tensor in optimizer_tensors(engine.optimizer)]
        moving += [tensor for engine in [*self.trained, *self.frozen] for tensor in weights_of(engine)]
        kept = {tensor.untyped_storage().data_ptr() for tensor in weights_of(self.policy)}
        found = {}
        for tensor in moving:
            storage = tensor.untyped_storage()
            # On a CPU, weights can be views of their file.
            if tensor.device == self.device and storage.resizable() and storage.nbytes():
                found[storage.data_ptr()] = storage
        return [storage for address, storage in found.items() if address not in kept]

    @contextmanager
    def offloaded(self) -> Iterator[int]:
        """Release the device's memory of the states inside the context; yields the number of bytes."""
        copies = self._move_out()
        try:
            yield sum(host.nbytes() for _, host in copies)
        finally:
            self._move_back(copies)

    def _move_out(self) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
        storages = self.storages()
        if [host.nbytes() for host in self._host] != [storage.nbytes() for storage in storages]:
            pinned = {"dtype": torch.uint8, "pin_memory": self.device.type != "cpu"}
            self._host = [torch.empty(storage.nbytes(), **pinned).untyped_storage() for storage in storages]
        copies = list(zip(storages, self._host, strict=True))
        for storage, host in copies:
            host.copy_(storage)
            watchdog.progress()
        get_accelerator().synchronize()
        for storage, _ in copies:
            storage.resize_(0)
        get_accelerator().empty_cache()  # vLLM allocates past PyTorch's caching allocator
        return copies

    def _move_back(self, copies: Iterable[tuple[torch.UntypedStorage, torch.UntypedStorage]]) -> None:
        for storage, host in copies:
            storage.resize_(host.nbytes())
            storage.copy_(host)
            watchdog.progress()
        get_accelerator().synchronize()


def weights_of(module: nn.Module) -> Iterator[Tensor]:
    """Parameters (ZeRO-3: their partitions on this rank) and buffers."""
    for tensor in [*module.parameters(), *module.buffers()]:
        yield tensor.data
        if hasattr(tensor, "ds_tensor"):
            yield tensor.ds_tensor.data


def optimizer_tensors(optimizer: object) -> Iterator[Tensor]:
    """All tensors that an optimizer, or DeepSpeed's wrapper around one, holds: states, master weights, gradients."""
    pending, visited = [optimizer], set()
    while pending:
        item = pending.pop()
        if id(item) in visited:
            continue
        visited.add(id(item))
        if isinstance(item, Tensor):
            yield item.data
            pending += [item.grad] if item.is_leaf and item.grad is not None else []
        elif isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set)):
            pending += item
        elif item is optimizer or isinstance(item, torch.optim.Optimizer):
            pending += vars(item).values()
