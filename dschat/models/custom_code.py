"""Python code that comes with a model: refused unless the user allows it with --trust_remote_code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


class CustomCodeError(ValueError):
    """The model needs custom Python code, which the user has not allowed with --trust_remote_code."""


@contextlib.contextmanager
def custom_code_refused(path: str | Path) -> Iterator[None]:
    """Turn transformers' refusal to run custom model code into a CustomCodeError that names the flag."""
    try:
        yield
    except ValueError as problem:
        if "trust_remote_code" not in str(problem):
            raise
        raise CustomCodeError(
            f"{path} has custom Python code (auto_map in its JSON files), which is not run: review it, and add "
            "--trust_remote_code if you trust its author"
        ) from problem
