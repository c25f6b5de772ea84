"""Loads models and tokenizers from a folder or the hub: dropout, ZeRO-3 partitioning, resized embeddings."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config
from transformers.utils import logging as transformers_logging

from dschat.data.chat_template import ensure_chat_template
from dschat.distributed import watchdog
from dschat.models.folder_check import one_line
from dschat.models.weights import full_shape

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
WEIGHT_FILES = (  # of which transformers loads the first that is there
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip


class CustomCodeError(ValueError):
    """The model needs custom Python code, which the user has not allowed with --trust_remote_code."""


@contextlib.contextmanager
def custom_code_refused(path: str | Path) -> Iterator[None]:
    """Inside, transformers' refusal to run custom model code becomes a CustomCodeError that names the flag."""
    try:
        yield
    except ValueError as problem:
        if "trust_remote_code" not in str(problem):
            raise
        raise CustomCodeError(
            f"{path} brings Python code of its own (auto_map in its JSON files), which is not run: read it, and add "
            "--trust_remote_code if you trust whoever wrote it"
        ) from problem


def load_tokenizer(
    path: str | Path, *, add_eot_token: bool = False, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a tokenizer and ensure that it has EOS and pad tokens and a chat template.

    A missing pad token becomes the EOS token: masks are built from lengths, so the two may be equal. A tokenizer
    without a chat template gets the Human/Assistant one.

    Args:
        path: folder or hub name.
        add_eot_token: add "<|endoftext|>" and make it the EOS token, as DeepSpeed-Chat's flag did. The model then needs
            an embedding row for it: pass this tokenizer to `load_causal_lm`.
        trust_remote_code: run Python code that comes with the folder or hub repository.

    Raises:
        ValueError: no tokenizer files, no EOS token, or custom code that is not trusted.
    """
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(
            f"{path} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}), but text cannot be read without one: "
            "save the tokenizer into the folder with tokenizer.save_pretrained, or name a folder that has one."
        )
    try:
        with custom_code_refused(path):
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except CustomCodeError:
        raise
    except Exception as problem:  # the tokenizers package raises nothing narrower for a broken tokenizer.json
        reason = f"{one_line(problem)}{_conversion_hint(folder)}"
        raise ValueError(f"no tokenizer could be loaded from {path}: {reason}") from problem
    if add_eot_token:
        tokenizer.add_special_tokens({"eos_token": END_OF_TEXT})
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {path} has no eos_token, but a response that cannot end cannot be trained: "
            f'pass --add_eot_token (adds "{END_OF_TEXT}"), or set eos_token in its tokenizer_config.json.'
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("%s has no pad token, its EOS %r is used: padding is known by masks", path, tokenizer.pad_token)
    ensure_chat_template(tokenizer)
    return tokenizer


def _conversion_hint(folder: Path) -> str:
    """Hint for a folder with only a SentencePiece model, which needs extra packages to load; else empty."""
    if any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "vocab.txt")):
        return ""
    models = [name for name in TOKENIZER_FILES if name.endswith(".model") and (folder / name).is_file()]
    return (
        f" {folder} has {models[0]} alone: pip install sentencepiece protobuf tiktoken, or convert it where they are "
        "installed with AutoTokenizer.from_pretrained(folder).save_pretrained(folder), which adds a tokenizer.json."
        if models else ""
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
    except Exception as problem:  # of transformers' checks of each config: none has a type of its own
        raise ValueError(
            f"{path} is not a model that can be loaded: {one_line(problem)} "
            "Name a folder with config.json, weights and tokenizer, or a model of the Hugging Face hub."
        ) from problem


def load_pretrained(
    auto_class: type,
    path: str | Path,
    *,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dropout: float | None = None,
    gradient_checkpointing: bool = False,
    deepspeed_config: dict[str, Any] | None = None,
    new_head: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a model with transformers' auto class; the arguments are those of `load_causal_lm`.

    Args:
        auto_class: AutoModelForCausalLM or AutoModelForSequenceClassification (num_labels is set to 1).
        new_head: parameters outside the backbone may be missing from the weights.

    Raises:
        ValueError: no model or weights at the path, missing parameters, or invalid dropout.
    """
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).exists() for name in WEIGHT_FILES):
        raise ValueError(
            f"{path} has no weights (no {' or '.join(WEIGHT_FILES[::2])}), but training starts from a pretrained "
            "model: save one there with model.save_pretrained, also to start from random weights."
        )
    config = read_config(path, trust_remote_code=trust_remote_code)
    if auto_class.__name__ == "AutoModelForSequenceClassification":
        config.num_labels = 1
    if dropout is not None:
        set_dropout(config, dropout)
    watchdog.phase("model loading")
    with partitioned_loading(deepspeed_config), _counting_weights():
        try:
            with custom_code_refused(path):
                model, info = auto_class.from_pretrained(
                    path, config=config, dtype=dtype, output_loading_info=True, trust_remote_code=trust_remote_code
                )
        except (AttributeError, AssertionError, IndexError, KeyError, TypeError) as error:
            # Raised by transformers' code for this architecture, for example RWKV's under ZeRO-3.
            under = " under ZeRO stage 3" if is_zero3(deepspeed_config) else ""
            raise ValueError(
                f"{path}: transformers cannot load a {config.model_type} as {auto_class.__name__.removeprefix('Auto')}"
                f"{under} ({type(error).__name__}: {error}): choose another architecture"
                f"{' or a lower stage' if under else ''}."
            ) from error
        _require_weights(model, info["missing_keys"], path, new_head=new_head)
        if tokenizer is not None:
            grow_embeddings(model, tokenizer)
            heads = [model.get_output_embeddings()] if auto_class is AutoModelForCausalLM else []
            _require_rows(model, [model.get_input_embeddings(), *heads], tokenizer, path)
    # The row at padding_idx gets no gradient, but pad may equal EOS; masks already exclude padding from the loss.
    model.get_input_embeddings().padding_idx = None
    if gradient_checkpointing:
        # Renamed in transformers 5.23.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def _require_weights(model: PreTrainedModel, missing: set[str], path: str | Path, *, new_head: bool) -> None:
    backbone = f"{model.base_model_prefix}."
    lost = sorted(k for k in missing if not new_head or (k.startswith(backbone) and ".pooler." not in k))
    if lost:
        raise ValueError(
            f"the weights in {path} lack {len(lost)} parameters of {type(model).__name__} ({', '.join(lost[:3])}, …), "
            "which would be random: name a complete model of this kind."
        )


