"""The C++ operations of a decoding step against float64 loops and against sampling.sample_tokens."""

import pytest
import torch
from torch import Tensor

from dschat.generation import SamplingParams
from dschat.generation.cpu import cpp_kernels
from dschat.generation.kv_pool.attention import Contexts, Scoring, decode_attention, plain_attention
from dschat.generation.sampling import sample_tokens

# Contexts of 1 to 73 tokens; the first two rows share a prompt, the fifth has none.
SPANS = [[0, 17, 100, 5], [0, 17, 120, 1], [20, 1, 140, 40], [30, 33, 180, 20], [70, 0, 200, 1], [70, 3, 210, 70]]


@pytest.fixture(scope="module")
def kernels() -> cpp_kernels.DecodingKernels:
    loaded = cpp_kernels.load()
    assert loaded is not None, "the tests need a compiler"
    return loaded


def attention_loop(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float, window: int | None, softcap: float | None
):
    """Attention by its definition, row by row and head by head, in float64."""
    group = query.shape[1] // keys.shape[1]
    rows = []
    for row, (prompt, prompt_length, response, response_length) in enumerate(SPANS):
        positions = [*range(prompt, prompt + prompt_length), *range(response, response + response_length)]
        positions = positions[-window:] if window else positions
        heads = []
        for head in range(query.shape[1]):
            logits = keys[positions, head // group].double() @ query[row, head].double() * scale
            logits = softcap * torch.tanh(logits / softcap) if softcap else logits
            heads.append(logits.softmax(0) @ values[positions, head // group].double())
        rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width, value_width", [(64, 64), (80, 80), (24, 40), (128, 128)])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (9, 3), (8, 1)])
@pytest.mark.parametrize("window, softcap", [(None, None), (5, None), (None, 3.0), (1, 2.0)])
@pytest.mark.parametrize("by_kernel", [True, False])
def test_attention_equals_the_definition(dtype, width, value_width, heads, kv_heads, window, softcap, by_kernel):
    generator = torch.Generator().manual_seed(width + heads)
    keys = torch.randn(300, kv_heads, width, generator=generator).to(dtype)
    values = torch.randn(300, kv_heads, value_width, generator=generator).to(dtype)
    # As models make them: heads and tokens swapped, so not contiguous.
    query = torch.randn(6, 1, heads, width, generator=generator).to(dtype).transpose(1, 2)[:, :, 0]
    key, value = torch.randn(6, kv_heads, width, generator=generator), torch.randn(6, kv_heads, value_width)
    key, value, spans, expected_keys = key.to(dtype), value.to(dtype), torch.tensor(SPANS), keys.clone()
    settings = {"scale": width**-0.5, "window": window, "softcap": softcap}
    contexts, scoring = Contexts(keys, values, spans, longest=80), Scoring(**settings)
    out = decode_attention(query, key, value, contexts, scoring, kernels=by_kernel)
    newest = spans[:, 2] + spans[:, 3] - 1
    assert torch.equal(keys[newest], key) and torch.equal(values[newest], value)
    expected_keys[newest] = key
    assert torch.equal(keys, expected_keys), "nothing else is written"
    expected = attention_loop(query, keys, values, **settings)
    assert out.dtype == dtype and out.shape == (6, heads, value_width)
    torch.testing.assert_close(
        out.float(), expected.float(), **({} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.01})
    )


def test_keys_and_values_outside_a_context_are_never_read(kernels):
    keys, values = torch.full((300, 1, 8), torch.nan), torch.full((300, 1, 8), torch.nan)
    for prompt, prompt_length, response, response_length in SPANS:
        for start, length in ((prompt, prompt_length), (response, response_length)):
            keys[start : start + length] = values[start : start + length] = 1.0
    contexts, ones = Contexts(keys, values, torch.tensor(SPANS), longest=80), torch.ones(6, 1, 8)
    out = kernels.decode_attention(ones, ones, ones, contexts, Scoring(scale=1.0))
    torch.testing.assert_close(out, torch.ones(6, 1, 8))


def test_shapes_that_do_not_fit_are_refused(kernels):
    pool, spans = torch.zeros(300, 2, 8), torch.tensor(SPANS)
    query, key = torch.zeros(6, 4, 8), torch.zeros(6, 2, 8)
    for bad in (
        {"spans": spans.int()},
        {"key": key[:, :1]},
        {"query": query.bfloat16()},
        {"pool": pool.transpose(0, 1)},
    ):
        inputs = {"query": query, "key": key, "pool": pool, "spans": spans} | bad
        contexts = Contexts(inputs["pool"], inputs["pool"], inputs["spans"], longest=80)
        with pytest.raises(ValueError, match="do not fit together"):
            kernels.decode_attention(inputs["query"], inputs["key"], key, contexts, Scoring(scale=1.0))
    with pytest.raises(ValueError, match="there are 2 rows of logits"):
        kernels.sample_tokens(torch.zeros(2, 5), torch.rand(3), SamplingParams())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [7, 1024, 5000])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(), SamplingParams(0.7), SamplingParams(1.3, top_k=20), SamplingParams(top_p=0.9),
        SamplingParams(2.0, top_k=100, top_p=0.5), SamplingParams(0), SamplingParams(5.0, top_p=0.999),
    ],
)  # fmt: skip
def test_drawn_tokens_are_those_of_sample_tokens(kernels, dtype, vocabulary, params):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (3 * torch.randn(400, 2 * vocabulary, generator=generator)).to(dtype)[:, :vocabulary]  # strided
    uniform = torch.rand(400, generator=generator).clamp(2**-24, 1 - 2**-24)
    uniform[:2] = torch.tensor([2**-24, 1 - 2**-24])
    tokens, logprobs = kernels.sample_tokens(logits, uniform, params)
    expected, expected_logprobs = sample_tokens(logits, uniform, params)
    same = tokens == expected
    assert same.float().mean() >= 0.99, "rounding rarely moves a border between two tokens"
    torch.testing.assert_close(
        logprobs[same], expected_logprobs[same], atol=2e-3 if params.top_p < 1 else 2e-5, rtol=1e-5
    )


