"""The decoder against transformers' generate and full forward passes, on tiny random models of many architectures."""

import warnings

import psutil
import pytest
import torch
import transformers
from decoder_models import ARCHITECTURES, tiny

from dschat.generation import Decoder, SamplingParams, pool_decoder
from dschat.generation.kv_pool.pooled_model import PooledModel
from dschat.models.causal_lm import TokenLogprobs

# One token, equal prompts, ids 0 and 1 that serve as pad and EOS elsewhere.
PROMPTS = [[5, 6, 7], [9], [3, 4, 8, 8, 1, 2, 0, 9, 9], [5, 6, 7], [0, 0]]
EOS = list(range(0, 97, 7))  # enough stop tokens that some response ends early
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def llama() -> transformers.PreTrainedModel:
    return tiny("llama")


def transformers_greedy(model, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Left padding and masks are made here, so that no code is shared with the decoder."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[11] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, pad_token_id=11)
    return out[:, longest:].tolist()


def cut_at(rows: list[list[int]], eos: int) -> list[list[int]]:
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]


def sampled(decoder: Decoder, prompts=PROMPTS, **changes):
    settings = {"max_new_tokens": 12, "eos_token_ids": None, "pad_token_id": 0, "seed": 3, "iteration": 2}
    return decoder.generate(prompts, **{**settings, **changes})


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore:.*decoded without the KV pool")
def test_greedy_tokens_equal_transformers_generate_with_and_without_an_eos(name):
    model = tiny(name)
    decoder = Decoder(model)
    expected = transformers_greedy(model, PROMPTS, 12)
    assert len({token for row in expected for token in row}) > 2, "a model that repeats one token proves nothing"
    rollout = sampled(decoder, sampling=GREEDY)
    assert rollout.responses() == expected
    assert not rollout.ended.any()

    eos = expected[2][4]  # greedy decoding really generates it, in mid-response
    rollout = sampled(decoder, sampling=GREEDY, eos_token_ids=[96, eos], pad_token_id=eos)
    expected = [cut_at(cut_at([row], eos), 96)[0] for row in expected]
    assert rollout.responses() == expected
    assert rollout.ended.tolist() == [row[-1] in (eos, 96) for row in expected]


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "opt", "gemma2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_full_forward_at_the_same_temperature(name, temperature):
    model = tiny(name)
    rollout = sampled(Decoder(model), sampling=SamplingParams(temperature=temperature), eos_token_ids=7)
    loss_mask = rollout.attention_mask.clone()
    loss_mask[:, : rollout.prompt_length] = False
    with torch.no_grad():
        full = TokenLogprobs(model)(rollout.sequences, rollout.attention_mask, loss_mask, temperature)
    torch.testing.assert_close(rollout.logprobs, full[:, rollout.prompt_length :], atol=1e-5, rtol=1e-5)
    assert (rollout.logprobs[rollout.response_mask] < 0).all()


def test_masks_follow_the_lengths_even_if_the_pad_token_is_generated(llama):
    greedy = transformers_greedy(llama, PROMPTS, 12)
    eos = greedy[2][4]
    rollout = sampled(Decoder(llama), sampling=GREEDY, eos_token_ids=eos, pad_token_id=eos)
    lengths = [len(row) for row in cut_at(greedy, eos)]
    assert rollout.prompt_length == 9 and rollout.response_mask.shape == (5, max(lengths))
    assert rollout.response_mask.sum(1).tolist() == lengths
    for row, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True)):
        padded = 9 - len(prompt)
        assert rollout.attention_mask[row].tolist() == [
            padded <= column < 9 + length for column in range(9 + max(lengths))
        ]
        assert rollout.sequences[row, padded:9].tolist() == prompt
        assert (rollout.sequences[row, 9 + length :] == eos).all()
        assert (rollout.logprobs[row, length:] == 0).all()


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.8, top_k=20, top_p=0.9)])
def test_tokens_do_not_depend_on_slots_or_order(llama, sampling):
    decoder = Decoder(llama)
    whole = sampled(decoder, sampling=sampling, eos_token_ids=EOS)
    assert len({len(r) for r in whole.responses()}) > 1, "responses of one length would hide a shifted row"
    for slots in (1, 2, 3, 9):
        few = Decoder(llama, slots=slots)
        assert sampled(few, sampling=sampling, eos_token_ids=EOS).responses() == whole.responses()
    order = [3, 1, 4, 0, 2]
    shuffled = sampled(
        decoder,
        [PROMPTS[i] for i in order],
        sampling=sampling,
        eos_token_ids=EOS,
        sample_ids=torch.tensor(order),
    )
    assert shuffled.responses() == [whole.responses()[i] for i in order]
    torch.testing.assert_close(shuffled.logprobs, whole.logprobs[order], atol=1e-5, rtol=1e-5)


