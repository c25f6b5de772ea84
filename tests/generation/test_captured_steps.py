"""Captured decoding steps: reuse, invalidation when tensors move, failed captures, and host synchronisations."""

import contextlib

import pytest
import torch
from decoder_models import tiny
from test_generation import EOS, GREEDY, PROMPTS, sampled
from test_hybrid_engine import tiny_llama, with_lora
from torch.utils._python_dispatch import TorchDispatchMode

from dschat.generation import Decoder, HybridEngine, SamplingParams, decoder, scheduler, step
from dschat.generation.captured_steps import MAX_KINDS, CapturedSteps
from dschat.generation.cpu import step_recording
from dschat.generation.cpu.step_recording import record
from dschat.generation.cuda import graph
from dschat.generation.kv_pool.pool import KVPool

SETTINGS = {"max_new_tokens": 12, "eos_token_ids": EOS, "pad_token_id": 0, "seed": 3}


def rollout(actor: HybridEngine, prompts=PROMPTS, **changes):
    with actor.generation():
        return actor.generate(prompts, **{**SETTINGS, **changes})


@pytest.fixture
def recordings(monkeypatch) -> list[int]:
    """A number for each recording that is made."""
    made = []

    def counted(run):
        made.append(len(made))
        return record(run)

    monkeypatch.setattr(step, "record", counted)
    return made


@pytest.mark.parametrize("pinned", [False, True])
def test_rollouts_of_the_same_kind_are_recorded_once(recordings, pinned):
    model = tiny_llama()
    actor = HybridEngine(model, pin_buffers=pinned)
    first = rollout(actor)
    before = len(recordings)
    assert before > 0
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)  # in place, like an optimizer step
    second = rollout(actor)
    assert len(recordings) == before
    assert second.responses() == rollout(HybridEngine(model, without=["graphs"])).responses() != first.responses()


@pytest.mark.parametrize("pinned", [False, True])
def test_alternating_sampled_and_greedy_rollouts_keep_their_own_recordings(recordings, pinned):
    """As ReMax alternates: several samples of each prompt, then one greedy response to it."""
    actor = HybridEngine(tiny_llama(), pin_buffers=pinned)
    several = [prompt for prompt in PROMPTS for _ in range(3)]
    expected = None
    for number in range(3):
        if number == 1:
            before = len(recordings)
        pair = [rollout(actor, several), rollout(actor, sampling=GREEDY)]
        responses = [part.responses() for part in pair]
        assert expected in (None, responses)
        expected = responses
    assert len(recordings) == before > 0
    fresh = HybridEngine(tiny_llama(), without=["graphs"])
    assert expected == [rollout(fresh, several).responses(), rollout(fresh, sampling=GREEDY).responses()]


def test_weights_at_new_addresses_are_recorded_again(recordings):
    model = tiny_llama()
    actor = HybridEngine(model)
    rollout(actor)
    before = len(recordings)
    old = model.lm_head.weight.data
    model.lm_head.weight.data = -old
    assert rollout(actor).responses() == rollout(HybridEngine(model, without=["graphs"])).responses()
    assert len(recordings) > before


@pytest.mark.parametrize("why", ["size", "copies", "an open stream"])
def test_unpinned_buffers_are_kept_only_if_small_and_without_weight_copies_or_open_streams(monkeypatch, why):
    model = with_lora(tiny_llama()) if why == "copies" else tiny_llama()
    if why == "size":
        monkeypatch.setattr(decoder, "MAX_KEPT_BYTES", 1000)
    actor = HybridEngine(model)
    with actor.generation():
        actor.generate(PROMPTS, **SETTINGS)
        stream = actor.stream([5, 6], max_new_tokens=3, eos_token_ids=None)
        if why == "an open stream":
            next(stream)
    assert actor._decoder._pool_decoder is None and actor._decoder._responses is None
    reusable = HybridEngine(tiny_llama(), pin_buffers=why == "size")
    rollout(reusable)
    inside = reusable._decoder
    assert inside._pool_decoder.pool is not None
    pool = inside._pool_decoder.pool.size * inside._pooled.bytes_per_token
    assert inside._kept_bytes() > pool + 12 * len(PROMPTS) * (8 + 4 + 4), "pool, tables and recordings"


