"""Modules replaced by fused kernels, and the equality of their outputs and gradients."""

import pytest
import torch
import transformers
from decoder_models import COMMON, GROUPED, tiny
from peft import LoraConfig, get_peft_model
from torch import nn

from dschat.models.cpu import fused_modules
from dschat.models.cpu.fused_modules import fused_forwards, replaced_forwards


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
        with replaced_forwards(faster):
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
        with replaced_forwards(fused_forwards(model)):
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


def loss_and_gradients(model) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    ids = torch.randint(97, (3, 17), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "gemma2"])
def test_gradients_are_those_of_the_model(name, adapters):
    """Adapters are added after the trials, as when a model is loaded for training."""
    model = tiny(name)
    forwards = fused_forwards(model)
    if adapters:
        targets = ["gate_proj", "up_proj", "down_proj", "q_proj"]
        config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        model = get_peft_model(model, config)
    expected, gradients = loss_and_gradients(model)
    with replaced_forwards(forwards):
        actual, others = loss_and_gradients(model)
    assert actual == pytest.approx(expected, rel=1e-6) and others.keys() == gradients.keys()
    assert any(adapters == ("lora" in name) for name in gradients)
    for parameter, gradient in gradients.items():
        assert (others[parameter] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-8, parameter


def test_a_forward_that_was_replaced_before_is_restored():
    model = tiny("llama")
    forwards = fused_forwards(model)

    def patched(x):
        return x

    model.model.norm.forward = patched
    with pytest.raises(KeyError), replaced_forwards(forwards):
        assert model.model.norm.forward is forwards[model.model.norm]
        raise KeyError
    assert model.model.norm.forward is patched
    assert not any("forward" in vars(module) for module in model.modules() if module is not model.model.norm)


def test_modules_of_one_kind_share_a_trial(monkeypatch):
    trials = []
    for name in ("_find_norm", "_find_gated_layer"):
        trial = getattr(fused_modules, name)
        monkeypatch.setattr(fused_modules, name, lambda *args, t=trial: trials.append(type(args[0])) or t(*args))
    model = tiny("llama")
    model.model.layers[1].post_attention_layernorm.variance_epsilon *= 2
    fused_forwards(model)
    assert sorted(kind.__name__ for kind in trials) == ["LlamaMLP", "LlamaRMSNorm", "LlamaRMSNorm"]
