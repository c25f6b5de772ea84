"""Shortens attention windows for trial runs, whose sequences would otherwise be shorter than the window."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

SHORT = 5
# Suffixes of the attribute names that hold windows in configs and layers.
WINDOWS = ("window", "window_size", "attention_chunk_size")


@contextmanager
def short_windows(model: PreTrainedModel) -> Iterator[bool]:
    """Inside, attention windows are shorter than a trial sequence, so that ignoring a window changes the logits.

    The window is stored in the config, from which masks are built, and often in the attention layers as well.

    Yields:
        Whether the model has any windows.
    """
    config = model.config.get_text_config()
    windows = {name: value for name, value in vars(config).items() if _is_window(name, value)}
    changed: list[tuple[object, str, int]] = []
    for place in (config, *model.modules()):
        for name, value in list(vars(place).items()):
            if _is_window(name, value) and value in windows.values():
                changed.append((place, name, value))
    try:
        for place, name, _ in changed:
            setattr(place, name, SHORT)
        yield bool(windows)
    finally:
        for place, name, value in changed:
            setattr(place, name, value)


def _is_window(name: str, value: object) -> bool:
    return name.endswith(WINDOWS) and isinstance(value, int) and not isinstance(value, bool) and value > 0
