"""The C++ operations of a decoding step against float64 loops and against sampling.sample_tokens."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from dschat.generation import SamplingParams
from dschat.generation.cpu import cpp_build, cpp_kernels
from dschat.generation.kv_pool.attention import Contexts, Scoring, decode_attention, plain_attention
from dschat.generation.sampling import sample_tokens

# Contexts of 1 to 73 tokens; the first two rows share a prompt, the fifth has none.
SPANS = [[0, 17, 100, 5], [0, 17, 120, 1], [20, 1, 140, 40], [30, 33, 180, 20], [70, 0, 200, 1], [70, 3, 210, 70]]


@pytest.fixture(scope="module")
def kernels() -> cpp_kernels.CPUKernels:
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


def test_without_a_compiler_there_are_no_kernels_and_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(UserWarning, match="cannot be built.*no-such-compiler"):
        assert cpp_kernels.load.__wrapped__() is None
    monkeypatch.setattr(
        subprocess, "run",
        lambda *_, **__: (_ for _ in ()).throw(subprocess.CalledProcessError(1, "c++", stderr="unknown flag")),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="unknown flag"):
        assert cpp_kernels.load.__wrapped__() is None
    assert not list(tmp_path.rglob("*.so"))


def test_a_library_that_other_users_can_write_is_built_again(monkeypatch, tmp_path):
    """It has the right name, in our own folder, but its mode lets others write to it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    library = cpp_build._folder() / f"cpu_kernels-{cpp_build._identity()}.so"
    library.write_bytes(b"not ours")
    library.chmod(0o666)
    loaded = cpp_kernels.load.__wrapped__()
    assert loaded is not None and library.read_bytes()[:4] == b"\x7fELF"
    assert library.stat().st_mode & 0o777 == 0o700


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 24, 100, 688])
def test_norms_gates_and_rotations_equal_their_definitions(kernels, dtype, width):
    generator = torch.Generator().manual_seed(width)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    close = {"rtol": 2**-7, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    x, weight = random(3, 5, width), random(width)
    for eps, shift in ((1e-6, 0.0), (1e-1, 1.0)):
        wide = x.double()
        expected = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + shift)
        actual = kernels.rms_norm(x.transpose(0, 1), weight, eps=eps, shift=shift).transpose(0, 1)
        torch.testing.assert_close(actual.double(), expected, **close)

    both = 6 * random(4, 1, 2 * width)
    gate, up = both.split(width, dim=-1)  # as a product of two layers leaves them
    for gelu in (False, True):
        act = nn.functional.gelu(gate.double(), approximate="tanh") if gelu else nn.functional.silu(gate.double())
        torch.testing.assert_close(kernels.gated(gate, up, gelu=gelu).double(), act * up.double(), **close)

    heads = random(2, 7, 3, width).transpose(1, 2)  # [R, H, T, D], as models make them
    for rows in (1, 2):
        cos, sin = random(rows, 7, width), random(rows, 7, width)
        half = torch.cat([-heads[..., width // 2 :], heads[..., : width // 2]], dim=-1)
        expected = heads.double() * cos[:, None].double() + half.double() * sin[:, None].double()
        torch.testing.assert_close(kernels.rotate(heads, cos, sin).double(), expected, **close)


def test_extreme_gates_are_finite(kernels):
    gate = torch.tensor([[-1e4, -88.0, 0.0, 88.0, 1e4]])
    for gelu in (False, True):
        expected = nn.functional.gelu(gate, approximate="tanh") if gelu else nn.functional.silu(gate)
        torch.testing.assert_close(kernels.gated(gate, torch.ones(1, 5), gelu=gelu), expected)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.gated(gate, torch.ones(1, 4))
    with pytest.raises(ValueError, match="rms_norm"):
        kernels.rms_norm(gate, torch.ones(4), eps=1e-6)
    with pytest.raises(ValueError, match="do not fit together"):
        kernels.rotate(torch.ones(2, 3, 4, 6), torch.ones(3, 4, 6), torch.ones(3, 4, 6))


@pytest.mark.parametrize("where", ["TORCH_EXTENSIONS_DIR", "the temporary folder"])
def test_kernels_are_not_loaded_from_a_folder_that_another_user_may_have_created(where, monkeypatch, tmp_path):
    """Its name is predictable, so another user can create it first and put a library there."""
    parent = tmp_path / "shared"
    trap = parent / f"dschat-{os.getuid()}"
    trap.mkdir(parents=True)
    trap.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(parent))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)  # as outside a virtual environment
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    if where == "TORCH_EXTENSIONS_DIR":
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(parent))
    with pytest.warns(UserWarning, match="others may write there"):
        folder = cpp_build._folder()
    assert folder != trap and not list(folder.iterdir()) and folder.stat().st_mode & 0o777 == 0o700
