"""--kernels liger: liger-kernel's modules are kept only where they compute the same; a stand-in takes its place."""

import logging
import sys
import types

import pytest
import torch
from tiny_models import tiny_causal_lm
from torch import nn

import dschat.arguments.run
from dschat.arguments.run import DeviceArguments
from dschat.models.causal_lm import TokenLogprobs
from dschat.models.liger_kernels import use_liger_kernels

IDS = torch.arange(3, 15).view(2, 6)
MASK = torch.ones_like(IDS, dtype=torch.bool)


def install(monkeypatch, apply):
    """A module with liger-kernel's function that patches one model."""
    package, module = types.ModuleType("liger_kernel"), types.ModuleType("liger_kernel.transformers")
    module._apply_liger_kernel_to_instance = apply
    package.transformers = module
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)


def other_mlp(scale):
    """A patch of every MLP that also replaces the class, as liger-kernel does."""

    def forward(self, x):
        forward.calls += 1
        return scale * self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    def apply(model, *, rope, fused_linear_cross_entropy, swiglu, **_):
        assert not rope and not fused_linear_cross_entropy and swiglu
        sys.modules[type(model).__module__].LlamaMLP = nn.Identity
        for layer in model.model.layers:
            layer.mlp.__dict__["forward"] = types.MethodType(forward, layer.mlp)

    forward.calls = 0
    return apply, forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_compute_the_same_are_used(monkeypatch, caplog, dtype):
    apply, forward = other_mlp(1.0)
    install(monkeypatch, apply)
    network = TokenLogprobs(tiny_causal_lm("llama").to(dtype))
    expected, names = network(IDS, MASK, MASK), list(network.state_dict())
    use_liger_kernels(network)
    forward.calls = 0
    torch.testing.assert_close(network(IDS, MASK, MASK), expected)
    assert forward.calls == 2  # layers
    assert list(network.state_dict()) == names and not caplog.records
    assert sys.modules[type(network.model).__module__].LlamaMLP.__name__ == "LlamaMLP"


def test_kernels_that_compute_something_else_are_undone_with_a_warning(monkeypatch, caplog):
    apply, forward = other_mlp(1.01)
    install(monkeypatch, apply)
    network = TokenLogprobs(tiny_causal_lm("llama")).train()
    expected = network(IDS, MASK, MASK)
    with caplog.at_level(logging.WARNING, logger="dschat"):
        use_liger_kernels(network)
    assert forward.calls == 2
    assert torch.equal(network(IDS, MASK, MASK), expected) and network.training
    assert forward.calls == 2
    (record,) = caplog.records
    assert "LlamaForCausalLM runs torch's kernels, since hidden states would differ" in record.getMessage()


def test_a_model_that_the_library_does_not_know_is_named(monkeypatch, caplog):
    install(monkeypatch, lambda model, **_: None)
    with caplog.at_level(logging.WARNING, logger="dschat"):
        use_liger_kernels(TokenLogprobs(tiny_causal_lm("gpt2")))
    assert "liger-kernel has no kernels for GPT2LMHeadModel" in caplog.text


def test_the_flag_needs_cuda_and_names_the_package_to_install(monkeypatch):
    (problem,) = DeviceArguments(kernels="liger").problems()
    assert problem.startswith("--kernels liger: its kernels need a CUDA device, but this is cpu")
    monkeypatch.setattr(dschat.arguments.run, "find_spec", lambda name: None)
    (problem,) = dschat.arguments.run._liger_problems("cuda")
    assert "pip install liger-kernel" in problem
    monkeypatch.setattr(dschat.arguments.run, "find_spec", lambda name: object())
    assert dschat.arguments.run._liger_problems("cuda") == []
