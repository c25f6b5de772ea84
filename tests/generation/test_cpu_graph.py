"""CPU graphs: operations recorded once and replayed on the same tensors."""

import pytest
import torch
from torch import Tensor

from dschat.generation.cpu import cpp_kernels, step_recording


def again(function, *tensors):
    """What a replay leaves in tensors that the recording and its inputs share, for new inputs."""
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

    replay = again(run, x, state, out)
    for _ in range(3):
        x.normal_()
        wanted_state, wanted = state.clone(), out.clone()
        run(x, wanted_state, wanted)
        with torch.inference_mode():
            replay()
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(state, wanted_state)


def test_an_operation_of_several_results_and_one_without_an_out_form():
    x, sorted_x, places = torch.randn(3, 5), torch.empty(3, 5), torch.empty(3, 5, dtype=torch.long)

    def run(x, sorted_x, places):
        values, indices = x.sort(dim=1)
        sorted_x.copy_(torch.nn.functional.silu(values))
        places.copy_(indices)

    replay = again(run, x, sorted_x, places)
    x.normal_()
    with torch.inference_mode():
        replay()
    values, indices = x.sort(dim=1)
    assert torch.equal(places, indices)
    torch.testing.assert_close(sorted_x, torch.nn.functional.silu(values))


def test_a_constant_tensor_is_created_again_in_every_replay():
    out = torch.empty(3)

    def run(out):
        count = torch.zeros(3)
        count += 1
        out.copy_(count)

    replay = again(run, out)
    with torch.inference_mode():
        replay()
        replay()
    assert out.tolist() == [1, 1, 1]


def test_our_kernels_are_part_of_a_recording():
    library = cpp_kernels.load()
    x, weight, out = torch.randn(5, 8), torch.randn(8), torch.empty(5, 8)
    replay = again(lambda: out.copy_(library.rms_norm(x.t().t() * 1, weight, eps=1e-6)))
    x.normal_()
    with torch.inference_mode():
        replay()
    assert library.recorder is None
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (8,), weight, eps=1e-6))


def test_runs_that_read_values_or_allocate_too_much_are_executed_but_not_recorded(monkeypatch):
    x = torch.ones(3)
    for read in (float, int, bool, Tensor.item, Tensor.tolist, lambda x: len(x.view(1)[x.view(1) > 0])):
        x.fill_(1)
        assert again(lambda read=read: x.add_(read(x[0]))) is None
        assert x[0] in (2, 4)
    x.fill_(2)
    monkeypatch.setattr(step_recording, "MAX_BYTES", 100)
    assert again(lambda: x.copy_(torch.cat([x] * 20)[:3] + 1)) is None
    assert x.tolist() == [3, 3, 3]


def test_an_exception_leaves_no_recorder_behind():
    with pytest.raises(KeyError):
        again(lambda: {}["nothing"])
    assert cpp_kernels.load().recorder is None
