"""Compiled layers: the same numbers, one compilation for all batch sizes, and uncompiled where that is not possible."""

import logging

import pytest
import torch
import transformers as hf
from tiny_models import HIDDEN, VOCABULARY, tiny_causal_lm
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from dschat.models import compiled_layers
from dschat.models.causal_lm import TokenLogprobs
from dschat.models.forward_context import recompute_contexts
from dschat.models.lora import add_lora, without_adapters
from dschat.models.packed.trial import enable_packing


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def network_of(model, *, remove_padding=True, checkpointing=False):
    network = TokenLogprobs(model)
    enable_packing(network, remove_padding=remove_padding, share_prompts=True)
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False, "context_fn": recompute_contexts})
    return network.train()


def batch(lengths, seed=0):
    """input_ids, attention_mask, loss_mask [B, S] of rows of these lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return ids, mask, mask & (torch.arange(max(lengths)) > 1)


def step(network, rows):
    """Log-probs, loss and gradients of one training step."""
    network.zero_grad(set_to_none=True)
    logprobs = network(*rows)
    loss = -logprobs.sum() / int(rows[2].sum())
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    return logprobs.detach(), loss.detach(), gradients


def distance(gradients, exact) -> float:
    """Mean over the parameters of the relative distance."""
    return sum(float((gradients[name] - g).norm() / g.norm()) for name, g in exact.items()) / len(exact)


def require_same_steps(network, batches, *, backend, tolerance=1e-5):
    """Train on each batch plainly and compiled. Returns the graphs compiled up to each batch."""
    plain = [step(network, rows) for rows in batches]
    names = list(network.state_dict())
    counter = CompileCounterWithBackend(backend)
    network.backbone.compile_layers(backend=counter)
    graphs = []
    for rows, (logprobs, loss, gradients) in zip(batches, plain, strict=True):
        compiled_logprobs, compiled_loss, compiled_gradients = step(network, rows)
        graphs.append(counter.frame_count)
        torch.testing.assert_close(compiled_logprobs, logprobs, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(compiled_loss, loss, rtol=tolerance, atol=0)
        assert compiled_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            error = (compiled_gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-4)
            assert error <= tolerance, name
    assert network.backbone.compiled.is_on and graphs[0] > 0
    assert list(network.state_dict()) == names
    return graphs


SIZES = [(5, 9, 4), (12, 7), (3, 3, 3, 11, 6), (30,), (5, 4)]


@pytest.mark.parametrize(
    "name",
    ["gpt2", pytest.param("qwen2", marks=pytest.mark.slow), pytest.param("qwen3", marks=pytest.mark.slow), "gemma2"],
)
def test_compiled_training_is_equal_and_compiles_once_for_all_sizes(name):
    graphs = require_same_steps(network_of(tiny_causal_lm(name)), [batch(s) for s in SIZES], backend="aot_eager")
    assert len(set(graphs)) == 1


@pytest.mark.slow
def test_generated_kernels_of_a_llama_are_equal():
    network = network_of(tiny_causal_lm("llama"))
    graphs = require_same_steps(network, [batch(s) for s in SIZES[:3]], backend="inductor")
    assert len(set(graphs)) == 1


@pytest.mark.slow
def test_generated_kernels_in_bf16_are_as_close_to_float32_as_the_plain_ones():
    """They round less often, so they are not equal to the plain ones."""
    model = tiny_causal_lm("llama")
    rows = batch((5, 9, 4, 30, 17))
    exact, _, exact_gradients = step(network_of(model), rows)
    network = network_of(model.to(torch.bfloat16))
    plain, _, plain_gradients = step(network, rows)
    network.backbone.compile_layers()
    compiled, _, gradients = step(network, rows)
    assert network.backbone.compiled.is_on and not compiled.equal(plain)
    assert (compiled - exact).norm() <= 1.2 * (plain - exact).norm()
    assert distance(gradients, exact_gradients) <= 1.2 * distance(plain_gradients, exact_gradients)


def test_recomputed_layers_are_compiled_too():
    network = network_of(tiny_causal_lm("llama"), checkpointing=True)
    assert network.model.model.layers[0].gradient_checkpointing
    graphs = require_same_steps(network, [batch(s) for s in SIZES], backend="aot_eager")
    assert len(set(graphs)) == 1


def test_padded_rows_compile_once_for_all_sizes():
    network = network_of(tiny_causal_lm("llama"), remove_padding=False)
    graphs = require_same_steps(network, [batch((5, 9, 4)), batch((12, 7)), batch((3, 6, 8, 4))], backend="aot_eager")
    assert graphs[1] == graphs[2]


def test_adapters_on_and_off_in_training_and_scoring_compile_once_each():
    torch.manual_seed(0)
    network = network_of(tiny_causal_lm("llama"))
    add_lora(network, dim=2, module_name="all", only_optimize_lora=True)
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    rows = [batch(sizes) for sizes in SIZES[:2]]
    with torch.no_grad(), without_adapters(network):
        expected = [network(*r) for r in rows]
    assert len(set(require_same_steps(network, rows, backend="aot_eager"))) == 1
    counter = network.backbone.compiled._backend
    graphs = []
    with torch.no_grad(), without_adapters(network):
        for r, logprobs in zip(rows, expected, strict=True):
            torch.testing.assert_close(network(*r), logprobs, rtol=1e-5, atol=1e-5)
            graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1


def test_outside_of_its_backbone_the_model_runs_uncompiled():
    network = network_of(tiny_causal_lm("llama"))
    counter = CompileCounterWithBackend("eager")
    network.backbone.compile_layers(backend=counter)
    ids = torch.arange(8)[None]
    network.model(input_ids=ids)
    network.model.generate(ids, max_new_tokens=2, do_sample=False)
    assert counter.frame_count == 0
    assert not any("forward" in module.__dict__ for module in network.modules())
    network(*batch((5, 9)))
    assert counter.frame_count > 0
    assert not any("forward" in module.__dict__ for module in network.modules())


def require_uncompiled(network, caplog, *reasons):
    """A step gives the plain numbers, and the log has one warning with these words; returns after a second step."""
    rows = batch((5, 9, 4))
    compiled, network.backbone.compiled = network.backbone.compiled, None
    expected, loss, _ = step(network, rows)
    network.backbone.compiled = compiled
    with caplog.at_level(logging.WARNING, logger="dschat"):
        for _ in range(2):
            logprobs, compiled_loss, _ = step(network, rows)
            torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(compiled_loss, loss)
    assert not compiled.is_on
    (record,) = [r for r in caplog.records if "--compile" in r.getMessage()]
    assert all(reason in record.getMessage() for reason in ("runs uncompiled", *reasons))


def test_without_a_compiler_the_run_goes_on_with_a_warning(monkeypatch, caplog):
    network = network_of(tiny_causal_lm("llama"))
    network.backbone.compile_layers()
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    require_uncompiled(network, caplog, "LlamaForCausalLM", "No working C++ compiler")


def test_layers_that_cannot_be_traced_run_uncompiled_with_the_reason(monkeypatch, caplog):
    def untraceable(self, x):
        torch._dynamo.graph_break("a break in every layer")
        return nn.functional.silu(x)

    monkeypatch.setattr(hf.activations.SiLUActivation, "forward", untraceable)
    network = network_of(tiny_causal_lm("llama"))
    network.backbone.compile_layers(backend="eager")
    require_uncompiled(network, caplog, "LlamaForCausalLM", "graph_break")


def test_a_function_with_too_many_variants_runs_uncompiled_with_the_reason(monkeypatch, caplog):
    """Widths differ by layer, so each layer is a variant of its own; two are allowed."""
    monkeypatch.setitem(compiled_layers._SETTINGS, "recompile_limit", 2)
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2
    )
    model = hf.LlamaForCausalLM(config)
    for width, layer in enumerate(model.model.layers, start=9):
        layer.mlp.gate_proj, layer.mlp.up_proj = (nn.Linear(HIDDEN, width, bias=False) for _ in range(2))
        layer.mlp.down_proj = nn.Linear(width, HIDDEN, bias=False)
    network = network_of(model)
    network.backbone.compile_layers(backend="eager")
    require_uncompiled(network, caplog, "more than 2 variants")


def test_partitioned_parameters_are_not_compiled(caplog):
    network = network_of(tiny_causal_lm("llama"))
    network.model.model.norm.weight.ds_id = 0  # as ZeRO-3 marks them
    network.backbone.compile_layers(backend="eager")
    require_uncompiled(network, caplog, "ZeRO-3")