def test_seed_iteration_and_sample_id_each_change_the_tokens(llama):
    decoder = Decoder(llama)
    first = sampled(decoder).responses()
    assert sampled(decoder).responses() == first
    assert first[0] != first[3], "samples of one prompt have ids of their own"
    assert sampled(decoder, seed=4).responses() != first
    assert sampled(decoder, iteration=3).responses() != first
    assert sampled(decoder, sample_ids=torch.arange(5) + 5).responses() != first


def test_first_tokens_follow_the_softmax_of_the_model(llama):
    count = 4000
    rollout = sampled(Decoder(llama), [[5, 6, 7]] * count, max_new_tokens=1)
    with torch.no_grad():
        expected = llama(torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1) * count
    common = expected >= 5
    observed = rollout.sequences[:, -1].bincount(minlength=97).float()
    observed = torch.cat([observed[common], observed[~common].sum().reshape(1)])
    expected = torch.cat([expected[common], expected[~common].sum().reshape(1)])
    degrees = len(expected) - 1
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5


def test_samples_of_one_prompt_share_one_prefill(llama):
    decoder = Decoder(llama)
    together = sampled(decoder, [[5, 6, 7]] * 4 + [[9]])
    assert decoder.prefilled_tokens == 4
    alone = [sampled(decoder, [[5, 6, 7]], sample_ids=torch.tensor([i])).responses()[0] for i in range(4)]
    assert together.responses()[:4] == alone


def test_removing_finished_rows_does_not_change_the_others(llama):
    prompts = [[token] for token in range(16)]
    decoder = Decoder(llama)
    settings = {"max_new_tokens": 45, "eos_token_ids": list(range(0, 97, 24))}
    rollout = sampled(decoder, prompts, **settings)
    lengths = [len(response) for response in rollout.responses()]
    needed = sum(lengths) - len(lengths)
    assert decoder.decoded_rows == needed < 16 * 44 / 2
    assert min(lengths) < 16 and sorted(lengths)[-3] > 40, "some end early, some outlast a block of uniform numbers"
    assert sampled(Decoder(llama, slots=1), prompts, **settings).responses() == rollout.responses()


def test_decoding_stops_when_all_rows_have_ended(llama):
    greedy = transformers_greedy(llama, [[5, 6, 7]], 12)[0]
    decoder = Decoder(llama)
    rollout = sampled(decoder, [[5, 6, 7]] * 3, sampling=GREEDY, eos_token_ids=greedy[0])
    assert rollout.responses() == [[greedy[0]]] * 3
    assert rollout.response_mask.tolist() == [[True]] * 3
    assert rollout.ended.all()
    assert decoder.decoded_rows == 0


def test_a_response_may_be_longer_than_the_first_cache_buffer(llama):
    """The cache grows several times on the way to 60 tokens."""
    assert sampled(Decoder(llama), [[5], [6, 7]], sampling=GREEDY, max_new_tokens=60).responses() == (
        transformers_greedy(llama, [[5], [6, 7]], 60)
    )


def test_a_stream_yields_what_generate_returns(llama):
    decoder = Decoder(llama)
    rollout = sampled(decoder, [[5, 6, 7]], eos_token_ids=[8, 20, 30], sample_ids=torch.tensor([6]))
    stream = decoder.stream([5, 6, 7], max_new_tokens=12, eos_token_ids=[8, 20, 30], seed=3, iteration=2, sample_id=6)
    assert list(stream) == rollout.responses()[0]


def test_results_can_be_used_in_autograd_and_gradients_stay_enabled_while_streaming(llama):
    decoder = Decoder(llama)
    rollout = sampled(decoder)
    weight = torch.ones(12, requires_grad=True)
    (rollout.logprobs * weight).sum().backward()
    assert weight.grad is not None and torch.is_grad_enabled()
    stream = decoder.stream([5], max_new_tokens=2, eos_token_ids=None)
    next(stream)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("name, reason", [("mamba", "state is not only keys and values.*recomputes the whole row")])
