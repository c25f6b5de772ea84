"""Packed attention by flash kernels: two calls are one softmax. Their definition takes the kernels' place on a CPU."""

import logging
import random

import pytest
import torch
from packed_segments import PATTERNS, dense_attention, dense_mask, random_segments

from dschat.models.packed import flash_attention
from dschat.models.packed.layout import PackedLayout, Segment

WINDOW = 5  # of PATTERNS["window"]


class DefinedKernels:
    """torch.ops.aten's two functions by their definition, sequence by sequence, in float64.

    The arguments are bound to the schemas of the functions, so that a call which they would refuse fails here too.
    """

    def __init__(self) -> None:
        self.calls = []

    def _probabilities(self, q, k, ends, is_causal, scale, window_size_left, logsumexp=None):
        """For each sequence: slices of queries and keys, and the logits [H, L, K], -inf where not attended."""
        for (a, b), (c, d) in zip(*(zip(e.tolist(), e[1:].tolist(), strict=False) for e in ends), strict=True):
            keys = k[c:d].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            logits = torch.einsum("qhd,khd->hqk", q[a:b], keys) * scale
            i, j = torch.arange(b - a)[:, None] + (d - c) - (b - a), torch.arange(d - c)
            hidden = (j > i) & is_causal
            if window_size_left is not None and window_size_left >= 0:
                hidden = hidden | (j < i - window_size_left)
            yield slice(a, b), slice(c, d), logits.masked_fill(hidden, -torch.inf)

    def _flash_attention_forward(self, *args, **kwargs):
        values = bound("_flash_attention_forward", args, kwargs)
        q, k, v = (values[name] for name in ("query", "key", "value"))
        self.calls.append(values)
        assert all(x.is_contiguous() for x in (q, k, v)) and values["dropout_p"] == 0 and values["max_q"] > 0
        out, logsumexp = torch.empty_like(q), torch.empty(q.shape[1], len(q), dtype=q.dtype)
        for queries, keys, logits in self._probabilities(*sequences(values)):
            logsumexp[:, queries] = logits.logsumexp(-1)
            expanded = v[keys].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
            out[queries] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), expanded)
        return out, logsumexp, torch.empty(2), torch.empty(0), torch.empty(0)

    def _flash_attention_backward(self, *args, **kwargs):
        values = bound("_flash_attention_backward", args, kwargs)
        grad, q, k, v, out = (values[name] for name in ("grad_out", "query", "key", "value", "out"))
        assert all(x.is_contiguous() for x in (grad, q, k, v, out, values["logsumexp"]))
        gradients = [torch.zeros_like(x) for x in (q, k, v)]
        group = q.shape[1] // k.shape[1]
        for queries, keys, logits in self._probabilities(*sequences(values)):
            weights = (logits - values["logsumexp"][:, queries, None]).exp()
            delta = (grad[queries] * out[queries]).sum(-1).t()[..., None]
            expanded = [x[keys].repeat_interleave(group, dim=1) for x in (k, v)]
            slopes = weights * (torch.einsum("qhd,khd->hqk", grad[queries], expanded[1]) - delta) * values["scale"]
            gradients[0][queries] += torch.einsum("hqk,khd->qhd", slopes, expanded[0])
            for total, left, right in ((gradients[1], slopes, q), (gradients[2], weights, grad)):
                part = torch.einsum("hqk,qhd->khd", left, right[queries])
                total[keys] += part.unflatten(1, (-1, group)).sum(2)
        return tuple(gradients)


def bound(name, args, kwargs) -> dict:
    """The arguments by the names of the schema of torch's function."""
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    values = {a.name: value for a, value in zip(arguments, args, strict=False)}
    assert len(values) == len(args) and not values.keys() & kwargs.keys()
    values |= kwargs
    assert values.keys() <= {a.name for a in arguments}
    assert {a.name for a in arguments if not a.has_default_value()} <= values.keys()
    return values


def sequences(values):
    ends = values["cum_seq_q"], values["cum_seq_k"]
    for tensor, longest in zip(ends, (values["max_q"], values["max_k"]), strict=True):
        assert tensor.dtype == torch.int32 and int(tensor.diff().max()) == longest
    return values["query"], values["key"], ends, values["is_causal"], values["scale"], values.get("window_size_left")


