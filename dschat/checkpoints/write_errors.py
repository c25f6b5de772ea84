"""Write errors that all ranks raise together: raised on one rank alone, they would make the others hang."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import deepspeed
from safetensors import SafetensorError

from dschat.distributed import collectives, failpoint, watchdog

# Raised by writes to a full or detached disk; torch's own writer raises RuntimeError.
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)


class WriteErrors:
    """The write errors of this rank while all ranks write to one folder.

    Attributes:
        folder: removed if any rank fails.
        content: what is being written, for the message.
        messages: one line per error; after the first one, this rank stops writing.
    """

    def __init__(self, folder: Path, *, content: str) -> None:
        self.folder, self.content = folder, content
        self.messages: list[str] = []

    def attempt(self, write: Callable[[], Any]) -> None:
        """Write something, unless this rank has already failed; an error is recorded."""
        if not self.messages:
            try:
                write()
            except WRITE_ERRORS as error:
                self.messages.append(f"rank {collectives.rank()}: {error}")

    def raise_on_all_ranks(self) -> None:
        """If any rank has failed, remove the folder and raise OSError on every rank. A collective."""
        messages = collectives.all_gather_lists(self.messages)
        if messages:
            if collectives.is_main():
                shutil.rmtree(self.folder, ignore_errors=True)
            collectives.barrier()
            raise OSError(f"{self.content} cannot be written: {'; '.join(messages[:3])}")

    @contextmanager
    def recorded_from(self, engine: deepspeed.DeepSpeedEngine) -> Iterator[None]:
        """Inside, errors of DeepSpeed's own writer are recorded too, so that this rank joins its collectives."""
        writer = engine.checkpoint_engine
        write = writer.save

        def save(state_dict: Any, path: str) -> None:
            if self.messages:
                return
            try:
                failpoint.reached("save_writing")
                _replace_enums(state_dict)
                write(state_dict, path)
                watchdog.progress()
                failpoint.reached("save_one_written")
            except WRITE_ERRORS as error:
                reason = str(error).splitlines()[0]
                self.messages.append(f"rank {collectives.rank()}: {Path(path).name}: {reason}")

        writer.save = save
        try:
            yield
        finally:
            del writer.save


def _replace_enums(state: Any) -> None:
    """Replace enums in a state dict by their values: some Python versions pickle them by way of `getattr`."""
    for name, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, Enum):
            state[name] = value.value
        elif isinstance(value, dict):
            _replace_enums(value)
