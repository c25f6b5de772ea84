"""Tokens on all rollout paths: captured steps, fused layers, decode batches, layerwise weights."""

import dataclasses

import pytest
import torch
import transformers
from decoder_models import ARCHITECTURES, tiny
from test_generation import EOS, GREEDY, PROMPTS, transformers_greedy
from test_hybrid_engine import assert_bit_identical, snapshot, with_lora

from dschat.generation import HybridEngine, SamplingParams, TransformersEngine
from dschat.generation.sampling import truncate_logits
from dschat.generation.step import GraphedStep, graph_batch_sizes
from dschat.models.causal_lm import TokenLogprobs
from dschat.rlhf.rollouts.diagnosis import Scoring, response_logits

SETTINGS = {"max_new_tokens": 12, "eos_token_ids": None, "pad_token_id": 0, "seed": 3}
pytestmark = pytest.mark.filterwarnings("ignore:.*decoded without the KV pool")


def graphed(actor: HybridEngine) -> GraphedStep:
    return next(reversed(actor._decoder._pool_decoder.captured._steps.values()))


def rollout(actor: HybridEngine, prompts=PROMPTS, **changes):
    with actor.generation():
        return actor.generate(prompts, **{**SETTINGS, **changes})


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_equal_generate_on_every_path(name, slots):
    model = tiny(name)
    expected = transformers_greedy(model, PROMPTS, 12)
    actor = HybridEngine(model, slots=slots, pin_buffers=True)
    for _ in range(2):  # the second rollout replays recorded steps from the first one on
        assert rollout(actor, sampling=GREEDY).responses() == expected
    if name not in ("bloom", "mamba"):  # bloom's contexts are gathered and change shape; mamba has no pool
        assert graphed(actor)._graphs, "nothing was captured, so nothing is tested"


@pytest.mark.parametrize("without", ["graphs", "fusion", "kernels"])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=0.8, top_k=20, top_p=0.9), SamplingParams(top_p=0.5)]
)
def test_captured_fused_and_plain_steps_draw_the_same_tokens(without, sampling):
    model = tiny("llama")
    whole = rollout(HybridEngine(model), sampling=sampling, eos_token_ids=EOS)
    plain = rollout(HybridEngine(model, without=[without]), sampling=sampling, eos_token_ids=EOS)
    pinned = HybridEngine(model, pin_buffers=True)
    rollout(pinned, sampling=sampling, eos_token_ids=EOS)
    assert graphed(pinned)._graphs, "sampling can be captured, too"
    assert len({len(r) for r in whole.responses()}) > 1
    assert plain.responses() == whole.responses()
    torch.testing.assert_close(plain.logprobs, whole.logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "mamba"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(top_p=0.9), GREEDY])
