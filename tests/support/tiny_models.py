"""Tiny random models of many architectures, and a tokenizer for them: real classes, seeded weights, offline."""

from __future__ import annotations

import torch
import transformers as hf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

VOCABULARY, HIDDEN = 67, 16

_LLAMA_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large: at 0.02 logits are so small that a wrong scale or cap would go undetected.
    "initializer_range": 0.5,
}
_OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "ffn_dim": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": HIDDEN,
    "init_std": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "dropout": 0.0,
}
_NEOX = {k: v for k, v in _LLAMA_LIKE.items() if k not in ("num_key_value_heads", "head_dim")}

CONFIGS = {
    "llama": lambda: hf.LlamaConfig(**_LLAMA_LIKE),
    "llama-tied": lambda: hf.LlamaConfig(**_LLAMA_LIKE, tie_word_embeddings=True),
    "qwen2": lambda: hf.Qwen2Config(**_LLAMA_LIKE),
    "qwen3": lambda: hf.Qwen3Config(**_LLAMA_LIKE),
    "mistral": lambda: hf.MistralConfig(**_LLAMA_LIKE),
    "gemma": lambda: hf.GemmaConfig(**_LLAMA_LIKE),
    "gemma2": lambda: hf.Gemma2Config(**_LLAMA_LIKE, final_logit_softcapping=3.0, query_pre_attn_scalar=8),
    "cohere": lambda: hf.CohereConfig(**_LLAMA_LIKE, logit_scale=0.3),
    "granite": lambda: hf.GraniteConfig(**_LLAMA_LIKE, logits_scaling=3.0),
    "phi": lambda: hf.PhiConfig(**_NEOX),
    "gpt-neox": lambda: hf.GPTNeoXConfig(**_NEOX),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=2,
        n_head=2,
        n_positions=64,
        initializer_range=0.5,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=2,
    ),
    "opt": lambda: hf.OPTConfig(**_OPT),
    "opt-projected": lambda: hf.OPTConfig(**{**_OPT, "word_embed_proj_dim": 8, "do_layer_norm_before": False}),
}


def tiny_causal_lm(name: str, seed: int = 0) -> hf.PreTrainedModel:
    """A random causal LM in fp32, training mode; biases are random too, so that dropping one is detected."""
    return _build(hf.AutoModelForCausalLM, CONFIGS[name](), seed)


def tiny_classifier(name: str, seed: int = 0) -> hf.PreTrainedModel:
    """The same backbone with one output."""
    config = CONFIGS[name]()
    config.num_labels = 1
    return _build(hf.AutoModelForSequenceClassification, config, seed)


def _build(auto_class: type, config: hf.PreTrainedConfig, seed: int) -> hf.PreTrainedModel:
    torch.manual_seed(seed)
    model = auto_class.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
    return model.train()


def tiny_tokenizer(words: int = VOCABULARY) -> hf.PreTrainedTokenizerFast:
    """Word-level: <pad> <s> </s> <unk> w4 w5 …"""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>"])}
    vocabulary |= {f"w{i}": i for i in range(4, words)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def left_and_right_padded(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids [3, 10] and attention_mask: padded left by 4, right by 3, not at all; pad ids occur in the text too."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (3, 10), generator=generator)
    mask = torch.ones(3, 10, dtype=torch.bool)
    mask[0, :4] = False
    mask[1, 7:] = False
    return tokens, mask
