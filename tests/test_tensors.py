"""Masked statistics, log-probs and counter-based random numbers against independent oracles."""

import math
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F

from dschat.tensors import (
    linear_logprobs,
    logprobs_of,
    open_unit_interval,
    philox,
    position_ids,
    seeded_uniform,
    whiten,
)

NAN, INF = float("nan"), float("inf")


def test_masks_of_another_shape_or_dtype_are_refused():
    with pytest.raises(ValueError, match=r"x has shape \(2, 3\).*\(2, 1\)"):
        whiten(torch.zeros(2, 3), torch.ones(2, 1).bool())
    with pytest.raises(ValueError, match=r"torch.float32.*mask.bool\(\)"):
        whiten(torch.zeros(2, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match="bool"):
        position_ids(torch.ones(2, 3))


# --- whitening -------------------------------------------------------------------------------------------------------


def test_whiten_by_hand():
    # 1, 2, 6: mean 3, population variance (4 + 1 + 9) / 3 = 14/3, deviation 2.1602469
    x = torch.tensor([[1.0, NAN], [2.0, 6.0]])
    whitened = whiten(x, torch.tensor([[True, False], [True, True]]))
    torch.testing.assert_close(whitened, torch.tensor([[-0.9258201, 0.0], [-0.4629100, 1.3887301]]))


def test_whitened_values_have_mean_zero_and_variance_one_whatever_their_offset():
    torch.manual_seed(0)
    mask = torch.rand(64, 16) < 0.7
    x = torch.randn(64, 16, dtype=torch.float64)
    for offset, spread in ((0.0, 1.0), (1e6, 1.0), (-5.0, 100.0)):
        whitened = whiten(offset + spread * x, mask)
        assert whitened[mask].mean().item() == pytest.approx(0, abs=1e-6)
        assert whitened[mask].var(correction=0).item() == pytest.approx(1, abs=1e-6)
        torch.testing.assert_close(whitened[mask].argsort(), x[mask].argsort())
        assert (whitened[~mask] == 0).all()


def test_whitening_is_precise_for_float32_inputs_with_a_large_mean():
    # 0, 1, …, 7 over and over: mean 3.5, variance (64 − 1)/12 = 5.25; all exact in float32 beside 10⁶.
    steps = torch.arange(8.0).repeat(1001)
    torch.testing.assert_close(whiten(1e6 + steps, torch.ones(8008).bool()), (steps - 3.5) / math.sqrt(5.25))


@pytest.mark.parametrize("x", [[5.0, NAN, NAN], [NAN, NAN, NAN], [0.1, 0.1, 0.1], [1e8, 1e8, NAN]])
def test_one_value_no_value_and_equal_values_whiten_to_zero(x):
    x = torch.tensor(x)
    torch.testing.assert_close(whiten(x, ~x.isnan()), torch.zeros(3))


def test_whiten_returns_float32_without_a_graph_and_does_not_modify_its_input():
    x = torch.tensor([1.0, 2.0]).bfloat16().requires_grad_()
    whitened = whiten(x, torch.ones(2).bool())
    assert whitened.dtype == torch.float32 and not whitened.requires_grad and x.tolist() == [1.0, 2.0]


def ragged_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 3 + 2 * torch.randn(6, 5, generator=generator)
    mask = torch.rand(6, 5, generator=generator) < 0.6
    mask[5] = False
    return x.masked_fill(~mask, NAN), mask


def whiten_a_share(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    x, mask = ragged_batch()
    rows = slice(0, 5) if rank == 0 else slice(5, 6)  # the second rank has no valid token
    halves = slice(0, 2) if rank == 0 else slice(2, 6)
    alone = dist.new_group([0]), dist.new_group([1])
    results = [whiten(x[rows], mask[rows]), whiten(x[halves], mask[halves])]
    results.append(whiten(x[halves], mask[halves], group=alone[rank]))
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_whiten_as_one_batch_and_groups_of_one_separately(tmp_path):
    x, mask = ragged_batch()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(whiten_a_share, args=(port, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    whole = whiten(x, mask)
    torch.testing.assert_close(torch.cat([first[0], second[0]]), whole)
    torch.testing.assert_close(torch.cat([first[1], second[1]]), whole)
    torch.testing.assert_close(first[2], whiten(x[:2], mask[:2]))
    torch.testing.assert_close(second[2], whiten(x[2:], mask[2:]))
    assert not torch.allclose(first[2], whole[:2])


# --- positions -------------------------------------------------------------------------------------------------------


def test_positions_count_real_tokens_and_are_zero_on_padding():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0]]).bool()
    expected = [[0, 0, 0, 1, 2], [0, 1, 2, 0, 0], [0, 0, 0, 1, 2], [0, 0, 0, 0, 0]]
    positions = position_ids(mask)
    assert positions.tolist() == expected and positions.dtype == torch.long


# --- log-probs -------------------------------------------------------------------------------------------------------


def test_logprobs_of_labels_by_hand():
    # softmax(ln 1, ln 2, ln 5) = 1/8, 2/8, 5/8
    logits = torch.tensor([[1.0, 2.0, 5.0], [5.0, 2.0, 1.0]]).log()
    logprobs = logprobs_of(logits, torch.tensor([1, 0]))
    torch.testing.assert_close(logprobs, torch.tensor([0.25, 0.625]).log())


def test_logprobs_of_a_batch_are_those_of_each_of_its_positions():
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, 1, 2], [3, 3, 0]])
    logprobs = logprobs_of(logits, labels)
    torch.testing.assert_close(logprobs, torch.distributions.Categorical(logits=logits).log_prob(labels))