def test_ids_beyond_the_tokenizers_vocabulary_are_never_sampled(name, sampling):
    model = tiny(name)
    size = model.config.vocab_size // 2
    limited = dataclasses.replace(sampling, vocabulary_size=size)
    assert max(max(r) for r in rollout(HybridEngine(model), sampling=sampling).responses()) >= size, "nothing to limit"
    whole = rollout(HybridEngine(model), sampling=limited)
    assert max(max(response) for response in whole.responses()) < size
    for engine in (HybridEngine(model, without=["kernels", "graphs"]), TransformersEngine(model)):
        other = rollout(engine, sampling=limited)
        assert other.responses() == whole.responses()
        torch.testing.assert_close(other.logprobs, whole.logprobs, atol=1e-5, rtol=1e-5)
    prompt, response = PROMPTS[0], torch.tensor(whole.responses()[0])
    logits = response_logits(model, torch.cat([torch.tensor(prompt), response]), prompt=len(prompt), scoring=Scoring())
    logits = truncate_logits(logits[:, :size], top_k=0, top_p=1.0 if sampling.greedy else sampling.top_p)
    expected = logits.log_softmax(-1).gather(1, response[:, None]).squeeze(1)
    torch.testing.assert_close(whole.logprobs[0, : len(expected)], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recordings_are_reused_in_later_contexts_with_the_current_weights(lora, dtype):
    model = (with_lora(tiny("llama")) if lora else tiny("llama")).to(dtype)
    actor = HybridEngine(model, pin_buffers=True)
    first = rollout(actor)
    recorded = graphed(actor)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not lora or "lora_" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    second = rollout(actor)
    assert graphed(actor) is recorded, "with buffers pinned, recordings are made once"
    assert second.responses() == rollout(HybridEngine(model, without=["graphs"])).responses() != first.responses()


def test_a_recording_is_not_reused_for_other_or_larger_requests():
    model = tiny("llama")
    actor = HybridEngine(model, pin_buffers=True)
    for changes in (
        {}, {"sampling": SamplingParams(0.5)}, {"eos_token_ids": EOS}, {"max_new_tokens": 40}, {"seed": 9},
        {"prompts": PROMPTS * 4}, {"prompts": PROMPTS[:2], "max_new_tokens": [3, 9]}, {"sampling": GREEDY}, {},
    ):  # fmt: skip
        actual, expected = rollout(actor, **changes), rollout(HybridEngine(model, without=["graphs"]), **changes)
        assert actual.responses() == expected.responses(), changes
        torch.testing.assert_close(actual.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)


def test_a_step_that_reads_a_number_is_not_recorded(monkeypatch):
    model = tiny("llama")
    expected = rollout(HybridEngine(model))
    actor = HybridEngine(model, pin_buffers=True)
    decode = actor._decoder._pooled.decode

    def decode_and_read(pool, tokens, spans, *, longest):
        assert int(spans[:, 3].max()) > 0
        return decode(pool, tokens, spans, longest=longest)

    monkeypatch.setattr(actor._decoder._pooled, "decode", decode_and_read)
    actual = rollout(actor)
    assert not graphed(actor)._graphs and actual.responses() == expected.responses()
    torch.testing.assert_close(actual.logprobs, expected.logprobs)


def test_a_few_graph_batch_sizes_cover_every_batch_size():
    assert graph_batch_sizes(1) == [1] and graph_batch_sizes(4) == [4] and graph_batch_sizes(10) == [4, 8, 10]
    for largest in (31, 64, 512):
        sizes = graph_batch_sizes(largest)
        assert sizes[-1] == largest and sizes == sorted(set(sizes)) and len(sizes) < 24
        assert all(after - before <= max(4, before / 4) for before, after in zip(sizes, sizes[1:], strict=False))


def test_an_open_stream_and_a_rollout_do_not_affect_each_other():
    actor = HybridEngine(tiny("llama"))
    settings = {"max_new_tokens": 12, "eos_token_ids": None, "seed": 3}
    with actor.generation():
        alone = list(actor.stream([5, 6, 7], **settings))
        stream = actor.stream([5, 6, 7], **settings)
        begun = [next(stream) for _ in range(4)]
        whole = actor.generate(PROMPTS, **SETTINGS)
        assert begun + list(stream) == alone == whole.responses()[0]


@pytest.mark.parametrize("case", ["lora", "dtype", "tied"])
def test_layerwise_weights_give_the_tokens_of_whole_weights(case):
    model = tiny("llama" if case != "tied" else "opt")
    model = with_lora(model) if case == "lora" else model
    dtype = None if case == "lora" else torch.bfloat16
    whole = rollout(HybridEngine(model, dtype=dtype, without=["fusion", "kernels"]))
    before = snapshot(model)
    actor = HybridEngine(model, dtype=dtype, layerwise=True, without=["kernels"])
    actual = rollout(actor)
    assert actual.responses() == whole.responses()
    assert_bit_identical(model, before)
    generation_model = actor._generation_module.module
    assert all(parameter.is_meta for parameter in generation_model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in generation_model.modules())


def test_weight_copies_that_do_not_fit_in_memory_are_materialised_layer_by_layer(monkeypatch):
    from dschat.generation import generation_module

    model = with_lora(tiny("llama"))
    copied = sum(p.numel() for n, p in model.named_parameters() if n.endswith("_proj.base_layer.weight")) * 4
    for free, layerwise in ((copied / 0.8 + 8, False), (copied / 0.8 - 8, True)):
        monkeypatch.setattr(generation_module, "free_memory", lambda device, free=free: free)
        actor = HybridEngine(model)
        with actor.generation():
            assert (actor._generation_module.layerwise is not None) == layerwise


def test_placeholders_of_layerwise_weights_are_nan():
    """A model may compute with another layer's weight; NaN makes that visible."""
    model = with_lora(tiny("llama"))
    actor = HybridEngine(model, layerwise=True)
    with actor.generation():
        weight = actor._generation_module.module.model.layers[0].mlp.up_proj.weight
        assert weight.isnan().all() and weight.untyped_storage().nbytes() == weight.element_size()


def test_flat_copies_do_not_overlap_and_keep_their_addresses_while_pinned():
    model = with_lora(tiny("llama"))
    for pinned in (False, True):
        actor = HybridEngine(model, pin_buffers=pinned)
        with actor.generation():
            parameters = dict(actor._generation_module.module.named_parameters())
            addresses = {name: parameter.data_ptr() for name, parameter in parameters.items()}
            flat = actor._generation_module._flat[torch.float32]
            inside = [p for p in parameters.values() if p.untyped_storage().data_ptr() == flat.data_ptr()]
            assert len(inside) == 14 and all(p.data_ptr() % 64 == flat.data_ptr() % 64 for p in inside)
            ends = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in inside)
            assert all(end <= start for (_, end), (start, _) in zip(ends, ends[1:], strict=False))
        assert bool(actor._generation_module._flat) == pinned
        with actor.generation():
            again = actor._generation_module.module.named_parameters()
            assert not pinned or addresses == {name: parameter.data_ptr() for name, parameter in again}


def test_log_probs_in_bfloat16_are_near_those_of_a_full_forward():
    """Weights at their usual initial scale: the two may differ by rounding only."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    actor = HybridEngine(model, pin_buffers=True)
    for _ in range(2):
        result = rollout(actor, [[token, 7, 9] for token in range(16)], max_new_tokens=40)
    loss_mask = result.attention_mask.clone()
    loss_mask[:, : result.prompt_length] = False
    with torch.no_grad():
        full = TokenLogprobs(model)(result.sequences, result.attention_mask, loss_mask)[:, result.prompt_length :]
    difference = (result.logprobs - full).abs()
    assert difference.mean() < 5e-3 and difference.max() < 0.05
