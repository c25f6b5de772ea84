"""Attention over packed rows in C++ against a dense mask in float64, with its gradients."""

import platform
import random
from pathlib import Path

import pytest
import torch
from packed_segments import PATTERNS, dense_attention, dense_mask, random_segments

from dschat.models.cpu import attention, cpp_build
from dschat.models.packed.layout import PackedLayout, Segment

CONTIGUOUS = ["causal", "window", "long window", "chunks"]  # patterns of adjacent keys


@pytest.fixture(scope="module")
def kernels() -> attention.AttentionKernels:
    loaded = attention.load()
    assert loaded is not None, "the tests need a compiler"
    return loaded


def random_inputs(tokens, *, heads=4, groups=2, width=8, value_width=8, dtype=torch.float32):
    shapes = (heads, tokens, width), (groups, tokens, width), (groups, tokens, value_width)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def tokens_of(segments) -> int:
    return segments[-1].start + segments[-1].length


def assert_equals_dense_attention(kernels, segments, pattern, inputs, case):
    layout, wide = PackedLayout(segments, "cpu"), [x.detach().double().requires_grad_() for x in inputs]
    first = layout.first_visible(pattern)
    actual = kernels.attention(*inputs, layout.groups, first, scale=0.3)
    expected = dense_attention(*wide, dense_mask(segments, pattern), scale=0.3)
    direction = torch.randn(expected.shape).to(inputs[0].dtype)
    pairs = [(actual, expected), *zip(
        torch.autograd.grad(actual, inputs, direction), torch.autograd.grad(expected, wide, direction.double()),
        strict=True,
    )]  # fmt: skip
    relative = 1e-2 if inputs[0].dtype == torch.bfloat16 else 2e-6
    for index, (ours, theirs) in enumerate(pairs):
        assert ours.dtype == inputs[0].dtype and ours.shape == theirs.shape
        assert (ours.double() - theirs).norm() <= relative * max(theirs.norm(), 1e-3), (case, index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONTIGUOUS)
