"""Modules replaced by fused kernels, and the equality of their outputs."""

import pytest
import torch
import transformers
from test_generation import COMMON, GROUPED, tiny
from torch import nn

from dschat.generation.cpu.fused_modules import fused_forwards


def replaced(model: nn.Module) -> set[str]:
    return {type(module).__name__ for module in fused_forwards(model)}


def built(config) -> transformers.PreTrainedModel:
    torch.manual_seed(2)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_modules_are_recognised_by_what_they_compute():
    assert replaced(tiny("llama")) == {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention"}
    assert replaced(tiny("gemma")) == {"GemmaRMSNorm", "GemmaMLP", "GemmaAttention"}, "weight + 1, GELU's tanh form"
    assert replaced(tiny("gpt2")) == replaced(tiny("bloom")) == set()
    assert "Qwen3RMSNorm" in replaced(tiny("qwen3"))
    assert "LlamaMLP" not in replaced(built(transformers.LlamaConfig(**GROUPED, hidden_act="relu")))
    assert "LlamaMLP" not in replaced(built(transformers.LlamaConfig(**GROUPED, hidden_act="gelu"))), "erf is not tanh"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "gemma2", "mistral", "qwen2"])
def test_a_model_with_faster_forwards_gives_the_same_logits(name, dtype):
    model = tiny(name).to(dtype)
    ids = torch.randint(97, (3, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # norm weights of 1 and biases of 0 would hide errors
    with torch.inference_mode():
        expected = model(ids).logits
        faster = fused_forwards(model)
        for module, forward in faster.items():
            module.forward = forward
        actual = model(ids).logits
    assert faster and not torch.equal(actual, expected) or dtype == torch.float32
    if dtype == torch.float32:
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
    else:
        error = (actual.float() - expected.float()).norm() / expected.float().norm()
        assert error < 0.05


@pytest.mark.parametrize(
    "config",
    [
        transformers.CohereConfig(**GROUPED),  # rotates adjacent pairs, not halves
        transformers.GPTNeoXConfig(**COMMON),  # rotates a quarter of the head
        transformers.GlmConfig(**GROUPED, head_dim=8, partial_rotary_factor=0.5),
        transformers.LlamaConfig(**GROUPED, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    ],
    ids=lambda config: config.model_type,
)
def test_other_rotary_embeddings_give_the_same_logits(config):
    model = built(config)
    ids = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(ids).logits
        for module, forward in fused_forwards(model).items():
            module.forward = forward
        torch.testing.assert_close(model(ids).logits, expected, atol=2e-5, rtol=1e-4)


def test_finding_faster_forwards_changes_neither_random_state_nor_model():
    model = tiny("llama")
    before = torch.get_rng_state()
    fused_forwards(model)
    assert torch.equal(before, torch.get_rng_state())
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_epsilon_that_a_norm_uses_is_found_among_its_numbers():
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16))
            self.eps, self.other = 1e-2, 1e-6

        def forward(self, x):
            return nn.functional.rms_norm(x, (16,), self.weight, self.eps)

    class Model(nn.Module):
        device, dtype = torch.device("cpu"), torch.float32

        def __init__(self) -> None:
            super().__init__()
            self.norm = Norm()

    model = Model()
    forward = fused_forwards(model)[model.norm]
    x = 0.01 * torch.randn(5, 3, 16)
    with torch.inference_mode():
        torch.testing.assert_close(forward(x), model.norm(x))