def test_the_least_recently_used_kind_of_captured_steps_is_evicted():
    steps = CapturedSteps()
    first = steps.get(0, "here", object)
    later = [steps.get(kind, "here", object) for kind in range(1, MAX_KINDS)]
    assert steps.get(0, "here", object) is first
    steps.get("another", "here", object)
    assert steps.get(0, "here", object) is first and steps.get(2, "here", object) is later[1]
    assert steps.get(1, "here", object) is not later[0]
    assert steps.get(0, "there", object) is not first, "other addresses invalidate all recordings"


class Graph:
    """Replaces torch.cuda.CUDAGraph. On CUDA capturing runs nothing; here it does, so the first replay is skipped."""

    def __init__(self):
        self.recording = None
        self.launches = 0

    def replay(self):
        self.launches += 1
        if self.launches > 1:
            self.recording()


class Cuda:
    """Replaces torch.cuda; its `graph` too leaves its own stream current when a capture fails."""

    CUDAGraph = Graph

    def __init__(self, *, fails: str | None = None, error: type[Exception] = RuntimeError):
        self.fails, self.error = fails, error
        self.stream, self.captures, self.reserved = "of training", 0, 0

    def current_stream(self):
        return self.stream

    def set_stream(self, stream):
        self.stream = stream

    def empty_cache(self):
        pass

    def memory_reserved(self):
        return self.reserved

    @contextlib.contextmanager
    def graph(self, graph, pool):
        self.captures += 1
        before, self.stream = self.stream, "of the capture"
        if self.fails == "begin":
            raise self.error("cannot begin")
        yield
        if self.fails == "end":
            raise self.error("cannot end")
        self.reserved += 7
        self.stream = before


@pytest.mark.parametrize("fails", ["begin", "inside", "end"])
def test_a_failed_capture_restores_the_current_stream(fails):
    cuda = Cuda(fails=fails)
    ran = []

    def run():
        ran.append(cuda.stream)
        if fails == "inside":
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match=r"cannot|not permitted"):
        graph.capture(run, memory=None, cuda=cuda)
    assert cuda.stream == "of training"
    assert ran == ([] if fails == "begin" else ["of the capture"])
    cuda.fails = None
    assert graph.capture(lambda: None, memory=None, cuda=cuda).nbytes == 7
    assert cuda.stream == "of training"


def test_out_of_memory_during_capture_does_not_disable_capturing():
    class Broken(Cuda):
        @contextlib.contextmanager
        def graph(self, graph, pool):
            try:
                yield
            finally:
                raise RuntimeError("the capture was invalidated")

    def run():
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        graph.capture(run, memory=None, cuda=Broken())


def captured_as_on_cuda(monkeypatch, cuda: Cuda) -> None:
    """Make steps use graph.capture with this fake CUDA; captured steps are recorded so that they can be replayed."""
    graphs = []

    class Recorded(Graph):
        def __init__(self):
            super().__init__()
            graphs.append(self)

    def capture(run, *, memory):
        def recorded():
            graphs[-1].recording = record(run)

        return real(recorded, memory=memory, cuda=cuda)

    real = graph.capture
    cuda.CUDAGraph = Recorded
    monkeypatch.setattr(graph, "capture", capture)
    monkeypatch.setattr(step.GraphedStep, "_run_or_record", step.GraphedStep._run_or_capture)


def test_a_batch_size_is_captured_after_enough_uncaptured_runs_and_then_replayed(monkeypatch):
    cuda = Cuda()
    captured_as_on_cuda(monkeypatch, cuda)
    model = tiny_llama()
    actor = HybridEngine(model)
    plain = HybridEngine(model, without=["graphs"])
    for changes in ({}, {"seed": 4}, {"sampling": GREEDY}, {}):
        assert rollout(actor, **changes).responses() == rollout(plain, **changes).responses()
    assert cuda.captures > 0
    before = cuda.captures
    rollout(actor)
    assert cuda.captures == before
    short = HybridEngine(model)
    rollout(short, max_new_tokens=1 + step.RUNS_BEFORE_CAPTURE)
    assert cuda.captures == before, "a size with fewer steps is not worth a capture"


