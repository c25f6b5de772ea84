"""Shortens attention windows and blocks for trial runs, whose sequences would otherwise be shorter than these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

SHORT_WINDOW = 5
# Suffixes of the attribute names that hold windows in configs and layers.
WINDOWS = ("window", "window_size", "attention_chunk_size", "index_block_size")
# In layers also block_size, which in many configs is unrelated to attention.
LAYER_WINDOWS = (*WINDOWS, "block_size")


@contextmanager
def short_windows(model: PreTrainedModel) -> Iterator[bool]:
    """Make attention windows shorter than a trial sequence, so that ignoring a window changes the logits.

    The window is stored in the config, from which masks are built, and often in the attention layers as well.

    Yields:
        Whether the model has any windows.
    """
    config = model.config.get_text_config()
    windows = {name: value for name, value in vars(config).items() if _is_window(name, value, WINDOWS)}
    changed = [(config, name, value) for name, value in windows.items()]
    for layer in model.modules():
        for name, value in vars(layer).items():
            if _is_window(name, value, LAYER_WINDOWS) and value in windows.values():
                changed.append((layer, name, value))
    try:
        for owner, name, _ in changed:
            setattr(owner, name, SHORT_WINDOW)
        yield bool(windows)
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


def _is_window(name: str, value: object, suffixes: tuple[str, ...]) -> bool:
    return name.endswith(suffixes) and isinstance(value, int) and not isinstance(value, bool) and value > 0
