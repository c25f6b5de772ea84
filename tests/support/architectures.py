"""Tiny random models of transformers' causal language models, built from the fields of their configs."""

from __future__ import annotations

import inspect

import torch
import transformers

VOCABULARY = 97
_PAIRS = ["sliding_attention", "full_attention"] * 2
# Each config gets those fields that it declares; windows are shorter than the tests' sequences, weights are large.
_FIELDS = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "ffn_hidden_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 128),
    **dict.fromkeys(("initializer_range", "init_std"), 0.15),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), None),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "attention_window_size", "window_size"), 6),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_d_state", "mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("ssm_state_size", "state_size", "mamba_chunk_size", "linear_key_head_dim", "index_topk"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "max_window_layers"), 2),
    **dict.fromkeys(("index_n_heads",), 2),
    **dict.fromkeys(("index_head_dim", "hidden_size_per_layer_input", "linear_value_head_dim"), 8),
    **dict.fromkeys(("time_step_rank", "linear_num_value_heads", "encoder_attention_heads"), 4),
    "num_kv_shared_layers": 0,
    "qk_head_dim": 16,
    "mamba_d_ssm": 64,
    "encoder_ffn_dim": 64,
}
_LATENT = {"num_key_value_heads": 4}
_PADDED = {"pad_token_id": 1}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_CONV = {"layer_types": ["conv", "full_attention"] * 2}
# Additional fields that a config needs, or that enable optional parts of a model.
_OWN = {
    "bart": {"pad_token_id": 0},
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 4},
    "cohere2": {"layer_types": _PAIRS},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "first_k_dense_replace": 1},
    "deepseek_v32": {**_LATENT, "index_topk": 64},
    "falcon": {"alibi": True},
    "gemma2": {"layer_types": _PAIRS},
    "gemma3_text": {"layer_types": _PAIRS},
    "gemma3n_text": {
        "layer_types": _PAIRS, "num_kv_shared_layers": 2, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {"layer_types": _PAIRS},
    "glm4_moe_lite": _LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gpt_oss": {"layer_types": _PAIRS},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "use_mamba_kernels": False, "mamba_dt_rank": 4,
    },
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"] * 2},
    "longcat_flash": {**_LATENT, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "expand": 2},
    "minicpm3": _LATENT,
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "modernbert-decoder": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mamba", "moe"]},
    "prophetnet": {
        "pad_token_id": 0, "num_decoder_layers": 2, "num_encoder_layers": 2, "num_decoder_attention_heads": 4,
        "num_encoder_attention_heads": 4,
    },
    "qwen3_next": _LINEAR,
    "roberta": _PADDED,
    "xlm": {"pad_token_id": 2, "causal": True},
    "xlm-roberta": _PADDED,
    "youtu": _LATENT,
    "zamba": {
        "num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"],
        "attn_layer_offset": 1, "attn_layer_period": 2, "n_mamba_heads": 2, "mamba_dt_rank": 4, "mamba_d_state": 8,
        "num_key_value_heads": 4, "attention_head_dim": 16,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 8, "num_mem_blocks": 1,
        "adapter_rank": 4, "chunk_size": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip


def tiny_config(kind: str, **changes: object) -> transformers.PreTrainedConfig:
    """A config of this model type; changes come last."""
    cls = transformers.CONFIG_MAPPING[kind]
    names: set[str] = set()
    for parent in cls.__mro__[:-1]:
        names |= set(getattr(parent, "__annotations__", {})) | set(inspect.signature(parent.__init__).parameters)
    names -= set(getattr(cls, "attribute_map", None) or {})
    fields = {name: value for name, value in _FIELDS.items() if name in names}
    return cls(**{**fields, **_OWN.get(kind, {}), **changes})


def tiny_architecture(kind: str, **changes: object) -> transformers.PreTrainedModel:
    """A random causal language model in eval mode; vectors are perturbed, so that norm weights are not all ones."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(kind, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def generate_each_alone(
    model: transformers.PreTrainedModel, prompts: list[list[int]], new_tokens: int
) -> list[list[int]]:
    """transformers' greedy tokens, one prompt at a time: nothing is padded, so nothing can depend on padding."""
    settings = {"do_sample": False, "max_new_tokens": new_tokens, "eos_token_id": None, "pad_token_id": 0}
    rows = (torch.tensor([prompt]) for prompt in prompts)
    return [
        model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :].tolist() for ids in rows
    ]
