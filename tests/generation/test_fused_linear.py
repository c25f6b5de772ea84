"""Linear layers with a common input, computed as one matrix product."""

import pytest
import torch
from decoder_models import tiny
from torch import nn

from dschat.generation import HybridEngine, SamplingParams
from dschat.generation.cpu import cpp_kernels
from dschat.generation.cpu.fused_linear import FusedLinears, bf16_kernels, layers_by_input

LIBRARY = cpp_kernels.load()
pytestmark = pytest.mark.skipif(
    LIBRARY is None or not LIBRARY.multiplies_bf16, reason="this processor does not multiply bfloat16"
)


def names_of(model: nn.Module, groups: list[list[nn.Linear]]) -> list[list[str]]:
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
    return [[names[layer] for layer in group] for group in groups]


def test_a_traced_forward_finds_the_layers_that_share_an_input():
    model = tiny("llama")
    layer = [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    assert names_of(model, layers_by_input(model)) == [*layer, *layer, ["lm_head"]]
    opt = tiny("opt")
    assert ["fc1"] in names_of(opt, layers_by_input(opt))
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("bias", [False, True])
def test_fused_outputs_equal_the_layers_and_are_recomputed_for_every_input(bias):
    torch.manual_seed(0)
    layers = [nn.Linear(32, size, bias=bias).bfloat16() for size in (48, 16, 8)]
    with torch.inference_mode():
        first, second = torch.randn(5, 1, 32).bfloat16(), torch.randn(7, 1, 32).bfloat16()
        expected = [[layer(x) for layer in layers] for x in (first, second)]
        fused = FusedLinears(layers, LIBRARY)
        fused.pack_weights()
        for x, expected_outputs in ((first, expected[0]), (second, expected[1]), (first, expected[0])):
            for layer, output in zip(layers, expected_outputs, strict=True):
                torch.testing.assert_close(layer(x), output, atol=0.02, rtol=0.02)
        third = first.clone()
        layers[0](third)
        third.neg_()  # changed after its outputs were computed: one that was returned is computed again
        torch.testing.assert_close(
            layers[0](third), -expected[0][0] + 2 * (layers[0].bias if bias else 0), atol=0.02, rtol=0.02
        )
        fused.release()
    assert all("forward" not in vars(layer) for layer in layers)


def test_fused_rollouts_equal_plain_ones_and_leave_the_model_unchanged():
    model = tiny("qwen2").bfloat16()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert bf16_kernels(model) and not bf16_kernels(tiny("llama"))
    settings = {"max_new_tokens": 12, "eos_token_ids": None, "pad_token_id": 0, "sampling": SamplingParams()}
    prompts = [[5, 6, 7], [9], [3, 4, 8, 8, 1]]
    rollouts = []
    for without in ((), ("fusion",)):
        actor = HybridEngine(model, without=without)
        for _ in range(2):
            with actor.generation():
                assert any(fused.packed is not None for fused in actor._decoder._fused) == (not without)
                rollouts.append(actor.generate(prompts, **settings))
            assert all(fused.packed is None for fused in actor._decoder._fused)
    fused, again, plain, _ = rollouts
    assert torch.equal(fused.sequences, again.sequences)
    same = (fused.sequences == plain.sequences)[:, fused.prompt_length :].cumprod(dim=1).bool()
    assert same.float().mean() > 0.5  # bf16: once a token differs, the rows diverge
    difference = (fused.logprobs - plain.logprobs)[same].abs()
    assert difference.mean() < 0.02
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("pinned", [False, True])
def test_changed_weights_are_packed_again(pinned):
    model = tiny("llama").bfloat16()
    actor = HybridEngine(model, pin_buffers=pinned)
    settings = {"max_new_tokens": 6, "eos_token_ids": None, "pad_token_id": 0, "sampling": SamplingParams(0)}
    with actor.generation():
        actor.generate([[5, 6, 7]], **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    with actor.generation():
        actual = actor.generate([[5, 6, 7]], **settings)
    fresh = HybridEngine(model)
    with fresh.generation():
        assert fresh.generate([[5, 6, 7]], **settings).responses() == actual.responses()
