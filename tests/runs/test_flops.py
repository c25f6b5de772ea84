"""FLOPs of a model by hand arithmetic, and the peak FLOP/s of devices."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode

from dschat.runs.flops import ModelShape, forward_flops, model_shape, peak_flops, peak_flops_of

LLAMA = {
    "vocab_size": 50, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4,
}  # fmt: skip
# q 8·16, k and v 8·8 each, o 16·8, three products of the MLP 8·12 each
ATTENTION, MLP = 8 * 16 + 2 * 8 * 8 + 16 * 8, 3 * 8 * 12


def test_shape_of_a_llama_by_hand():
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))
    assert model_shape(model) == ModelShape(2 * (ATTENTION + MLP), 8 * 50, 2 * 4 * 4)


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_a_product_like_any_other(tied):
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, tie_word_embeddings=tied))
    assert model_shape(model).head_parameters == 8 * 50


def test_shape_of_a_classifier_has_the_head_of_one_output():
    model = hf.LlamaForSequenceClassification(hf.LlamaConfig(**LLAMA, num_labels=1, pad_token_id=0))
    assert model_shape(model) == ModelShape(2 * (ATTENTION + MLP), 8, 2 * 4 * 4)


def test_shape_of_gpt2_counts_its_transposed_layers():
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=50, n_embd=8, n_layer=3, n_head=2, n_positions=16))
    # qkv 8·24, output 8·8, MLP 8·32 twice
    assert model_shape(model) == ModelShape(3 * (8 * 24 + 8 * 8 + 2 * 8 * 32), 8 * 50, 3 * 8)


def test_a_token_uses_its_active_experts():
    config = hf.MixtralConfig(**LLAMA, num_local_experts=6, num_experts_per_tok=2)
    shape = model_shape(hf.MixtralForCausalLM(config))
    assert shape.layer_parameters == pytest.approx(2 * (ATTENTION + 2 * MLP))


def test_adapters_are_counted_besides_their_layers():
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))
    adapted = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj"])).base_model.model
    assert model_shape(adapted).layer_parameters == 2 * (ATTENTION + MLP + 3 * (8 + 16))


def test_forward_flops_by_hand():
    shape = ModelShape(layer_parameters=100, head_parameters=10, attention_width=8)
    # 2·100·7 linear, 2·10·7 head, and for queries that read 1..n keys about n²/2: 2·2·8·(9 + 16)/2
    assert forward_flops(shape, [3, 4]) == 1400 + 140 + 400
    assert forward_flops(shape, [3, 4], head_tokens=2) == 1400 + 40 + 400
    assert forward_flops(shape, []) == 0


def test_forward_flops_are_those_that_torch_counts():
    """torch counts full attention: twice the causal one."""
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, attn_implementation="eager"))
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(torch.zeros(3, 7, dtype=torch.long))
    shape = model_shape(model)
    above_the_diagonal = 2 * shape.attention_width * 3 * 7 * 7
    assert counted.get_total_flops() == forward_flops(shape, [7] * 3) + above_the_diagonal


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 156),
        ("NVIDIA A10", torch.float16, 125),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA L4", torch.bfloat16, 121),
        ("Tesla V100-SXM2-16GB", torch.float16, 125),
        ("Tesla V100-PCIE-16GB", torch.float16, 112),
        ("AMD Instinct MI300X", torch.bfloat16, 1307),
    ],
)
def test_peaks_of_gpus_by_the_names_that_drivers_report(name, dtype, tflops):
    assert peak_flops_of(name, dtype) == tflops * 1e12


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA GH200 480GB", torch.bfloat16),
        ("NVIDIA A1000", torch.bfloat16),
        ("Tesla T4", torch.bfloat16),
        ("NVIDIA A100-SXM4-80GB", torch.float64),
    ],
)
def test_unknown_gpus_and_unsupported_dtypes_have_no_peak(name, dtype):
    assert peak_flops_of(name, dtype) is None


def test_a_cpu_is_measured_once_for_a_dtype():
    measured = peak_flops(torch.device("cpu"), torch.float32)
    assert 1e8 < measured < 1e14
    assert peak_flops(torch.device("cpu"), torch.float32) == measured
    assert peak_flops(torch.device("meta"), torch.float32) is None
