"""Loads tokenizers from a folder or the hub, with EOS and pad tokens and a chat template."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dschat.data.chat_template import ensure_chat_template
from dschat.models.custom_code import CustomCodeError, custom_code_refused
from dschat.models.folder_check import one_line

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
            f"{path} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}), which is needed to encode text: "
            "save the tokenizer into the folder with tokenizer.save_pretrained, or name a folder that has one."
        )
    try:
        with custom_code_refused(path):
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except CustomCodeError:
        raise
    except Exception as problem:  # the tokenizers package raises a plain Exception for a broken tokenizer.json
        reason = f"{one_line(problem)}{_conversion_hint(folder)}"
        raise ValueError(f"no tokenizer could be loaded from {path}: {reason}") from problem
    if add_eot_token:
        tokenizer.add_special_tokens({"eos_token": END_OF_TEXT})
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {path} has no eos_token, so responses could never end: "
            f'pass --add_eot_token (adds "{END_OF_TEXT}"), or set eos_token in its tokenizer_config.json.'
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("%s has no pad token, its EOS %r is used: masks mark the padding", path, tokenizer.pad_token)
    ensure_chat_template(tokenizer)
    return tokenizer


def id_limit(tokenizer: PreTrainedTokenizerBase) -> int:
    """The largest id of the tokenizer plus 1. It can be more than the number of tokens: some vocabularies have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def _conversion_hint(folder: Path) -> str:
    """Hint for a folder with only a SentencePiece model, which needs extra packages to load; else empty."""
    if any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "vocab.txt")):
        return ""
    models = [name for name in TOKENIZER_FILES if name.endswith(".model") and (folder / name).is_file()]
    return (
        f" {folder} has only {models[0]}: pip install sentencepiece protobuf tiktoken, or convert it where they are "
        "installed with AutoTokenizer.from_pretrained(folder).save_pretrained(folder), which adds a tokenizer.json."
        if models else ""
    )  # fmt: skip
