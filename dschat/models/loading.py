"""Loads models from a folder or the hub: config, weights and their checks, dropout, ZeRO-3 partitioning."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config
from transformers.utils import logging as transformers_logging

from dschat.distributed import watchdog
from dschat.models.custom_code import CustomCodeError, custom_code_refused
from dschat.models.embedding_rows import grow_embeddings, require_embedding_rows
from dschat.models.folder_check import one_line
from dschat.models.forward_context import recompute_contexts
from dschat.models.loaded_weights import require_complete, require_finite

logger = logging.getLogger(__name__)

WEIGHT_FILES = (  # transformers loads the first that exists
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip


def read_config(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load the model's config.

    Raises:
        ValueError: no config, an architecture that transformers does not support, or custom code that is not trusted
            (CustomCodeError).
    """
    try:
        with custom_code_refused(path):
            return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except CustomCodeError:
        raise
    except Exception as problem:  # transformers' config checks raise many types
        raise ValueError(
            f"{path} is not a model that can be loaded: {one_line(problem)} "
            "Name a folder with config.json, weights and tokenizer, or a model of the Hugging Face hub."
        ) from problem


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded: the keywords of `load_causal_lm`, which explains them."""

    dtype: torch.dtype
    tokenizer: PreTrainedTokenizerBase | None = None
    dropout: float | None = None
    gradient_checkpointing: bool = False
    deepspeed_config: dict[str, Any] | None = None
    trust_remote_code: bool = False


def load_pretrained(
    auto_class: type, path: str | Path, options: LoadOptions, *, new_head: bool = False
) -> PreTrainedModel:
    """Load a model with transformers' auto class and check its weights.

    Args:
        auto_class: AutoModelForCausalLM or AutoModelForSequenceClassification (num_labels is set to 1).
        new_head: parameters outside the backbone may be missing from the weights.

    Raises:
        ValueError: no model or weights at the path, missing parameters, NaN or infinite ones, or invalid dropout.
    """
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).exists() for name in WEIGHT_FILES):
        raise ValueError(
            f"{path} has no weights (no {' or '.join(WEIGHT_FILES[::2])}), but training starts from a pretrained "
            "model: save one there with model.save_pretrained, also to start from random weights."
        )
    config = read_config(path, trust_remote_code=options.trust_remote_code)
    if auto_class.__name__ == "AutoModelForSequenceClassification":
        config.num_labels = 1
    if options.dropout is not None:
        set_dropout(config, options.dropout)
    watchdog.phase("model loading")
    with partitioned_loading(options.deepspeed_config), _watched_loading():
        model, missing = _from_pretrained(auto_class, path, config, options)
        record_untied_head(model)
        require_complete(model, missing, path, new_head=new_head)
        require_finite(model, path, untested=missing)
        if options.tokenizer is not None:
            grow_embeddings(model, options.tokenizer)
            heads = [model.get_output_embeddings()] if auto_class is AutoModelForCausalLM else []
            require_embedding_rows(model, [model.get_input_embeddings(), *heads], options.tokenizer, path)
    # The row at padding_idx gets no gradient, but pad may equal EOS; masks already exclude padding from the loss.
    model.get_input_embeddings().padding_idx = None
    if options.gradient_checkpointing:
        # Renamed in transformers 5.23.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False, "context_fn": recompute_contexts})
    return model


def _from_pretrained(
    auto_class: type, path: str | Path, config: PreTrainedConfig, options: LoadOptions
) -> tuple[PreTrainedModel, set[str]]:
    """The model and the names of the parameters missing from its files; transformers logs unused ones."""
    try:
        with custom_code_refused(path):
            model, info = auto_class.from_pretrained(
                path, config=config, dtype=options.dtype, output_loading_info=True,
                trust_remote_code=options.trust_remote_code,
            )  # fmt: skip
    except (AttributeError, AssertionError, IndexError, KeyError, TypeError) as error:
        # Raised by transformers' code for this architecture, for example RWKV's under ZeRO-3.
        under = " under ZeRO stage 3" if is_zero3(options.deepspeed_config) else ""
        raise ValueError(
            f"{path}: transformers cannot load a {config.model_type} as {auto_class.__name__.removeprefix('Auto')}"
            f"{under} ({type(error).__name__}: {error}): choose another architecture"
            f"{' or a lower stage' if under else ''}."
        ) from error
    return model, info["missing_keys"]


def record_untied_head(model: PreTrainedModel) -> None:
    """Set tie_word_embeddings to False if the head has weights of its own, in place.

    transformers does not tie a head whose weights are in the model's files and differ from the embedding's, whatever
    the config says, but a model built from that config, such as that of a rollout engine, would be tied.
    """
    head = getattr(model.get_output_embeddings(), "weight", None)
    if head is not None and head is not model.get_input_embeddings().weight:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def set_dropout(config: PreTrainedConfig, dropout: float) -> None:
    """Set every dropout field of a config (attention_dropout, resid_pdrop, …) to one probability, in place.

    Raises:
        ValueError: not in [0, 1).
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"--dropout {dropout} is not in [0, 1): 0 switches dropout off, 0.1 is common.")
    fields = _dropout_fields(config)
    for part, name in fields:
        setattr(part, name, dropout)
    if not fields:
        logger.warning("--dropout %s has no effect: %s has no dropout", dropout, config.model_type)


def may_drop(model: PreTrainedModel) -> bool:
    """True if any dropout probability of the model, or of its config, is above 0."""
    modules = (part.p for part in model.modules() if isinstance(part, torch.nn.Dropout))
    return any(p > 0 for p in modules) or any(getattr(*field) > 0 for field in _dropout_fields(model.config))


def _dropout_fields(config: PreTrainedConfig) -> list[tuple[PreTrainedConfig, str]]:
    """Config and name of each dropout probability."""
    return [
        (part, name)
        for part in {id(c): c for c in (config, config.get_text_config())}.values()
        for name, value in vars(part).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        if "dropout" in name or name.endswith("pdrop")
    ]


def is_zero3(deepspeed_config: dict[str, Any] | None) -> bool:
    """True if this DeepSpeed config partitions parameters."""
    return bool(deepspeed_config) and deepspeed_config.get("zero_optimization", {}).get("stage") == 3


class _WatchedProgressBar(tqdm):
    """A transformers progress bar that reports each step to the watchdog."""

    def update(self, n: float | None = 1) -> bool | None:
        watchdog.progress()
        return super().update(n)

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            watchdog.progress()
            yield item


@contextlib.contextmanager
def _watched_loading() -> Iterator[None]:
    """Report transformers' loading of weights to the watchdog as progress."""
    enabled = transformers_logging.is_progress_bar_enabled()
    previous = transformers_logging.set_tqdm_hook(
        lambda _, args, kwargs: _WatchedProgressBar(*args, **kwargs | {"disable": not enabled or kwargs.get("disable")})
    )
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


@contextlib.contextmanager
def partitioned_loading(deepspeed_config: dict[str, Any] | None) -> Iterator[None]:
    """Let `from_pretrained` partition parameters as it creates them, if the config has ZeRO stage 3.

    transformers checks for a live HfDeepSpeedConfig; it is unset on exit, so that later models are not partitioned.
    """
    if not is_zero3(deepspeed_config):
        yield
        return
    live_config = HfDeepSpeedConfig(copy.deepcopy(deepspeed_config))
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del live_config
