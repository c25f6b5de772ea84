"""Random models for the training benchmark, saved as folders that every contender loads."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from shapes import SHAPES
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from training_cases import FIRST_ID
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

PAD, BOS, EOS = range(FIRST_ID)
IMPOSSIBLE = -100.0  # logit
OFFSET = 1000.0  # of the constant coordinate; the norm of the others is below 50


def save_model(name: str, folder: Path, *, dtype: torch.dtype, seed: int, eos_probability: float | None) -> Path:
    """Save a random model of a shape with a tokenizer of one word per id; returns the folder.

    Args:
        eos_probability: chance of EOS at every token that the model samples; None: as the random weights give it.
    """
    config = SHAPES[name]()
    config.pad_token_id, config.bos_token_id, config.eos_token_id = PAD, BOS, EOS
    if eos_probability is not None:
        config.attention_bias = True
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    if eos_probability is not None:
        fix_eos_probability(model, eos_probability)
    model.to(dtype).save_pretrained(folder)
    tokenizer(config.vocab_size).save_pretrained(folder)
    return folder


@torch.no_grad()
def fix_eos_probability(model: PreTrainedModel, probability: float) -> None:
    """Make EOS equally probable after every prefix, with plain weights, so that any library samples it so.

    The architecture has no bias at the head, but a constant coordinate of the final hidden state is one: the output
    bias of the last attention layer adds OFFSET to coordinate 0, to which the last feed-forward layer adds nothing. It
    dominates the final RMSNorm, after which it is √H, and the column of the head that reads it is the bias. The other
    coordinates become small there, so all other tokens are about equally probable.
    """
    width, vocabulary = model.config.hidden_size, model.config.vocab_size
    last = model.model.layers[-1]
    last.self_attn.o_proj.bias[0] = OFFSET
    last.mlp.down_proj.weight[0] = 0.0
    head = model.get_output_embeddings().weight  # [V, H]; of a tied model the embedding too
    head[:, 0] = 0.0
    others = vocabulary - FIRST_ID
    logits = {PAD: IMPOSSIBLE, BOS: IMPOSSIBLE, EOS: IMPOSSIBLE}
    if probability:
        logits[EOS] = math.log(probability / (1 - probability) * others)
    for token, logit in logits.items():
        head[token] = 0.0
        head[token, 0] = logit / math.sqrt(width)


def has_attention_bias(config: PreTrainedConfig) -> bool:
    """Whether fix_eos_probability can be applied to models of this configuration."""
    return hasattr(config, "attention_bias") and hasattr(config, "mlp_bias")


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Word "w17" is id 17; it adds no special tokens, so that ids survive decoding and encoding."""
    special = {"<pad>": PAD, "<s>": BOS, "</s>": EOS}  # no prefix of a word, inside which it would be found
    backend = Tokenizer(WordLevel(special | {f"w{i}": i for i in range(FIRST_ID, vocabulary)}, unk_token="<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )
