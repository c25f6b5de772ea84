"""Rollouts of many architectures: equal to transformers' greedy generate of each prompt alone, or rejected."""

import warnings

import pytest
import torch
from architectures import generate_each_alone, tiny_architecture

from dschat.generation import Decoder, HybridEngine, SamplingParams
from dschat.models.causal_lm import TokenLogprobs, verify_head
from dschat.models.cpu.fused_modules import Rotary, SingleInputForward, fused_forwards
from dschat.models.windows import short_windows

PROMPTS = [[5, 6, 7], [9, 4], [3, 4, 8, 8, 10, 12, 20, 9, 9], [5, 6, 7], [30]]
GREEDY = {"max_new_tokens": 10, "eos_token_ids": None, "pad_token_id": 0, "sampling": SamplingParams(0)}
pytestmark = pytest.mark.filterwarnings("ignore:.*decoded without the KV pool")


def rollout(model, *, prompts=PROMPTS, **options):
    actor = HybridEngine(model, **options)
    with actor.generation():
        return actor.generate(prompts, **GREEDY)


def assert_equals_generate(model) -> None:
    expected = generate_each_alone(model, PROMPTS, GREEDY["max_new_tokens"])
    assert len({token for row in expected for token in row}) > 2, "a model that repeats one token proves nothing"
    result = rollout(model)
    assert result.responses() == expected
    loss_mask = result.attention_mask.clone()
    loss_mask[:, : result.prompt_length] = False
    with torch.no_grad():
        full = TokenLogprobs(model)(result.sequences, result.attention_mask, loss_mask)[:, result.prompt_length :]
    torch.testing.assert_close(result.logprobs, full, atol=1e-5, rtol=1e-4)


# Their norms take gates; their rotations take one tensor, complex numbers or positions.
CALLED_OTHERWISE = [
    "gemma3n_text", "gemma4_text", "gptj", "codegen", "mamba2", "bamba", "nemotron_h", "falcon_h1", "granitemoehybrid",
]  # fmt: skip


@pytest.mark.parametrize("kind", CALLED_OTHERWISE)
def test_modules_called_with_other_arguments_than_in_the_trial_run_their_own_code(kind):
    assert_equals_generate(tiny_architecture(kind))


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "mamba2", "nemotron_h", "bamba"])
def test_float32_residuals_with_bfloat16_weights_are_decoded_as_without_fusion(kind):
    model = tiny_architecture(kind)
    fused, plain = (
        rollout(model, prompts=PROMPTS[:2], dtype=torch.bfloat16, without=without)
        for without in ((), ["fusion", "kernels", "graphs"])
    )
    torch.testing.assert_close(fused.logprobs[:, 0], plain.logprobs[:, 0], atol=0.05, rtol=0)


def test_a_kernel_runs_only_for_calls_that_the_trial_covered():
    calls = []
    forward = SingleInputForward(
        lambda *args, **kwargs: calls.append((args, kwargs)), lambda x: "kernel", width=4, dtype=torch.float32
    )
    x = torch.ones(2, 4)
    assert forward(x) == "kernel"
    others = [
        ((x, x), {}),
        ((x,), {"gate": x}),
        ((), {"x": x}),
        ((x.double(),), {}),
        ((x[:, :3],), {}),
        ((x[:0],), {}),
        ((None,), {}),
    ]
    for args, kwargs in others:
        assert forward(*args, **kwargs) is None
    assert len(calls) == len(others)


@pytest.mark.parametrize("name", ["q, k and v", "one tensor", "complex", "by name", "two widths"])
def test_rotations_of_any_signature_reach_the_models_own_function(name):
    q, k, angles = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(2, 5, 8)
    arguments = {
        "q, k and v": ((q, k, q, angles, angles), {}), "one tensor": ((q, angles, angles), {}),
        "complex": ((q, k, torch.polar(angles, angles), None), {}), "by name": ((q, k), {"cos": angles, "sin": angles}),
        "two widths": ((q, k[..., :4], angles, angles), {}),
    }  # fmt: skip
    args, kwargs = arguments[name]
    calls = []
    rotary = Rotary(lambda *args, **kwargs: calls.append((args, kwargs)), kernels=None)
    rotary(*args, **kwargs)
    assert (
        len(calls) == 1
        and calls[0][0] is not None
        and calls[0][1].keys() == kwargs.keys()
        and len(calls[0][0]) == len(args)
    )


def test_kernels_are_not_selected_by_trials_with_zero_weights():
    """Weights that are zero at the start change in training, but a selection made with them would be kept."""
    model = tiny_architecture("llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "down_proj.weight")):
                parameter.zero_()
    forwards = fused_forwards(model)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.normal_()
    norm = model.model.norm
    x = torch.randn(3, 32)
    with torch.inference_mode():
        torch.testing.assert_close(forwards[norm](x), norm(x))
    assert not any(type(module).__name__ == "LlamaMLP" for module in forwards)


# Model type → the reason in the error message.
REFUSED = {
    "bert": "changes its logits|later tokens",
    "roberta": "later tokens",
    "xlnet": "later tokens",
    "rembert": "cannot be run as a causal language model",
    "modernbert-decoder": "changes its logits",
    "whisper": "left-padded",
    "bart": "left-padded",
    "rwkv": "left-padded",
    "recurrent_gemma": "left-padded",
    "deepseek_v4": "left-padded",
    "minimax_m3_vl_text": "left-padded",  # blocks of keys begin at the first column, padding or not
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_attend_to_later_tokens_or_padding_are_refused_with_the_reason(kind, dtype):
    model = tiny_architecture(kind).to(dtype).train()
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=f"{type(model).__name__}.*({REFUSED[kind]})"):
        verify_head(model)
    assert model.training and all(torch.equal(weights[name], p) for name, p in model.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    "kind", ["mamba", "jamba", "dbrx", "qwen3_next", "gemma3n_text", "llama4_text", "falcon", "mpt"]
)
def test_other_architectures_pass_verification_in_any_precision(kind):
    for dtype in (torch.float32, torch.bfloat16):
        verify_head(tiny_architecture(kind).to(dtype))


def test_a_decoder_that_ignores_the_mask_is_refused_although_unpadded_rows_are_correct():
    """A single unpadded row would not reveal that the model ignores masks."""
    model = tiny_architecture("llama")
    body, original = model.model, model.model.forward
    body.forward = lambda *args, attention_mask=None, **kwargs: original(*args, **kwargs)
    with pytest.raises(ValueError, match="left-padded row"):
        verify_head(model)


# Layers that use weights of submodules without calling these, or that have weights of their own.
BY_LAYERS = ["jamba", "mamba", "bamba", "falcon_h1", "lfm2", "qwen3_next", "dbrx", "jetmoe", "gemma3n_text", "zamba2"]


@pytest.mark.parametrize("kind", BY_LAYERS)
def test_layerwise_weights_give_the_logprobs_of_whole_weights(kind):
    model = tiny_architecture(kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*one layer's weights")
        result = rollout(model, prompts=PROMPTS[:2], dtype=torch.bfloat16, layerwise=True)
    whole = rollout(model, prompts=PROMPTS[:2], dtype=torch.bfloat16, without=["fusion", "kernels", "graphs"])
    assert result.logprobs.isfinite().all()
    torch.testing.assert_close(result.logprobs[:, 0], whole.logprobs[:, 0], atol=0.05, rtol=0)


def test_a_model_that_reads_weights_outside_its_layers_is_gathered_whole_with_a_warning(monkeypatch):
    model = tiny_architecture("llama")
    expected = rollout(model, dtype=torch.bfloat16)
    body = type(model.model)
    original = body.forward

    def forward(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        out.last_hidden_state = out.last_hidden_state + 0 * self.layers[1].mlp.up_proj.weight.sum()
        return out

    monkeypatch.setattr(body, "forward", forward)
    actor = HybridEngine(model, dtype=torch.bfloat16, layerwise=True)
    warns = pytest.warns(UserWarning, match="LlamaForCausalLM does not run with one layer's weights.*gathered at once")
    with warns, actor.generation():
        result = actor.generate(PROMPTS, **GREEDY)
    assert result.responses() == expected.responses()
    with warnings.catch_warnings(), actor.generation():
        warnings.simplefilter("error")
        assert actor.generate(PROMPTS, **GREEDY).responses() == expected.responses()


# ALiBi, rotation of pairs, sinks, latent attention, chunks, windows in masks alone, other attention of the model.
GATHERED = [
    "bloom", "falcon", "mpt", "gptj", "codegen", "gpt_neo", "gpt_oss", "deepseek_v2", "deepseek_v3", "minicpm3",
    "llama4_text", "phimoe", "diffllama", "doge", "jetmoe", "longcat_flash", "xglm",
]  # fmt: skip


@pytest.mark.parametrize("kind", GATHERED)
def test_models_with_their_own_attention_are_decoded_over_the_pool(kind):
    model = tiny_architecture(kind)
    assert_equals_generate(model)
    decoder = Decoder(model, slots=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no plain loop
        rows = decoder.generate(PROMPTS, **GREEDY).responses()
    assert rows == generate_each_alone(model, PROMPTS, GREEDY["max_new_tokens"])
    assert decoder._pooled.gathers_contexts
    assert decoder.prefilled_tokens < sum(map(len, PROMPTS)), "a repeated prompt is prefilled once"


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3n_text", "olmo3"])
def test_models_that_pass_their_window_to_attention_are_decoded_by_the_kernels(kind):
    model = tiny_architecture(kind)
    assert_equals_generate(model)
    decoder = Decoder(model)
    assert decoder._check_pool() and not decoder._pooled.gathers_contexts


def test_windows_are_restored_after_a_trial():
    model = tiny_architecture("mistral", sliding_window=40)
    with short_windows(model) as has_windows:
        assert has_windows and model.config.sliding_window < 12
        assert {
            layer.self_attn.sliding_window for layer in model.model.layers if hasattr(layer.self_attn, "sliding_window")
        } <= {model.config.sliding_window}
    assert model.config.sliding_window == 40


def test_a_window_that_is_only_in_the_mask_is_detected_though_longer_than_the_trial():
    """The window begins to matter at the 40th token, the trial has 12."""
    model = tiny_architecture("phimoe", sliding_window=40)
    expected = generate_each_alone(model, PROMPTS[:3], 60)
    settings = {**GREEDY, "max_new_tokens": 60}
    assert Decoder(model).generate(PROMPTS[:3], **settings).responses() == expected


def test_moshi_is_decoded_as_its_full_forward_computes_it():
    """transformers' cache of Moshi drops the tokens before the window, which the full forward attends to."""
    model = tiny_architecture("moshi")
    model.generation_config.use_cache = False
    assert_equals_generate(model)


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("qwen3_next", "layers of linear_attention, whose state.*rows start only when the whole batch has ended"),
        ("mamba", "every token recomputes the whole row"),
        ("minimax", "cache of its own"),
    ],
)
@pytest.mark.filterwarnings("default:.*decoded without the KV pool")
def test_models_that_the_pool_does_not_support_warn_once_with_the_cost_and_the_reason(kind, reason):
    model = tiny_architecture(kind)
    decoder = Decoder(model)
    with pytest.warns(UserWarning, match=f"{type(model).__name__} is decoded without the KV pool.*{reason}"):
        rows = decoder.generate(PROMPTS, **GREEDY).responses()
    assert rows == generate_each_alone(model, PROMPTS, GREEDY["max_new_tokens"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder.generate(PROMPTS[:1], **GREEDY)
