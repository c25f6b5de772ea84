"""CPU graphs: operations recorded once and replayed on the same tensors."""

import pytest
import torch
from torch import Tensor

from dschat.generation.cpu import cpp_kernels, step_recording
from dschat.generation.sampling import SamplingParams
from dschat.models.cpu import layer_kernels
from dschat.models.cpu.library import CompiledLibrary


def record(function, *tensors):
    """A replay of function on these very tensors; None if it cannot be recorded."""
    with torch.inference_mode():
        return step_recording.record(lambda: function(*tensors))


def test_views_in_place_writes_and_results_follow_new_inputs():
    x, state, out = torch.randn(4, 6), torch.zeros(4), torch.empty(3, 8)

    def run(x, state, out):
        state += x.sum(1)
        y = torch.cat([x.T[:3], x.T[3:] * 2], dim=1)  # [3, 8]
        mask = y > 0
        out.copy_(torch.where(mask, y.exp(), y.view(-1).topk(24).values.view(3, 8)))
        out[:, 0] = state[:3]

    replay = record(run, x, state, out)
    for _ in range(3):
        x.normal_()
        expected_state, expected = state.clone(), out.clone()
        run(x, expected_state, expected)
        with torch.inference_mode():
            replay()
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(state, expected_state)


def test_operations_with_several_results_or_without_an_out_variant_are_replayed():
    x, sorted_x, order = torch.randn(3, 5), torch.empty(3, 5), torch.empty(3, 5, dtype=torch.long)

    def run(x, sorted_x, order):
        values, indices = x.sort(dim=1)
        sorted_x.copy_(torch.nn.functional.silu(values))
        order.copy_(indices)

    replay = record(run, x, sorted_x, order)
    x.normal_()
    with torch.inference_mode():
        replay()
    values, indices = x.sort(dim=1)
    assert torch.equal(order, indices)
    torch.testing.assert_close(sorted_x, torch.nn.functional.silu(values))


def test_a_constant_tensor_is_created_again_in_every_replay():
    out = torch.empty(3)

    def run(out):
        count = torch.zeros(3)
        count += 1
        out.copy_(count)

    replay = record(run, out)
    with torch.inference_mode():
        replay()
        replay()
    assert out.tolist() == [1, 1, 1]


def test_cpp_kernels_are_part_of_a_recording():
    library = layer_kernels.load()
    x, weight, out = torch.randn(5, 8), torch.randn(8), torch.empty(5, 8)
    replay = record(lambda: out.copy_(library.rms_norm(x.t().t() * 1, weight, eps=1e-6)))
    x.normal_()
    with torch.inference_mode():
        replay()
    assert CompiledLibrary.recorder is None
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (8,), weight, eps=1e-6))


def test_runs_that_read_values_or_allocate_too_much_are_executed_but_not_recorded(monkeypatch):
    x = torch.ones(3)
    for read in (float, int, bool, Tensor.item, Tensor.tolist, lambda x: len(x.view(1)[x.view(1) > 0])):
        x.fill_(1)
        assert record(lambda read=read: x.add_(read(x[0]))) is None
        assert x[0] in (2, 4)
    x.fill_(2)
    monkeypatch.setattr(step_recording, "MAX_BYTES", 100)
    assert record(lambda: x.copy_(torch.cat([x] * 20)[:3] + 1)) is None
    assert x.tolist() == [3, 3, 3]


def test_an_exception_leaves_no_recorder_behind():
    with pytest.raises(KeyError):
        record(lambda: {}["nothing"])
    assert CompiledLibrary.recorder is None


@pytest.fixture
def threads():
    """Sets torch's number of threads; restored afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [2, 3, 7])  # more than there are cores, too
def test_kernels_on_a_team_give_the_bits_of_kernels_in_regions_of_their_own(count, threads):
    kernels = cpp_kernels.load()
    threads(count)
    logits, uniform = torch.randn(40, 5000), torch.rand(40)
    tokens, logprobs = torch.empty(40, dtype=torch.long), torch.empty(40)
    x, weight, out = (torch.randn(shape).bfloat16() for shape in ((40, 512), (300, 512), (40, 300)))
    packed = kernels.pack(weight) if kernels.multiplies_bf16 else None

    def run(*_):
        drawn, drawn_logprobs = kernels.sample_tokens(logits, uniform, SamplingParams())
        tokens.copy_(drawn)
        logprobs.copy_(drawn_logprobs)
        if packed is not None:
            out.copy_(kernels.linear(x, packed, None, 300))

    replay = record(run)
    assert replay.with_team
    for _ in range(20):
        logits.normal_()
        x.normal_()
        with torch.inference_mode():
            replay()
        actual = tokens.clone(), logprobs.clone(), out.clone()
        run()
        assert all(torch.equal(a, b) for a, b in zip(actual, (tokens, logprobs, out), strict=True))


def test_operations_that_torch_runs_in_several_threads_keep_them():
    x, out = torch.randn(64, 64), torch.empty(64, 64)
    assert record(lambda: out.copy_(x + 1)).with_team
    assert not record(lambda: out.copy_(x @ x)).with_team
    large = torch.zeros(200, 200)
    assert not record(lambda: large.copy_(large * 2)).with_team


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
def test_an_error_in_a_replay_is_raised_and_the_next_replay_runs(error, threads):
    threads(2)
    x, out = torch.ones(4), torch.zeros(4)
    replay = record(lambda: out.copy_(x + 1))
    failing = [True]

    def fail():
        if failing[0]:
            raise error

    replay.calls.append(fail)
    with torch.inference_mode():
        with pytest.raises(type(error)):
            replay()
        failing[0] = False
        x.fill_(5)
        replay()
    assert out.tolist() == [6.0] * 4