@pytest.mark.parametrize("pinned", [False, True])
def test_a_model_whose_capture_fails_runs_uncaptured_and_is_not_captured_again(monkeypatch, pinned):
    cuda = Cuda(fails="end")
    monkeypatch.setattr(decoder, "MAX_KEPT_BYTES", 0)  # so that only the model stores the failure
    captured_as_on_cuda(monkeypatch, cuda)
    # A failed capture has run nothing on CUDA; the stand-in must not either.
    monkeypatch.setattr(graph, "capture", lambda run, *, memory, usual=graph.capture: usual(
        lambda: None, memory=memory))  # fmt: skip
    model = tiny_llama()
    actor = HybridEngine(model, pin_buffers=pinned)
    expected = rollout(HybridEngine(model, without=["graphs"])).responses()
    with pytest.warns(UserWarning, match="cannot be captured and runs without a CUDA graph: cannot end"):
        assert rollout(actor).responses() == expected
    assert cuda.captures == 1 and cuda.stream == "of training"
    for sampling in (SamplingParams(), GREEDY):
        rollout(actor, sampling=sampling)
    assert cuda.captures == 1 and rollout(actor).responses() == expected


class HostSyncCounter(TorchDispatchMode):
    """Counts host synchronisations: numbers, shapes or lists read from these tensors, or from any if `of` is None."""

    def __init__(self, of: list[torch.Tensor] | None = None):
        super().__init__()
        self.of = None if of is None else {tensor.untyped_storage().data_ptr() for tensor in of}
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        indices = step_recording._indices(func, args)
        reads = step_recording._reads_values(func) or any(index.dtype == torch.bool for index in indices)
        addresses = {tensor.untyped_storage().data_ptr() for tensor in step_recording.tensors(args)}
        self.count += reads and (self.of is None or bool(addresses & self.of))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("slots", [None, 4])
def test_the_host_synchronises_once_every_eight_steps_unless_it_streams(monkeypatch, slots):
    monkeypatch.setitem(scheduler.STEPS_PER_HOST_SYNC, "cpu", 8)
    prompts = [[token] for token in range(16)]
    plain = Decoder(tiny("llama"), slots=slots)
    settings = {"max_new_tokens": 41, "eos_token_ids": None}
    expected = sampled(plain, prompts, **settings).responses()
    syncs, admissions, watched = [], [], []
    usual_remove_finished, usual_admit = scheduler.Scheduler.remove_finished, scheduler.Scheduler.admit

    def remove_finished(self):
        syncs.append(1)
        watched.extend(
            [self.batch.live, self.batch.next_index, self.batch.tokens, self.responses.tokens, self.responses.lengths]
        )
        counter.of = {tensor.untyped_storage().data_ptr() for tensor in watched}
        return usual_remove_finished(self)

    def admit(self):
        admissions.append(1)
        return usual_admit(self)

    monkeypatch.setattr(scheduler.Scheduler, "remove_finished", remove_finished)
    monkeypatch.setattr(scheduler.Scheduler, "admit", admit)
    with HostSyncCounter(of=[]) as counter:
        assert sampled(plain, prompts, **settings).responses() == expected
    groups = 1 if slots is None else 4
    assert len(syncs) == groups * (1 + 5), "40 steps of each group after its first token, a host sync every 8 of them"
    # Besides the host syncs: the checks of the finished rollout, and its size.
    assert counter.count <= len(syncs) + 4


def test_host_syncs_of_a_prefill_do_not_grow_with_the_layers():
    counts = {}
    for layers in (2, 6):
        pooled = Decoder(tiny_llama(num_hidden_layers=layers).eval())._pooled
        pool = KVPool(64)
        with torch.inference_mode(), HostSyncCounter() as counter:
            pooled.prefill(pool, [[5, 6, 7], [9], [3, 4, 8, 8]], [1, 20, 40])
        counts[layers] = counter.count
    assert counts[2] == counts[6]
    pool.begin_prefill(torch.tensor([5, 3, 4]), torch.tensor([1, 2, 3]))
    states = torch.arange(8.0).view(2, 1, 2, 2)  # [rows, heads, columns, width]
    with HostSyncCounter() as counter:
        pool.update(states, -states, 9)
    assert counter.count == 0
    assert pool._buffers[9][0][3:6, 0].tolist() == [[4, 5], [6, 7], [2, 3]]
    assert pool._buffers[9][1][3:6, 0].tolist() == [[-4, -5], [-6, -7], [-2, -3]]
