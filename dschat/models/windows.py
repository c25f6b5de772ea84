"""Windows of attention that are longer than what a model is tried on: shortened for the trial."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

SHORT = 5
# How the names end under which configs and layers keep them.
WINDOWS = ("window", "window_size", "attention_chunk_size")


@contextmanager
def short_windows(model: PreTrainedModel) -> Iterator[bool]:
    """Inside, windows of attention are shorter than a trial, so that ignoring one shows in its logits.

    A window stands in the config, which masks are made from, and often in the attention layers as well.

    Yields:
        Whether the model has any.
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