def test_a_model_that_the_pool_does_not_support_warns_once(name, reason):
    decoder = Decoder(tiny(name))
    with pytest.warns(UserWarning, match=f"decoded without the KV pool.*{reason}"):
        sampled(decoder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampled(decoder)


@pytest.mark.parametrize("name", ["llama", "bloom"])
@pytest.mark.filterwarnings("ignore:.*decoded without the KV pool")
def test_each_row_stops_at_its_own_limit(name):
    decoder = Decoder(tiny(name))
    whole = sampled(decoder).responses()
    limits = [4, 1, 12, 7, 2]
    rollout = sampled(decoder, max_new_tokens=limits)
    assert rollout.responses() == [row[:limit] for row, limit in zip(whole, limits, strict=True)]
    assert not rollout.ended.any()


@pytest.mark.parametrize("without", ["sharing", "compaction", "kernels"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_without_any_one_optimisation_tokens_are_the_same(name, without):
    model = tiny(name)
    settings = {"sampling": SamplingParams(temperature=0.8, top_k=20, top_p=0.9), "eos_token_ids": EOS}
    whole = sampled(Decoder(model), **settings)
    plain = sampled(Decoder(model, without=[without], slots=3), **settings)
    assert plain.responses() == whole.responses()
    torch.testing.assert_close(plain.logprobs, whole.logprobs, atol=1e-5, rtol=1e-5)


def test_without_sharing_every_row_prefills_its_own_prompt(llama):
    decoder = Decoder(llama, without=["sharing"])
    sampled(decoder, [[5, 6, 7]] * 4 + [[9]])
    assert decoder.prefilled_tokens == 13


def test_later_samples_of_a_prompt_reuse_its_prefill(llama):
    decoder = Decoder(llama, slots=2)
    sampled(decoder, [[5, 6, 7]] * 8)
    assert decoder.prefilled_tokens == 3


def test_rows_that_wait_for_memory_give_the_same_tokens(llama, monkeypatch):
    whole = sampled(Decoder(llama), eos_token_ids=EOS).responses()
    decoder = Decoder(llama, memory_fraction=1.0)
    sampled(decoder)
    per_token = decoder._pooled.bytes_per_token
    # One layer keeps 2 heads of 8 numbers twice, in 4 bytes each; there are two layers.
    assert per_token == 2 * 2 * 8 * 2 * 4
    calls = []
    monkeypatch.setattr(pool_decoder, "free_memory", lambda device: calls.append(1) or 30 * per_token)
    decoder.release()
    assert sampled(decoder, eos_token_ids=EOS).responses() == whole
    assert calls and decoder._pool_decoder.pool.size == 30
    monkeypatch.setattr(pool_decoder, "free_memory", lambda device: 20 * per_token)
    decoder.release()
    with pytest.raises(torch.OutOfMemoryError, match="21 tokens x 256 bytes.*--generation_memory_fraction"):
        sampled(decoder)


def test_out_of_memory_halves_the_slots_and_the_rollout_goes_on(llama, monkeypatch):
    whole = sampled(Decoder(llama), eos_token_ids=EOS)
    decoder, sizes = Decoder(llama), []
    decode = PooledModel.decode

    def decode_two_rows_at_most(self, pool, tokens, spans, *, longest):
        sizes.append(len(tokens))
        if len(tokens) > 2:
            raise torch.OutOfMemoryError("no room")
        return decode(self, pool, tokens, spans, longest=longest)

    decoder._check_pool()
    monkeypatch.setattr(PooledModel, "decode", decode_two_rows_at_most)
    again = sampled(decoder, eos_token_ids=EOS)
    assert again.responses() == whole.responses() and max(sizes) > 2
    torch.testing.assert_close(again.logprobs, whole.logprobs, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(PooledModel, "decode", lambda *args, **kwargs: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    with pytest.raises(torch.OutOfMemoryError):
        sampled(decoder)


def test_the_model_keeps_its_attention_implementation(llama):
    usual = llama.config._attn_implementation
    sampled(Decoder(llama))
    assert llama.config._attn_implementation == usual != "dschat_decoding"


def test_memory_does_not_grow_over_two_hundred_rollouts(llama):
    decoder = Decoder(llama)
    process = psutil.Process()
    for _ in range(20):
        sampled(decoder, eos_token_ids=EOS)
    before = process.memory_info().rss
    for _ in range(200):
        sampled(decoder, eos_token_ids=EOS)
    assert process.memory_info().rss - before < 16 * 2**20


def test_invalid_requests_name_the_problem(llama):
    decoder = Decoder(llama)
    with pytest.raises(ValueError, match=r"prompts \[1\] are empty.*BOS"):
        sampled(decoder, [[5], [], [6]])
    with pytest.raises(ValueError, match="list of prompts is empty"):
        sampled(decoder, [])
    with pytest.raises(ValueError, match="max_new_tokens is 0.*sample_ids has shape"):
        sampled(decoder, max_new_tokens=0, sample_ids=torch.arange(4))
    with pytest.raises(ValueError, match="has 2 limits, but there are 5 prompts"):
        sampled(decoder, max_new_tokens=[3, 4])
    with pytest.raises(ValueError, match="slots is 0.*memory_fraction is 0.*without has unknown names .'speed'"):
        Decoder(llama, slots=0, memory_fraction=0, without=["speed"])
    with pytest.raises(ValueError, match="9 tokens.*66.*57.*64 positions"):
        sampled(decoder, max_new_tokens=57)
    assert sampled(decoder, [PROMPTS[2]], max_new_tokens=56, sampling=GREEDY).response_mask.shape == (1, 56)