def test_impossible_tokens_are_never_drawn_and_nan_reaches_the_logprob(kernels):
    logits = torch.full((50, 3000), -torch.inf)
    logits[:, [5, 2047, 2999]] = torch.tensor([0.0, 1.0, 2.0])
    uniform = torch.linspace(2**-24, 1 - 2**-24, 50)
    tokens, _ = kernels.sample_tokens(logits, uniform, SamplingParams())
    assert set(tokens.tolist()) == {5, 2047, 2999}
    logits[0, 0] = torch.nan
    tokens, logprobs = kernels.sample_tokens(logits, uniform, SamplingParams())
    assert logprobs[0].isnan() and 0 <= tokens[0] < 3000 and not logprobs[1:].isnan().any()


def test_greedy_takes_the_lowest_id_of_equal_logits(kernels):
    tokens, logprobs = kernels.sample_tokens(torch.tensor([[0.0, 2.0, 2.0]]), None, SamplingParams(0))
    assert tokens.tolist() == [1]
    torch.testing.assert_close(logprobs, torch.tensor([[0.0, 2.0, 2.0]]).log_softmax(-1)[:, 1])


def test_plain_attention_does_not_depend_on_the_bound_of_context_lengths():
    query, pool, spans = torch.randn(6, 2, 8), torch.randn(300, 2, 8), torch.tensor(SPANS)
    short, long = (
        plain_attention(query, Contexts(pool, pool, spans, longest=longest), Scoring(scale=1.0))
        for longest in (73, 500)
    )
    torch.testing.assert_close(short, long)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 12, 13, 100, 203])
@pytest.mark.parametrize("in_features, out_features", [(1, 1), (7, 63), (64, 64), (33, 130), (256, 200)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_products_equal_the_definition(kernels, rows, in_features, out_features, bias):
    if not kernels.multiplies_bf16:
        pytest.skip("this processor does not multiply bfloat16")
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, in_features, generator=generator).bfloat16()
    weight = torch.randn(out_features, in_features, generator=generator).bfloat16()
    shift = torch.randn(out_features, generator=generator).bfloat16() if bias else None
    packed = kernels.pack(weight)
    expected = x.double() @ weight.double().T + (shift.double() if bias else 0)
    actual = kernels.linear(x.view(rows, 1, in_features), packed, shift, out_features)
    assert actual.shape == (rows, 1, out_features)
    # One rounding to bfloat16, and sums in float32 of up to 256 products.
    torch.testing.assert_close(actual[:, 0].double(), expected, rtol=2**-8, atol=1e-4 * in_features**0.5)
    again = kernels.pack(2 * weight, packed)
    assert again.data_ptr() == packed.data_ptr()
    doubled = kernels.linear(2 * x, packed, None, out_features)
    torch.testing.assert_close(doubled.double(), 4 * (x.double() @ weight.double().T), rtol=2**-8, atol=1e-2)


def test_wrong_shapes_of_products_are_refused(kernels):
    if not kernels.multiplies_bf16:
        pytest.skip("this processor does not multiply bfloat16")
    packed = kernels.pack(torch.zeros(5, 4).bfloat16())
    for x, bias, out in (
        (torch.zeros(2, 7), None, 5), (torch.zeros(2, 4), torch.zeros(6), 5), (torch.zeros(2, 4), None, 900)
    ):  # fmt: skip
        with pytest.raises(ValueError, match="does not fit"):
            kernels.linear(x.bfloat16(), packed, bias if bias is None else bias.bfloat16(), out)
    with pytest.raises(ValueError, match="does not fit"):
        kernels.linear(torch.zeros(2, 4), packed, None, 5)
    with pytest.raises(ValueError, match="not a bfloat16 matrix"):
        kernels.pack(torch.zeros(5, 4))
    with pytest.raises(ValueError, match="pack: .* needs"):
        kernels.pack(torch.zeros(500, 4).bfloat16(), packed)