def test_logprobs_are_float32_and_exact_for_large_half_precision_logits():
    logits = torch.tensor([[[30000.0, 29984.0]]]).half()
    original = logits.clone()
    logprobs = logprobs_of(logits, torch.tensor([[1]]))
    assert logprobs.dtype == torch.float32 and logprobs.shape == (1, 1)
    assert logprobs.item() == pytest.approx(-16 - math.log1p(math.exp(-16)), rel=1e-6)
    assert torch.equal(logits, original)


def head(n: int = 11, h: int = 6, v: int = 13, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    make = {"dtype": torch.float64, "generator": generator}
    hidden, weight = torch.randn(n, h, **make), torch.randn(v, h, **make)
    bias = torch.randn(v, **make)
    leaves = {"hidden": hidden, "weight": weight, "bias": bias}
    leaves = {name: x.to(dtype).requires_grad_() for name, x in leaves.items()}
    return leaves | {"labels": torch.randint(0, v, (n,), generator=generator)}


CASES = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 2.0},
    "everything": {"temperature": 1.3, "scale": 1.7, "softcap": 3.0, "bias": True},
}


@pytest.mark.parametrize("chunk_size", [1, 4, 11, 1024])
@pytest.mark.parametrize("case", CASES)
def test_linear_logprobs_and_entropy_equal_softmax_over_full_logits_forward_and_backward(case, chunk_size):
    inputs = head()
    options = dict(CASES[case])
    leaves = [inputs["hidden"], inputs["weight"]]
    bias = None
    if options.pop("bias", False):
        bias = inputs["bias"]
        leaves.append(bias)
    labels = inputs["labels"]
    chunks = {"chunk_size": chunk_size, "with_entropy": True}
    logprobs, entropy = linear_logprobs(*leaves[:2], labels, bias=bias, **chunks, **options)

    logits = options.get("scale", 1.0) * (inputs["hidden"] @ inputs["weight"].T + (0 if bias is None else bias))
    if "softcap" in options:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    distribution = torch.distributions.Categorical(logits=logits / options.get("temperature", 1.0))
    torch.testing.assert_close(logprobs, distribution.log_prob(labels))
    torch.testing.assert_close(entropy, distribution.entropy())

    weights = torch.randn(2, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((weights[0] * logprobs + weights[1] * entropy).sum(), leaves)
    reference = (weights[0] * distribution.log_prob(labels) + weights[1] * distribution.entropy()).sum()
    torch.testing.assert_close(gradients, torch.autograd.grad(reference, leaves))


@pytest.mark.parametrize("chunk_size", [1, 3, 64])
def test_the_most_likely_label_is_that_of_the_full_logits(chunk_size):
    """Labels: the argmax of even rows, another column in odd ones; a tie of the maximum counts as most likely."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 6, generator=generator), torch.randn(20, 6, generator=generator)
    weight[11] = weight[(hidden @ weight.T).argmax(1)[8]]
    best = (hidden @ weight.T).argmax(1)
    labels = torch.where(torch.arange(9) % 2 == 0, best, (best + 1) % 20)
    labels[8] = 11
    logprobs, is_top = linear_logprobs(
        hidden, weight, labels, chunk_size=chunk_size, with_top=True, temperature=0.7, softcap=3.0
    )
    assert is_top.tolist() == [True, False] * 4 + [True]
    alone = linear_logprobs(hidden, weight, labels, chunk_size=chunk_size, temperature=0.7, softcap=3.0)
    assert torch.equal(alone, logprobs)
    *_, entropy, with_both = linear_logprobs(hidden, weight, labels, with_entropy=True, with_top=True)
    assert entropy.shape == (9,) and with_both.dtype == torch.bool


def test_linear_logprobs_without_entropy_returns_one_tensor_with_the_same_gradient():
    inputs = head()
    leaves = [inputs["hidden"], inputs["weight"]]
    alone = linear_logprobs(*leaves, inputs["labels"], chunk_size=4)
    paired, _ = linear_logprobs(*leaves, inputs["labels"], chunk_size=4, with_entropy=True)
    torch.testing.assert_close(alone, paired)
    torch.testing.assert_close(torch.autograd.grad(alone.sum(), leaves), torch.autograd.grad(paired.sum(), leaves))


def test_entropy_of_a_uniform_distribution_is_the_log_of_its_size():
    _, entropy = linear_logprobs(torch.zeros(3, 2), torch.ones(5, 2), torch.zeros(3).long(), with_entropy=True)
    torch.testing.assert_close(entropy, torch.full((3,), math.log(5)))


@pytest.mark.parametrize("chunk_size", [2, 1024])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tokens_with_a_bias_of_minus_infinity_do_not_affect_log_probs_or_entropy(dtype, chunk_size):
    """Log-probs, entropies and gradients equal those of a head without these rows."""
    inputs = head(dtype=dtype)
    included = torch.tensor([i not in (3, 7, 12) for i in range(13)])
    labels = (inputs["labels"] % int(included.sum())).clone()
    excluded = inputs["bias"].detach().masked_fill(~included, -INF).requires_grad_()
    options = {"with_entropy": True, "chunk_size": chunk_size, "temperature": 0.7, "scale": 1.5}
    whole = [inputs["hidden"], inputs["weight"], excluded]
    actual = linear_logprobs(*whole[:2], included.nonzero().squeeze(1)[labels], bias=whole[2], **options)
    small = [inputs["hidden"], inputs["weight"][included].detach().requires_grad_(),
             inputs["bias"][included].detach().requires_grad_()]  # fmt: skip
    expected = linear_logprobs(*small[:2], labels, bias=small[2], **options)
    torch.testing.assert_close(actual, expected)
    gradients = torch.autograd.grad(actual[0].sum() + 2 * actual[1].sum(), whole)
    expected_gradients = torch.autograd.grad(expected[0].sum() + 2 * expected[1].sum(), small)
    for name, gradient, other in zip(("hidden", "weight", "bias"), gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient if name == "hidden" else gradient[included], other)
        assert name == "hidden" or (gradient[~included] == 0).all()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_without_rows_every_parameter_has_a_zero_gradient(with_entropy):
    inputs = head(n=0)
    leaves = [inputs["hidden"], inputs["weight"], inputs["bias"]]
    result = linear_logprobs(*leaves[:2], inputs["labels"], bias=leaves[2], with_entropy=with_entropy)
    total = sum(x.sum() for x in result) if with_entropy else result.sum()
    total.backward()
    for leaf in leaves:
        assert leaf.grad is not None and (leaf.grad == 0).all()


def test_half_precision_heads_give_float32_logprobs_of_their_own_logits():
    inputs = head(dtype=torch.bfloat16)
    logprobs = linear_logprobs(inputs["hidden"], inputs["weight"], inputs["labels"], temperature=0.9, chunk_size=4)
    assert logprobs.dtype == torch.float32
    logits = F.linear(inputs["hidden"], inputs["weight"]).float() / 0.9
    torch.testing.assert_close(logprobs, torch.distributions.Categorical(logits=logits).log_prob(inputs["labels"]))
    logprobs.sum().backward()
    assert inputs["weight"].grad.dtype == inputs["hidden"].grad.dtype == torch.bfloat16


def test_a_float32_head_over_half_precision_states_computes_in_float32():
    inputs = head(dtype=torch.float32)
    states = inputs["hidden"].detach().bfloat16()
    logprobs = linear_logprobs(states, inputs["weight"], inputs["labels"])
    logits = states.float() @ inputs["weight"].T
    torch.testing.assert_close(logprobs, torch.distributions.Categorical(logits=logits).log_prob(inputs["labels"]))


def test_no_logits_are_saved_for_backward():
    n, h, v, chunk = 512, 4, 64, 32
    hidden, weight = torch.randn(n, h, requires_grad=True), torch.randn(v, h, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        result = linear_logprobs(hidden, weight, torch.zeros(n).long(), with_entropy=True, chunk_size=chunk)
    distinct = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() // 4 for x in saved}
    # hidden, weight, labels (8 bytes each); of each row the largest logit, the sum of the exponentials, the entropy
    assert sum(distinct.values()) <= n * h + v * h + 2 * n + 3 * n < n * v
    assert result[0].requires_grad


@pytest.mark.parametrize(
    ("option", "message"),
    [({"temperature": 0.0}, "temperature is 0.0"), ({"temperature": NAN}, "is nan"), ({"chunk_size": 0}, "is 0 rows")],
)
def test_invalid_temperatures_and_chunk_sizes_are_refused(option, message):
    inputs = head()
    with pytest.raises(ValueError, match=message):
        linear_logprobs(inputs["hidden"], inputs["weight"], inputs["labels"], **option)


# --- random numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_test_vectors_of_random123(counter, key, expected):
    words = tuple(torch.tensor([int(word, 16)]) for word in counter.split())
    low, high = (int(word, 16) for word in key.split())
    assert [f"{word.item():08x}" for word in philox(words, (low, high))] == expected.split()


def philox_in_python(counter: list[int], key: list[int]) -> int:
    """First output word, in unbounded Python integers, written from the paper's round function."""
    left0, right0, left1, right1 = counter
    for round_index in range(10):
        key0, key1 = (key[0] + round_index * 0x9E3779B9) % 2**32, (key[1] + round_index * 0xBB67AE85) % 2**32
        high0, low0 = divmod(left0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(left1 * 0xCD9E8D57, 2**32)
        left0, right0, left1, right1 = high1 ^ right0 ^ key0, low1, high0 ^ right1 ^ key1, low0
    return left0


@pytest.mark.parametrize(("seed", "iteration"), [(0, 0), (42, 7), (2**40 + 3, 2**31), (-1, 1)])
def test_uniforms_are_a_function_of_seed_iteration_sample_and_position(seed, iteration):
    sample_ids, positions = torch.tensor([0, 1, 5, 2**35 + 9]), torch.tensor([0, 3, 3, 100_000])
    uniforms = seeded_uniform(seed, iteration, sample_ids, positions).tolist()
    for u, sample, t in zip(uniforms, sample_ids.tolist(), positions.tolist(), strict=True):
        key = [seed % 2**32, seed // 2**32 % 2**32]
        word = philox_in_python([t, sample % 2**32, sample // 2**32, iteration], key)
        assert u == ((word >> 9) + 0.5) / 2**23


def test_uniforms_do_not_depend_on_batch_order_batch_size_or_the_shape_of_positions():
    ids = torch.tensor([3, 1, 4, 15])
    together = seeded_uniform(1, 2, ids, 6)
    assert together.dtype == torch.float32 and together.shape == (4,)
    assert torch.equal(seeded_uniform(1, 2, ids.flip(0), 6).flip(0), together)
    assert torch.equal(torch.cat([seeded_uniform(1, 2, ids[i : i + 1], 6) for i in range(4)]), together)
    assert torch.equal(seeded_uniform(1, 2, ids, torch.full((4,), 6)), together)
    table = seeded_uniform(1, 2, ids[:, None], torch.arange(9))  # [B, T] at once
    assert table.shape == (4, 9) and torch.equal(table[:, 6], together)


def test_every_input_changes_the_uniform_number():
    ids, base = torch.arange(64), {"seed": 1, "iteration": 2, "position": 3}
    reference = seeded_uniform(sample_ids=ids, **base)
    assert reference.unique().numel() == 64
    for change in ({"seed": 2}, {"seed": 1 + 2**32}, {"iteration": 3}, {"position": 4}):
        assert (seeded_uniform(sample_ids=ids, **(base | change)) != reference).all()
    assert (seeded_uniform(sample_ids=ids + 2**32, **base) != reference).all()


def test_the_smallest_and_largest_words_map_strictly_between_zero_and_one():
    assert open_unit_interval(torch.tensor([0, 2**31, 2**32 - 1])).tolist() == [2.0**-24, 0.5 + 2.0**-24, 1 - 2.0**-24]


def test_uniforms_are_uniform_and_uncorrelated_along_every_axis():
    u = seeded_uniform(123, 0, torch.arange(512)[:, None], torch.arange(512)).double()
    counts = torch.histc(u, bins=64, min=0, max=1)
    chi_square = ((counts - u.numel() / 64) ** 2 / (u.numel() / 64)).sum().item()
    assert 30 < chi_square < 110  # 63 degrees of freedom: mean 63, deviation 11
    # A correlation over 2¹⁸ pairs has a deviation of 2⁻⁹ = 0.002.
    other = seeded_uniform(123, 1, torch.arange(512)[:, None], torch.arange(512)).double()
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u, u.T), (u, other)):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()) < 0.01