def test_attention_equals_a_dense_mask(kernels, name, dtype):
    """Sequences, prompts and continuations around the size of a block of keys, of 96."""
    trial = random.Random(name)
    torch.manual_seed(0)
    for number in range(12):
        segments = random_segments(trial, longest=trial.choice([5, 60, 250]))
        inputs = random_inputs(tokens_of(segments), value_width=trial.choice([4, 8]), dtype=dtype)
        assert_equals_dense_attention(kernels, segments, PATTERNS[name], inputs, (number, segments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, groups", [(1, 1), (6, 6), (8, 1), (9, 3)])
@pytest.mark.parametrize("width, value_width", [(64, 64), (80, 80), (128, 96), (3, 5), (33, 16)])
def test_any_number_and_width_of_heads(kernels, heads, groups, width, value_width, dtype):
    segments = [Segment(0, 97), Segment(97, 7, (0, 97)), Segment(104, 1, (0, 97)), Segment(105, 192)]
    inputs = random_inputs(297, heads=heads, groups=groups, width=width, value_width=value_width, dtype=dtype)
    assert_equals_dense_attention(kernels, segments, None, inputs, (heads, width))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefix", [0, 5, 96])
def test_segments_of_any_length(kernels, prefix, dtype):
    """Around a pair, a tile of 8 rows, a vector of 16 lanes, and a block of 96."""
    segments, packed = [Segment(0, prefix)] if prefix else [], prefix
    for length in [*range(1, 20), 31, 33, 47, 49, 95, 96, 97, 191, 193]:
        segments.append(Segment(packed, length, (0, prefix)))
        packed += length
    inputs = random_inputs(packed, width=16, value_width=16, dtype=dtype)
    assert_equals_dense_attention(kernels, segments, None, inputs, prefix)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of this architecture")
@pytest.mark.parametrize("architecture", ["x86-64", "x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrower_vectors_give_the_same(architecture, dtype, monkeypatch):
    """Vectors of 4, 8 and 16 floats, without products of bfloat16 pairs."""
    if architecture == "x86-64-v4" and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the processor has no AVX-512")
    monkeypatch.setattr(cpp_build, "FLAGS", (*cpp_build.FLAGS, f"-march={architecture}"))
    segments = [Segment(0, 97), Segment(97, 30, (0, 97)), Segment(127, 7, (0, 97)), Segment(134, 101)]
    inputs = random_inputs(235, width=40, value_width=17, dtype=dtype)
    assert_equals_dense_attention(attention.AttentionKernels(), segments, PATTERNS["long window"], inputs, architecture)


def test_tensors_of_any_strides(kernels):
    """As a model's projections, rotary embeddings and a broadcast gradient leave them."""
    layout = PackedLayout([Segment(0, 30), Segment(30, 21)], "cpu")
    plain = [torch.randn(4, 51, 8) for _ in range(3)]
    expected_inputs = [x.clone().requires_grad_() for x in plain]
    expected = kernels.attention(*expected_inputs, layout.groups, None, scale=1.0)
    expected.sum().backward()
    transposed = plain[0].transpose(0, 1).contiguous().transpose(0, 1)
    every_other = torch.stack([plain[1], plain[1]], dim=-1)[..., 0]
    slices = torch.cat([plain[2], plain[2]], dim=-1)[..., :8]
    strided = [x.requires_grad_() for x in (transposed, every_other, slices)]
    actual = kernels.attention(*strided, layout.groups, None, scale=1.0)
    assert torch.equal(actual, expected) and actual.transpose(0, 1).is_contiguous()
    actual.sum().backward()
    for ours, theirs in zip(strided, expected_inputs, strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_results_do_not_depend_on_threads_or_on_other_sequences(kernels):
    torch.manual_seed(0)
    segments = [Segment(0, 60), Segment(60, 20, (0, 60)), Segment(80, 33), Segment(113, 100)]
    inputs = random_inputs(213)
    threads, runs = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            out = kernels.attention(*inputs, PackedLayout(segments, "cpu").groups, None, scale=1.0)
            runs.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, three) for one, three in zip(*runs, strict=True))
    alone = [x.detach()[:, 80:113] for x in inputs]
    out = kernels.attention(*alone, PackedLayout([Segment(0, 33)], "cpu").groups, None, scale=1.0)
    assert torch.equal(out, runs[0][0][:, 80:113])


def test_a_nan_stays_in_its_sequence(kernels):
    inputs = [x.detach() for x in random_inputs(70)]
    layout = PackedLayout([Segment(0, 40), Segment(40, 30)], "cpu")
    expected = kernels.attention(*inputs, layout.groups, None, scale=1.0)
    inputs[1][0, 50] = float("nan")
    inputs = [x.requires_grad_() for x in inputs]
    out = kernels.attention(*inputs, layout.groups, None, scale=1.0)
    assert torch.equal(out[:, :50], expected[:, :50]) and out[0, 50:].isnan().all()
    out.sum().backward()
    assert not any(x.grad[:, :40].isnan().any() for x in inputs)


def test_large_logits_are_those_of_a_softmax(kernels):
    query, key, value = (x.detach() for x in random_inputs(60))
    segments = [Segment(0, 60)]
    out = kernels.attention(100 * query, 100 * key, value, PackedLayout(segments, "cpu").groups, None, scale=0.3)
    wide = [100 * query.double(), 100 * key.double(), value.double()]
    logits = torch.einsum("hqd,hkd->hqk", wide[0], wide[1].repeat_interleave(2, dim=0)) * 0.3
    weights = logits.masked_fill(~dense_mask(segments, None), -torch.inf).softmax(-1)
    torch.testing.assert_close(out.double(), weights @ wide[2].repeat_interleave(2, dim=0), atol=1e-3, rtol=1e-3)


def test_what_does_not_fit_is_refused(kernels):
    groups = PackedLayout([Segment(0, 10)], "cpu").groups
    q, k, v = (x.detach() for x in random_inputs(10))
    wrong = [
        (q, k, v.bfloat16()), (q.double(), k.double(), v.double()), (q[:3], k, v), (q[:, :9], k[:, :9], v[:, :9]),
        (q, k[..., :4], v), (q, k[:1], v),
    ]  # fmt: skip
    for inputs in wrong:
        with pytest.raises(ValueError, match="do not fit together"):
            kernels.attention(*inputs, groups, None, scale=1.0)
    for first in (torch.zeros(9, dtype=torch.long), torch.zeros(10)):
        with pytest.raises(ValueError, match="do not fit together"):
            kernels.attention(q, k, v, groups, first, scale=1.0)


@pytest.mark.parametrize("name", CONTIGUOUS)
@pytest.mark.parametrize("longest", [1, 2, 7, 100])
def test_first_visible_positions_are_those_of_the_pattern(name, longest):
    pattern, position = PATTERNS[name], torch.arange(longest)
    first = PackedLayout([Segment(0, longest)], "cpu").first_visible(pattern)
    if pattern is None:
        assert first is None
    else:
        assert first.tolist() == pattern(position[:, None], position).int().argmax(dim=1).tolist()


def test_attention_to_later_positions_is_refused():
    for pattern in (lambda q, k: k <= q + 1, lambda q, k: k < q):
        with pytest.raises(NotImplementedError, match="later"):
            PackedLayout([Segment(0, 5)], "cpu").first_visible(pattern)
