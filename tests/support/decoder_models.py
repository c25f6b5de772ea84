"""Tiny models of several architectures to generate with."""

import torch
import transformers

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
ARCHITECTURES = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=8),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=6),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3, eos_token_id=None
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=97,
        hidden_size=32,
        ffn_dim=64,
        word_embed_proj_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        init_std=0.15,
        eos_token_id=None,
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**COMMON),
    "gemma": lambda: transformers.GemmaConfig(**GROUPED, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(**GROUPED, head_dim=8, sliding_window=6),  # in every other layer
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=97, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3, eos_token_id=None
    ),  # no position ids
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, initializer_range=0.3, eos_token_id=None
    ),  # no key-value cache
}


def tiny(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(ARCHITECTURES[name]()).eval()
