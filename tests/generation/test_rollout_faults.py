"""Rollouts that run out of memory or KV pool, or produce NaN: all rows are returned, or an error explains why."""

import functools
import random

import pytest
import torch
from decoder_models import tiny
from test_generation import EOS, GREEDY, PROMPTS, sampled
from test_hybrid_engine import tiny_llama

from dschat.generation import Decoder, HybridEngine, SamplingParams, pool_decoder
from dschat.generation.decode_batch import DecodeBatch
from dschat.generation.kv_pool.pool import KVPool
from dschat.generation.kv_pool.pooled_model import PooledModel
from dschat.generation.pool_decoder import PoolDecoder
from dschat.generation.request import Request, Responses
from dschat.generation.step import Step

SETTINGS = {"eos_token_ids": EOS, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


def failing(monkeypatch, owner: type, name: str, *, calls: set[int], error: Exception) -> list[int]:
    """Make these calls of a method raise after their work is done; returns a list that grows by one with each call."""
    original, made = getattr(owner, name), []

    @functools.wraps(original)
    def method(*args, **kwargs):
        made.append(len(made))
        out = original(*args, **kwargs)
        if made[-1] in calls:
            raise error
        return out

    monkeypatch.setattr(owner, name, method)
    return made


# Where memory is allocated, and which of the calls there fails.
ALLOCATIONS = [
    *[(PooledModel, "prefill", call) for call in (0, 1)],
    *[(PooledModel, "decode", call) for call in (0, 3)],
    *[(Step, "draw", call) for call in (0, 1, 4)],
    *[(DecodeBatch, "add", call) for call in (0, 1)],
    *[(DecodeBatch, "remove_finished", call) for call in (0, 1, 2, 5)],
    *[(KVPool, "update", call) for call in (0, 1, 2)],
    (PoolDecoder, "pool_for", 0),
]


@pytest.mark.parametrize(
    ("owner", "name", "call"), [*ALLOCATIONS, *[(PooledModel, "prefill_packed", call) for call in (0, 1)]]
)
def test_out_of_memory_anywhere_loses_no_row(llama, monkeypatch, owner, name, call):
    prompts = [*PROMPTS, *PROMPTS]
    whole = sampled(Decoder(llama), prompts, **SETTINGS)
    decoder = Decoder(llama, slots=4)
    decoder._check_pool()
    decoder._pooled.can_pack = name == "prefill_packed"
    made = failing(monkeypatch, owner, name, calls={call}, error=torch.OutOfMemoryError("no room"))
    again = sampled(decoder, prompts, **SETTINGS)
    assert len(made) > call + 1, "the fault was not injected, or nothing was retried"
    assert again.responses() == whole.responses() and again.ended.tolist() == whole.ended.tolist()
    torch.testing.assert_close(again.logprobs, whole.logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("owner", "name", "call"), ALLOCATIONS)
def test_other_exceptions_end_the_rollout_and_the_next_one_is_complete(llama, monkeypatch, owner, name, call):
    whole = sampled(Decoder(llama), **SETTINGS)
    decoder = Decoder(llama, slots=3)
    sampled(decoder, **SETTINGS)
    decoder._pooled.can_pack = False
    with monkeypatch.context() as faulty:
        failing(faulty, owner, name, calls=set(range(call, 99)), error=KeyError("a fault"))
        with pytest.raises(KeyError, match="a fault"):
            sampled(decoder, PROMPTS * 3, **SETTINGS)
    assert sampled(decoder, **SETTINGS).responses() == whole.responses()


def test_a_rollout_with_an_unfinished_row_is_never_returned(llama):
    request = Request(prompts=PROMPTS, max_new_tokens=[2, 2, 1, 2, 2], eos_token_ids=9, pad_token_id=0)
    responses = Responses(request, torch.device("cpu"))
    responses.lengths[:] = torch.tensor([2, 1, 1, 0, 1])  # row 1 ends by its EOS, 3 never began, 4 was cut
    responses.as_rows(responses.tokens)[1, 0] = 9
    with pytest.raises(RuntimeError, match="rows 3, 4 of the rollout have neither an EOS nor"):
        responses.rollout(request)


def test_a_prompt_kept_for_a_later_row_is_evicted_when_space_is_needed(monkeypatch):
    """It used to loop: the first row's prompt is kept for the third, and the second does not fit beside it."""
    model = tiny("llama")
    prompts, limits = [[5] * 6, [9] * 6, [5] * 6], [9, 8, 7]
    whole = sampled(Decoder(model), prompts, max_new_tokens=limits)
    decoder = Decoder(model, slots=1)
    sampled(decoder, prompts[:1])
    monkeypatch.setattr(pool_decoder, "free_memory", lambda device: 20 * decoder._pooled.bytes_per_token)
    decoder.release()
    prefilled = decoder.prefilled_tokens
    assert sampled(decoder, prompts, max_new_tokens=limits).responses() == whole.responses()
    assert decoder.prefilled_tokens == prefilled + 18, "the first prompt is run again"


def run_simulated(monkeypatch, *, size: int, slots: int, prompts, limits) -> None:
    """Run the scheduler with a fake model over a pool of this size; asserts that rows do not share positions."""
    vocabulary = 11

    class Model(torch.nn.Module):
        embedding = torch.nn.Embedding(vocabulary, 1)

        def get_input_embeddings(self):
            return self.embedding

    class Pooled:
        model, can_pack, capture_failure, bytes_per_token = Model(), False, None, 1

        def prefill(self, pool, prompts, starts):
            for prompt, start in zip(prompts, starts, strict=True):
                pool.owned[start : start + len(prompt)] = torch.tensor(prompt)
            return torch.zeros(len(prompts), vocabulary)

        def decode(self, pool, tokens, spans, *, longest):
            for prompt, length, start, used in spans.tolist():
                if used and start:
                    assert (pool.owned[prompt : prompt + length] == pool.owned[prompt]).all() and pool.owned[prompt]
                    pool.owned[start + used - 1] = 0
            return torch.zeros(len(tokens), vocabulary)

    class Pool(KVPool):
        def __init__(self, size, *, kernels):
            super().__init__(size, kernels=kernels)
            self.owned = torch.zeros(size, dtype=torch.long)

    monkeypatch.setattr(pool_decoder, "KVPool", Pool)
    monkeypatch.setattr(pool_decoder, "free_memory", lambda device: size)
    request = Request(prompts=prompts, max_new_tokens=limits, eos_token_ids=None, pad_token_id=0, sampling=GREEDY)
    responses = Responses(request, torch.device("cpu"))
    rollouts = PoolDecoder(Pooled(), slots=slots, memory_fraction=1.0, without=())
    counters = Decoder.__new__(Decoder)
    counters.prefilled_tokens = counters.decoded_rows = 0
    most = 10 + 4 * sum(limits) + 4 * len(prompts)
    for number, _ in enumerate(rollouts.steps(request, responses, counters)):
        assert number < most, "no progress"
    assert responses.lengths.tolist() == limits
    responses.rollout(request)


def test_random_requests_over_tight_pools_all_finish_or_name_the_memory_needed(monkeypatch):
    """300 random requests over the tightest pools: all rows finish, or the error names the memory needed."""
    rng, refused = random.Random(5), 0
    for _ in range(300):
        kinds = [[token] * rng.randint(1, 12) for token in range(1, rng.randint(2, 6))]
        prompts = [rng.choice(kinds) for _ in range(rng.randint(1, 12))]
        limits = [rng.randint(1, 10) for _ in prompts]
        largest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
        size = largest + rng.choice([0, 1, 1, 2, 3, 8, 20])
        order = rng.choice([sorted(range(len(prompts)), key=lambda row: -limits[row]), [*range(len(prompts))]])
        monkeypatch.setattr(pool_decoder, "queue_order", lambda request, order=order: order)  # any order is valid
        try:
            run_simulated(monkeypatch, size=size, slots=rng.randint(1, 6), prompts=prompts, limits=limits)
        except torch.OutOfMemoryError as error:
            assert size == largest and f"take {largest} tokens" in str(error)
            refused += 1
    assert 0 < refused < 100


@pytest.mark.parametrize("slots", [2, 5])
def test_without_compaction_no_row_writes_into_its_neighbours(slots):
    """Rows that end by their first token would write their next one before their own part of the pool."""
    model = tiny("llama")
    prompts = [[token, 7, 9] for token in range(20)]
    settings = {"max_new_tokens": 12, "sampling": SamplingParams(temperature=2.0)}
    free = sampled(Decoder(model), prompts, **{**settings, "eos_token_ids": None}).responses()
    stops = sorted({row[0] for row in free[1::2]})  # beside a row that goes on, one that ends at once
    whole = sampled(Decoder(model), prompts, eos_token_ids=stops, **settings)
    lengths = [len(row) for row in whole.responses()]
    assert lengths.count(1) >= 10 and max(lengths) > 1
    plain = sampled(Decoder(model, without=["compaction"], slots=slots), prompts, eos_token_ids=stops, **settings)
    assert plain.responses() == whole.responses()
    torch.testing.assert_close(plain.logprobs, whole.logprobs, atol=1e-5, rtol=1e-5)


def with_head_bias(model: torch.nn.Module, value: float, tokens: slice) -> torch.nn.Module:
    """The model with this value added to the logits of these tokens."""
    head = model.lm_head
    model.lm_head = torch.nn.Linear(head.in_features, head.out_features)
    with torch.no_grad():
        model.lm_head.weight.copy_(head.weight)
        model.lm_head.bias.zero_()[tokens] = value
    return model


@pytest.mark.parametrize("without", [(), ("kernels",)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(), SamplingParams(top_k=5), SamplingParams(0.8, top_k=5, top_p=0.9)]
)
def test_non_finite_logits_raise(sampling, value, without):
    model = tiny_llama().eval()
    decoder = Decoder(model, without=without)
    assert decoder._check_pool()
    with_head_bias(model, value, slice(13, 14))
    with pytest.raises(FloatingPointError, match="rows 0, 1, 2, 3, 4 of the rollout have logits that are not finite"):
        sampled(decoder, sampling=sampling)
    with pytest.raises(FloatingPointError, match="rows 0 of the rollout"):
        list(decoder.stream([5, 6], max_new_tokens=3, eos_token_ids=None, sampling=sampling))


@pytest.mark.parametrize("pool", [True, False])
def test_only_rows_with_non_finite_logits_are_named(pool):
    model = tiny_llama().eval()
    decoder = Decoder(model)
    decoder._uses_pool = decoder._check_pool() and pool
    with torch.no_grad():
        model.model.embed_tokens.weight[96, 0] = float("nan")
    prompts = [[5, 6], [96], [7, 8], [3, 96]]
    with pytest.raises(FloatingPointError, match="rows 1, 3 of"):
        sampled(decoder, prompts, max_new_tokens=1, sampling=GREEDY)
    assert sampled(decoder, [[5, 6], [7, 8]], max_new_tokens=1, sampling=GREEDY).response_mask.all()


@pytest.mark.filterwarnings("ignore:.*decoded without the KV pool")
def test_a_logit_of_minus_infinity_is_a_token_that_is_never_drawn():
    rollout = sampled(Decoder(with_head_bias(tiny_llama(), float("-inf"), slice(0, 90))), eos_token_ids=None)
    assert all(token >= 90 for row in rollout.responses() for token in row)


def test_a_temperature_too_small_for_float32_is_refused():
    from dschat.arguments import RolloutArguments
    from dschat.generation.sampling import MIN_TEMPERATURE, sample_tokens

    with pytest.raises(ValueError, match="temperature is 1e-39, but logits divided by less than 1e-30.*use 0"):
        SamplingParams(temperature=1e-39)
    logits = torch.tensor([[900.0, -3.0, 899.0]])
    for sample in (sample_tokens, _kernel_sample):
        tokens, logprobs = sample(logits, torch.tensor([0.5]), SamplingParams(MIN_TEMPERATURE))
        assert tokens.tolist() == [0] and logprobs.tolist() == [0.0]
    field = RolloutArguments.__dataclass_fields__["temperature"]
    assert field.metadata["bounds"].at_least == MIN_TEMPERATURE


def _kernel_sample(logits, uniform, params):
    from dschat.generation.cpu import cpp_kernels

    return cpp_kernels.load().sample_tokens(logits, uniform, params)


def test_an_engine_generates_again_after_a_rollout_with_nan_logits():
    model = tiny_llama()
    weight = model.model.embed_tokens.weight
    settings = {"max_new_tokens": 4, "eos_token_ids": None, "pad_token_id": 0, "sampling": GREEDY}
    actor = HybridEngine(model)
    with actor.generation():
        whole = actor.generate(PROMPTS, **settings).responses()
    original = weight.detach().clone()
    with torch.no_grad():
        weight[9, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="rows 1, 2 of"), actor.generation():
        actor.generate(PROMPTS, **settings)
    with torch.no_grad():
        weight.copy_(original)
    with actor.generation():
        assert actor.generate(PROMPTS, **settings).responses() == whole
