"""The Triton kernels against plain torch, for test_triton_kernels.py, which starts this in a separate process.

TRITON_INTERPRET=1 pytest tests/generation/triton_kernel_cases.py    # a machine without GPU
pytest tests/generation/triton_kernel_cases.py                       # on the GPU
"""

import math

import pytest
import torch
from torch import Tensor

from dschat.generation.cuda import attention
from dschat.generation.cuda.attention import choose_splits
from dschat.generation.cuda.kv_writes import write_kv
from dschat.generation.cuda.sampling import sample
from dschat.generation.kv_pool.attention import Contexts, Scoring
from dschat.generation.sampling import SamplingParams, sample_tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")
POOL = 400
SPANS = [
    [50, 70, 130, 40],  # two samples of one prompt
    [50, 70, 180, 1],
    [190, 0, 190, 1],  # a context of one token
    [200, 33, 0, 0],  # no response
    [0, 0, 240, 150],  # no prompt, and the longest
    [393, 7, 10, 30],  # the response lies before the prompt
]
FIRST, LAST = 2.0**-24, 1 - 2.0**-24  # the least and greatest of dschat.tensors.seeded_uniform


@pytest.fixture(autouse=True)
def new_memory_holds_nan():
    """Reads of uninitialised memory become visible as NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def with_gaps(x: Tensor) -> Tensor:
    """The same numbers, with NaN after every vector and every row of vectors: [..., heads, width]."""
    wide = x.new_full((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + 16), NAN)
    wide[..., :-1, :-16] = x
    return wide[..., :-1, :-16]


def batch(*, kv_heads=2, group=2, width=64, value_width=64, dtype=torch.float32, spans=SPANS):
    """query [R, H, D], keys [N, KVH, D], values [N, KVH, Dv], spans: NaN wherever a row has no token."""
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(len(spans), kv_heads * group, width, generator=generator)
    keys = torch.randn(POOL, kv_heads, width, generator=generator)
    values = torch.randn(POOL, kv_heads, value_width, generator=generator)
    used = torch.zeros(POOL, dtype=torch.bool)
    for a, m, b, n in spans:
        used[a : a + m] = used[b : b + n] = True
    keys[~used] = values[~used] = NAN
    query, keys, values = (with_gaps(x.to(DEVICE, dtype)) for x in (query, keys, values))
    return query, keys, values, torch.tensor(spans, device=DEVICE)


def plain_attention(query, keys, values, spans, *, scale, window=None, softcap=None) -> Tensor:
    """[R, H, Dv] float64: one row, one head at a time."""
    group = query.shape[1] // keys.shape[1]
    result = query.new_zeros(*query.shape[:2], values.shape[2], dtype=torch.float64)
    for row, (a, m, b, n) in enumerate(spans.tolist()):
        tokens = [*range(a, a + m), *range(b, b + n)]
        tokens = tokens if window is None else tokens[-window:]
        for head in range(query.shape[1]):
            logits = keys[tokens, head // group].double() @ query[row, head].double() * scale
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            result[row, head] = logits.softmax(0) @ values[tokens, head // group].double()
    return result


def decode_attention(query, keys, values, spans, *, longest, scale, window=None, softcap=None, **options) -> Tensor:
    contexts, scoring = Contexts(keys, values, spans, longest), Scoring(scale, window, softcap)
    return attention.decode_attention(query, contexts, scoring, **options)


def check(tensors, *, splits, tolerance=None, **scoring) -> None:
    scoring = {"scale": tensors[0].shape[2] ** -0.5} | scoring
    result = decode_attention(*tensors, longest=150, splits=splits, **scoring)
    assert result.dtype == tensors[0].dtype
    torch.testing.assert_close(result, plain_attention(*tensors, **scoring).to(result.dtype), **tolerance or {})


@pytest.mark.parametrize("splits", [1, 2, 7, None])
def test_attention_equals_plain_torch_with_any_number_of_splits(splits):
    check(batch(), splits=splits)


def test_there_may_be_more_splits_than_tokens():
    check(batch(spans=SPANS[2:4]), splits=40)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("kv_heads", "group"), [(3, 1), (2, 3), (1, 8), (2, 20)])
def test_query_heads_share_key_heads_in_order(kv_heads, group, splits):
    check(batch(kv_heads=kv_heads, group=group), splits=splits)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("width", "value_width"), [(80, 80), (128, 128), (64, 48), (24, 128), (8, 8), (192, 128)])
def test_head_sizes_need_not_be_equal_nor_powers_of_two(width, value_width, splits):
    check(batch(width=width, value_width=value_width), splits=splits)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [1, 5, 32, 64, 100, 5000])
def test_a_window_keeps_only_the_newest_tokens(window, splits):
    check(batch(), splits=splits, window=window)


@pytest.mark.parametrize("splits", [1, 4])
def test_softcap_bounds_the_logits(splits):
    """With this scale the logits reach ±150 before the cap."""
    check(batch(), splits=splits, scale=5.0, softcap=20.0)
    check(batch(), splits=splits, softcap=0.5, window=40)


def test_large_logits_do_not_overflow():
    query, keys, values, spans = batch()
    result = decode_attention(query, keys, values, spans, longest=150, scale=1e3, splits=2)
    # Differences of thousands: each head copies the value of its highest-scoring token.
    torch.testing.assert_close(result, plain_attention(query, keys, values, spans, scale=1e3).float())


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("group", "width"), [(1, 64), (3, 80), (20, 128), (2, 256)])
def test_half_precision_errors_are_within_rounding(group, width, splits):
    """Weights and result have 8 bits (half a percent); sums have more."""
    tensors = batch(group=group, width=width, value_width=width, dtype=torch.bfloat16)
    check(tensors, splits=splits, tolerance={"rtol": 0.01, "atol": 0.005})


def test_half_precision_sums_in_float32():
    """4096 equal weights: a bfloat16 sum would stay at 256."""
    keys = torch.zeros(4096, 1, 16, dtype=torch.bfloat16, device=DEVICE)
    values = torch.full((4096, 1, 16), 3.0, dtype=torch.bfloat16, device=DEVICE)
    spans = torch.tensor([[0, 4000, 4000, 96]], device=DEVICE)
    for splits in (1, 4):
        result = decode_attention(keys[:1], keys, values, spans, longest=4096, scale=1.0, splits=splits)
        assert (result == 3.0).all()


def test_a_row_does_not_depend_on_its_neighbours():
    query, keys, values, spans = batch()
    together = decode_attention(query, keys, values, spans, longest=150, scale=0.1, splits=4)
    for row in range(len(SPANS)):
        one = slice(row, row + 1)
        alone = decode_attention(query[one], keys, values, spans[one], longest=150, scale=0.1, splits=4)
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("splits", [1, 3])
def test_a_row_without_tokens_gets_zeros(splits):
    query, keys, values, spans = batch(spans=[*SPANS[2:4], [5, 0, 9, 0]])
    result = decode_attention(query, keys, values, spans, longest=1, scale=1.0, splits=splits)
    assert (result[2] == 0).all() and (result[:2] != 0).all()


@pytest.mark.parametrize("splits", [1, 3])
def test_attention_writes_into_out_and_nowhere_else(splits):
    query, keys, values, spans = batch(group=3)
    buffer = torch.full((len(SPANS) + 1, 8, 80), NAN, device=DEVICE)
    out = buffer[:-1, 1:7, :64]
    assert decode_attention(query, keys, values, spans, longest=150, scale=0.1, splits=splits, out=out) is out
    torch.testing.assert_close(out, plain_attention(query, keys, values, spans, scale=0.1).float())
    assert buffer.isnan().sum() == buffer.numel() - out.numel()


def test_there_are_as_many_splits_as_fill_the_processors():
    # 4 programs for each of 100 processors = 400; 8 rows of 5 heads are 40; 10 parts, rounded up to 16.
    assert choose_splits(8, 5, longest=100_000, processors=100) == 16
    assert choose_splits(80, 5, longest=100_000, processors=100) == 1
    assert choose_splits(8, 5, longest=3 * 128 + 1, processors=100) == 4  # of at least about 128 tokens
    assert choose_splits(8, 5, longest=1, processors=100) == 1
    assert choose_splits(1, 1, longest=10**9, processors=100) == 64
    assert choose_splits(0, 5, longest=1, processors=100) == 1


def test_a_batch_without_rows_is_valid():
    query, keys, values, spans = batch()
    assert decode_attention(query[:0], keys, values, spans[:0], longest=1, scale=1.0).shape == (0, 4, 64)
    assert sample(torch.zeros(0, 9, device=DEVICE), torch.zeros(0, device=DEVICE), temperature=1.0)[0].shape == (0,)


def test_attention_names_invalid_arguments():
    query, keys, values, spans = batch()
    with pytest.raises(ValueError, match=r"must be \[R, KVH·G, D\].*4 numbers.*window is 0.*splits is 0"):
        decode_attention(query[:, :3], keys, values, spans[:, :3], longest=1, scale=1.0, window=0, splits=0)
    with pytest.raises(ValueError, match="one half type"):
        decode_attention(query, keys, values.bfloat16(), spans, longest=1, scale=1.0)
    with pytest.raises(ValueError, match="keys has stride 2 in its last dimension"):
        decode_attention(query[..., :32], keys[..., ::2], values, spans, longest=1, scale=1.0)
    with pytest.raises(ValueError, match=r"out has shape \(1, 4, 64\)"):
        decode_attention(query, keys, values, spans, longest=1, scale=1.0, out=query[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_tokens_are_written_at_their_destination(dtype):
    keys = with_gaps(torch.randn(40, 3, 80, device=DEVICE).to(dtype))
    values = with_gaps(torch.randn(40, 3, 64, device=DEVICE).to(dtype))
    # Both as one projection returns them, in numbers that bfloat16 has: the interpreter truncates instead of rounding.
    fused = torch.randn(5, 3 * (80 + 64), device=DEVICE).bfloat16().float()
    new_keys, new_values = fused[:, : 3 * 80].view(5, 3, 80), fused[:, 3 * 80 :].view(5, 3, 64)
    destination = torch.tensor([7, 1, 39, 1, 0, 1, 21, 1, 8], device=DEVICE)[::2]
    expected_keys, expected_values = keys.clone(), values.clone()
    for row, token in enumerate([7, 39, 0, 21, 8]):
        expected_keys[token], expected_values[token] = new_keys[row].to(dtype), new_values[row].to(dtype)
    write_kv(keys, values, new_keys, new_values, destination)
    assert torch.equal(keys, expected_keys) and torch.equal(values, expected_values)
    assert keys._base[:, :, 80:].isnan().all() and keys._base[:, 3].isnan().all()
    assert values._base[:, :, 64:].isnan().all() and values._base[:, 3].isnan().all()


def test_write_kv_refuses_shapes_that_do_not_fit():
    _, keys, values, _ = batch()
    for new_keys, new_values, count in [(keys[:2, :1], values[:2], 2), (keys[:2], values[:3], 2), (keys, values, 1)]:
        with pytest.raises(ValueError, match=r"do not fit keys \(400, 2, 64\)"):
            write_kv(keys, values, new_keys, new_values, torch.zeros(count, dtype=torch.long, device=DEVICE))


def draw(logits: Tensor, uniforms, temperature: float = 1.0) -> tuple[list[int], Tensor]:
    tokens, logprobs = sample(logits, torch.tensor(uniforms, device=DEVICE), temperature=temperature)
    assert tokens.dtype == torch.long and logprobs.dtype == torch.float32
    return tokens.tolist(), logprobs


def test_the_first_token_whose_cumulative_probability_exceeds_the_number_is_drawn():
    four = torch.zeros(1, 4, device=DEVICE).expand(7, -1)
    tokens, logprobs = draw(four, [FIRST, 0.2499, 0.25, 0.5, 0.7499, 0.75, LAST])
    assert tokens == [0, 0, 1, 2, 2, 3, 3]
    assert logprobs.tolist() == pytest.approx([math.log(0.25)] * 7)


def test_tokens_at_the_borders_of_vocabulary_blocks_are_exact():
    flat = torch.zeros(1, 16384, device=DEVICE).expand(8, -1)
    tokens = [0, 1, 4095, 4096, 4097, 8191, 8192, 16383]
    assert draw(flat, [t / 16384 for t in tokens])[0] == tokens


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("vocabulary", "rows"), [(1000, 60), (1024, 10), (4097, 10), (50257, 16)])
def test_tokens_are_those_of_sample_tokens(vocabulary, rows, temperature):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3 + 100
    uniform = torch.rand(rows, generator=generator).clamp(FIRST, LAST)
    uniform[:4] = torch.tensor([FIRST, LAST, 1e-4, 1 - 1e-4])
    expected, _ = sample_tokens(logits, uniform, SamplingParams(temperature=temperature))
    exact = (logits.double() / temperature).log_softmax(-1)
    tokens, logprobs = sample(logits.to(DEVICE), uniform.to(DEVICE), temperature=temperature)
    tokens, logprobs = tokens.cpu(), logprobs.cpu()
    # Each number lies in the interval of its token; and closer than this to a border, float32 decides which it is.
    rounding, number = 5e-7, uniform.double()[:, None]
    mass = exact.exp().cumsum(-1)  # [R, V]
    above = mass.gather(-1, tokens[:, None])
    below = above - exact.gather(-1, tokens[:, None]).exp()
    assert ((below - rounding <= number) & (number <= above + rounding)).all()
    clear = (mass - number).abs().amin(-1) > rounding
    assert clear[4:].sum() >= rows // 2
    assert torch.equal(tokens[clear], expected[clear])
    torch.testing.assert_close(logprobs, exact.gather(-1, tokens[:, None])[:, 0].float(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, -1e4, 1e4])
def test_tokens_of_probability_zero_are_never_drawn(offset):
    """Whole blocks of them before, between and after the three possible ones."""
    logits = torch.full((1, 30_000), float("-inf"), device=DEVICE)
    logits[0, [5000, 5002, 17_000]] = offset
    numbers = [FIRST, 1e-6, 0.33, 0.34, 0.66, 0.67, 1 - 1e-6, LAST]
    tokens, logprobs = draw(logits.expand(8, -1), numbers)
    assert tokens == [5000, 5000, 5000, 5002, 5002, 17_000, 17_000, 17_000]
    assert logprobs.tolist() == pytest.approx([-math.log(3)] * 8)
    assert draw(logits.expand(2, -1), [0.0, 1.0])[0] == [5000, 17_000]  # outside the interval too


def test_half_precision_logits_in_strided_rows_are_supported():
    logits = torch.randn(3, 2, 5000, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    last = logits[:, -1]
    numbers = torch.tensor([0.1, NAN, 0.5, NAN, 0.9], device=DEVICE)[::2]
    expected = sample_tokens(last.cpu(), numbers.cpu(), SamplingParams())
    tokens, logprobs = sample(last, numbers, temperature=1.0)
    assert torch.equal(tokens.cpu(), expected[0])
    torch.testing.assert_close(logprobs.cpu(), expected[1], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("ties", [[3], [7, 8], [4095, 4096], [4096, 4099, 9999], [0, 9999]])
def test_greedy_takes_the_lowest_id_among_the_most_likely(ties):
    logits = torch.randn(2, 10_000, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    logits[1, ties] = 9.0
    tokens, logprobs = sample(logits, None, temperature=0)
    assert tokens.tolist() == [int(logits[0].argmax()), ties[0]]
    exact = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, exact.float(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("where", [slice(None), slice(0, 1), slice(4999, 5000), slice(4096, 5000), slice(0, 4096)])
def test_nan_logits_give_a_nan_logprob_and_a_token_in_the_vocabulary(where, temperature):
    logits = torch.zeros(3, 5000, device=DEVICE)
    logits[1, where] = NAN
    tokens, logprobs = sample(logits, torch.full((3,), 0.5, device=DEVICE), temperature=temperature)
    assert logprobs.isnan().tolist() == [False, True, False]
    assert 0 <= int(tokens[1]) < 5000


def test_sampling_names_invalid_arguments():
    logits = torch.zeros(2, 10, device=DEVICE)
    with pytest.raises(ValueError, match="temperature is -1.0.*uniform is None"):
        sample(logits, None, temperature=-1.0)
    with pytest.raises(ValueError, match=r"uniform is \(3,\), but it needs one number per row"):
        sample(logits, torch.zeros(3, device=DEVICE), temperature=1.0)
    with pytest.raises(ValueError, match="logits have stride 2"):
        sample(logits[:, ::2], torch.zeros(2, device=DEVICE), temperature=1.0)


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_other_tokens_and_lengths():
    query, keys, values, spans = batch(dtype=torch.bfloat16)
    logits, uniform = torch.randn(6, 5000, device=DEVICE), torch.rand(6, device=DEVICE)

    def step():
        destination = spans[:, 2] + spans[:, 3] - 1
        write_kv(keys, values, query[:, ::2], query[:, 1::2], destination)
        result = decode_attention(query, keys, values, spans, longest=512, scale=0.1, splits=4)
        return result, *sample(logits, uniform, temperature=0.7)

    spans[:, 3].clamp_(min=1)
    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        query.normal_(), logits.normal_(), uniform.uniform_(FIRST, LAST)
        spans[0, 3] += 1  # lengths are device data too
        graph.replay()
        for replayed, now in zip(captured, step(), strict=True):
            assert torch.equal(replayed, now)
