"""Restrict torch.load to tensors and plain containers, so that loading a checkpoint runs no code."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

# Classes in DeepSpeed's checkpoints that torch does not allow by itself; their constructors only set fields.
PLAIN_CLASSES = (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)
FORCE_WEIGHTS_ONLY, FORCE_NO_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
UNREADABLE = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, IndexError, EOFError,
              AssertionError, MemoryError, RecursionError, pickle.UnpicklingError, zipfile.BadZipFile)  # fmt: skip


@contextmanager
def restricted_unpickling(error_prefix: str = "") -> Iterator[None]:
    """Restrict every torch.load of this process to weights, even if DeepSpeed passes `weights_only=False`.

    Args:
        error_prefix: start of the error message.

    Raises: ValueError for a file with anything but tensors and plain containers.
    """
    previous = {name: os.environ.pop(name, None) for name in (FORCE_WEIGHTS_ONLY, FORCE_NO_WEIGHTS_ONLY)}
    os.environ[FORCE_WEIGHTS_ONLY] = "1"
    try:
        with torch.serialization.safe_globals(list(PLAIN_CLASSES)):
            yield
    except pickle.UnpicklingError as error:
        raise ValueError(f"{error_prefix}{_reason(error)}") from error
    finally:
        del os.environ[FORCE_WEIGHTS_ONLY]
        os.environ.update({name: value for name, value in previous.items() if value is not None})


def pickle_problems(path: Path) -> list[str]:
    """Why a torch.save file must not be loaded: it is damaged, or contains more than tensors and plain containers.

    The check uses the unpickler that loads the file later, so a file that passes cannot run code then. Storages are
    not read.
    """
    try:
        with restricted_unpickling():
            torch.load(path, map_location="meta", weights_only=True)
    except UNREADABLE as error:
        return [f"{path} is refused: {_reason(error)}. Use safetensors instead"]
    return []


def _reason(error: BaseException) -> str:
    """The error message, without torch's advice to load the file anyway."""
    text = str(error)
    match = re.search(r"GLOBAL (\S+)", text)
    if match:
        return f"it would run {match[1]} when it is loaded"
    text = text.partition("WeightsUnpickler error:")[2] or text
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    first = first.partition(" In PyTorch")[0][:200]
    return first if first.startswith("it ") else f"it is not a torch.save file ({first})"


def is_pickle(path: Path) -> bool:
    """Whether torch.load would unpickle a file: by suffix .pt, or by the magic bytes of zip archives and pickles."""
    if path.suffix == ".pt":
        return True
    with path.open("rb") as file:
        start = file.read(4)
    return start == b"PK\x03\x04" or start[:1] == b"\x80"