@pytest.fixture
def kernels(monkeypatch):
    defined = DefinedKernels()
    monkeypatch.setattr(flash_attention, "aten", defined)
    flash_attention.works.cache_clear()
    yield defined
    flash_attention.works.cache_clear()


def assert_equals_dense_attention(segments, pattern, window, case):
    tokens = segments[-1].start + segments[-1].length
    inputs = [torch.randn(heads, tokens, 8, dtype=torch.double, requires_grad=True) for heads in (4, 2, 2)]
    actual = flash_attention.attention(*inputs, PackedLayout(segments, "cpu"), window=window, scale=0.3)
    expected = dense_attention(*inputs, dense_mask(segments, pattern), scale=0.3)
    torch.testing.assert_close(actual, expected, msg=lambda m: f"{case}: {m}")
    direction = torch.randn_like(expected)
    gradients = [torch.autograd.grad(out, inputs, direction) for out in (actual, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda m: f"{case}, gradient: {m}")


def test_two_calls_equal_a_dense_mask(kernels):
    trial = random.Random(0)
    torch.manual_seed(0)
    for number in range(12):
        assert_equals_dense_attention(random_segments(trial), None, None, number)
    assert {call["is_causal"] for call in kernels.calls} == {True, False}


def test_a_window_equals_a_dense_mask(kernels):
    segments = [Segment(0, 3), Segment(3, 5), Segment(8, 30)]
    assert_equals_dense_attention(segments, PATTERNS["window"], WINDOW, "window")
    assert [call["window_size_left"] for call in kernels.calls] == [WINDOW - 1]


@pytest.mark.parametrize(
    "name, longest, window", [("causal", 9, None), ("window", 9, WINDOW), ("window", 5, None), ("chunks", 7, None)]
)
def test_the_window_of_a_pattern(name, longest, window):
    assert PackedLayout([Segment(0, longest)], "cpu").window(PATTERNS[name]) == window


def test_a_pattern_without_window_is_refused():
    with pytest.raises(NotImplementedError, match="no window"):
        PackedLayout([Segment(0, 30)], "cpu").window(PATTERNS["chunks"])


def test_the_trial_accepts_equal_kernels_and_refuses_others_with_a_warning(kernels, monkeypatch, caplog):
    device = torch.device("cpu")
    assert flash_attention.works(device, torch.bfloat16, 16) and not caplog.records
    forward = kernels._flash_attention_forward
    wrong = {
        "differ by": lambda *args, **kwargs: (1.05 * forward(*args, **kwargs)[0], *forward(*args, **kwargs)[1:]),
        "RuntimeError: no kernel": lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("no kernel image")),
        "log-sum-exp is": lambda *args, **kwargs: (
            forward(*args, **kwargs)[0], torch.zeros(2, 4, 50), *forward(*args, **kwargs)[2:]
        ),
    }  # fmt: skip
    for message, function in wrong.items():
        monkeypatch.setattr(kernels, "_flash_attention_forward", function)
        flash_attention.works.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="dschat"):
            assert not flash_attention.works(device, torch.bfloat16, 16)
            assert not flash_attention.works(device, torch.bfloat16, 16)
        (record,) = caplog.records
        assert "without flash kernels" in record.getMessage() and message in record.getMessage()


def test_tensors_that_the_kernels_do_not_take_are_left_to_torch(kernels):
    q = torch.zeros(4, 10, 8, dtype=torch.bfloat16)
    assert not flash_attention.supports(q, q), "not on CUDA"


@pytest.mark.parametrize("window", [None, 5])
def test_torchs_kernels_take_the_calls(window):
    """On the meta device, where they check arguments and shapes without computing anything."""
    prefix = (0, 0) if window else (0, 9)
    layout = PackedLayout([Segment(0, 9), Segment(9, 4, prefix), Segment(13, 6, prefix)], "meta")
    q, k = (torch.empty(heads, 19, 16, dtype=torch.bfloat16, device="meta", requires_grad=True) for heads in (4, 2))
    out = flash_attention.attention(q, k, k, layout, window=window, scale=1.0)
    assert out.shape == q.shape
    out.sum().backward()
    assert q.grad.shape == q.shape and k.grad.shape == k.shape