def set_dropout(config: PreTrainedConfig, dropout: float) -> None:
    """Set every dropout field of a config (attention_dropout, resid_pdrop, …) to one probability, in place.

    Raises:
        ValueError: not in [0, 1).
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"--dropout {dropout} is no probability in [0, 1): 0 switches dropout off, 0.1 is common.")
    found = False
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            is_probability = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_probability and ("dropout" in name or name.endswith("pdrop")):
                setattr(part, name, dropout)
                found = True
    if not found:
        logger.warning("--dropout %s has no effect: %s has no dropout", dropout, config.model_type)


def is_zero3(deepspeed_config: dict[str, Any] | None) -> bool:
    """True if this DeepSpeed config partitions parameters."""
    return bool(deepspeed_config) and deepspeed_config.get("zero_optimization", {}).get("stage") == 3


class _WeightsLoaded(tqdm):
    """A transformers progress bar that reports each step to the watchdog."""

    def update(self, n: float | None = 1) -> bool | None:
        watchdog.progress()
        return super().update(n)

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            watchdog.progress()
            yield item


@contextlib.contextmanager
def _counting_weights() -> Iterator[None]:
    """Inside, loading of weights by transformers counts as progress for the watchdog."""
    shown = transformers_logging.is_progress_bar_enabled()
    before = transformers_logging.set_tqdm_hook(
        lambda _, args, kwargs: _WeightsLoaded(*args, **kwargs | {"disable": not shown or kwargs.get("disable")})
    )
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


@contextlib.contextmanager
def partitioned_loading(deepspeed_config: dict[str, Any] | None) -> Iterator[None]:
    """Inside, `from_pretrained` partitions parameters as it creates them, if the config has ZeRO stage 3.

    transformers checks for a live HfDeepSpeedConfig; it is unset on exit, so that later models are not partitioned.
    """
    if not is_zero3(deepspeed_config):
        yield
        return
    alive = HfDeepSpeedConfig(copy.deepcopy(deepspeed_config))
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del alive


def grow_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add embedding rows for new tokens; models with spare rows keep them.

    transformers initialises new rows around the mean of the old ones. They are drawn from torch's initial seed, equal
    on all ranks, because ZeRO-3 keeps each rank's partition of its own copy.
    """
    rows = full_shape(model.get_input_embeddings().weight)[0]
    needed = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
    if needed <= rows:
        return
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(torch.initial_seed())
        model.resize_token_embeddings(needed)
    logger.info("%d embedding rows added for new tokens: %d in all", needed - rows, needed)


def _require_rows(
    model: PreTrainedModel, tables: list[torch.nn.Module], tokenizer: PreTrainedTokenizerBase, path: str | Path
) -> None:
    """Raise if the tokenizer has ids beyond the embedding rows, which would be a device error or go unnoticed."""
    largest = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1) - 1
    for table in tables:
        weight = getattr(table, "weight", None)
        if weight is not None and largest >= full_shape(weight)[0]:
            raise ValueError(
                f"{path}: the tokenizer has ids up to {largest}, but the {type(table).__name__} of a "
                f"{type(model).__name__} has {full_shape(weight)[0]} rows and does not grow: "
                "use the tokenizer that the model was trained with."
            )
