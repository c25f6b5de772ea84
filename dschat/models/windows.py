"""Windows of attention that are longer than what a model is tried on: shortened for the trial."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

SHORT = 5
# The most tokens that a sparse attention chooses for a query.
CHOICES = ("index_topk",)
WINDOWS = ("window", "window_size", "attention_chunk_size", *CHOICES)


@contextmanager
def short_windows(model: PreTrainedModel, *, kinds: tuple[str, ...] = WINDOWS) -> Iterator[bool]:
    """Inside, windows of attention are shorter than a trial, so that ignoring one shows in its logits.

    A window stands in the config, which masks are made from, and often in the attention layers as well.

    Args:
        model: changed for the length of the context.
        kinds: how the names of what is shortened end.

    Yields:
        Whether the model has any.
    """
    config = model.config.get_text_config()
    windows = {name: value for name, value in vars(config).items() if _is_window(name, value, kinds)}
    changed: list[tuple[object, str, int]] = []
    for place in (config, *model.modules()):
        for name, value in list(vars(place).items()):
            if _is_window(name, value, kinds) and value in windows.values():
                changed.append((place, name, value))
    try:
        for place, name, _ in changed:
            setattr(place, name, SHORT)
        yield bool(windows)
    finally:
        for place, name, value in changed:
            setattr(place, name, value)


def _is_window(name: str, value: object, kinds: tuple[str, ...]) -> bool:
    return name.endswith(kinds) and isinstance(value, int) and not isinstance(value, bool) and value > 0
