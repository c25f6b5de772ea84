"""The diagnosis of a rollout engine names each injected fault, and finds none in engines without one."""

import copy
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_causal_lm

from dschat.generation import Capabilities, HybridEngine, SamplingParams, TransformersEngine
from dschat.models.lora import add_lora, without_adapters
from dschat.rlhf.rollouts.diagnosis import Scoring, delta, diagnose

PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12], [5, 3, 9, 20, 21, 22, 23]]
SAMPLING = SamplingParams(temperature=0.7, top_k=40)


class FaultyEngine:
    """A hybrid engine over a copy of the model; `fault` overrides one of its steps."""

    capabilities = Capabilities(streams=False, reproducible=True, separate_weights=True)

    def __init__(self, model):
        self.model, self.copy = model, copy.deepcopy(model)
        self.engine = HybridEngine(self.copy)

    def synchronise(self):
        self.copy.load_state_dict(self.model.state_dict())

    @contextmanager
    def generation(self):
        self.synchronise()
        with self.engine.generation():
            yield

    def generate(self, prompts, **request):
        return self.engine.generate(prompts, **request)


class WithoutFault(FaultyEngine):
    pass


class OneUpdateBehind(FaultyEngine):
    def synchronise(self):
        pass


class WithoutOneLayer(FaultyEngine):
    part = "layers.1."

    def synchronise(self):
        own, new = self.copy.state_dict(), self.model.state_dict()
        self.copy.load_state_dict({name: own[name] if self.part in name else new[name] for name in new})


class WithoutOneMatrix(WithoutOneLayer):
    part = "layers.0.mlp."


class WithoutAdapters(FaultyEngine):
    @contextmanager
    def generation(self):
        with without_adapters(self.copy), super().generation():
            yield


class Rescored(FaultyEngine):
    """Tokens of a correct engine with log-probs of another scoring."""

    scoring = Scoring(sampling=SamplingParams())

    def generate(self, prompts, **request):
        rollout = super().generate(prompts, **request)
        if not request["sampling"].greedy:
            rollout.logprobs = rollout.logprobs + delta(self.model, rollout, self.scoring)
        return rollout


class BeforeTemperature(Rescored):
    pass


class ShiftedPositions(Rescored):
    scoring = Scoring(sampling=SAMPLING, position_gap=1)


class Unscaled(FaultyEngine):
    def __init__(self, model):
        super().__init__(model)
        self.copy.config.logits_scaling = 1.0
        if hasattr(self.copy, "logits_scaling"):
            self.copy.logits_scaling = 1.0
        self.engine = HybridEngine(self.copy)


class TwiceTheLogits(Rescored):
    scoring = Scoring(sampling=SAMPLING, logit_scale=2.0)


class UnknownIds(FaultyEngine):
    """Samples ids that the tokenizer does not have."""

    def generate(self, prompts, **request):
        return super().generate(prompts, **request | {"sampling": replace(request["sampling"], vocabulary_size=None)})


class AnotherTemplate(FaultyEngine):
    def generate(self, prompts, **request):
        return super().generate([[30, *prompt] for prompt in prompts], **request)


FAULTS = {  # family, start of the verdict
    OneUpdateBehind: ("llama", "stale weights: the engine has the weights of one update before"),
    WithoutOneLayer: ("llama", "stale weights: model.layers.1 was not synchronised"),
    WithoutOneMatrix: ("llama", "stale weights: model.layers.0.mlp was not synchronised"),
    WithoutAdapters: ("llama", "adapters"),
    BeforeTemperature: ("llama", "sampling distribution: the engine's log-probs are those before temperature"),
    ShiftedPositions: ("gpt2", "positions: those of response tokens are shifted by 1"),
    Unscaled: ("granite", "wrong scale: the engine leaves out"),
    TwiceTheLogits: ("llama", "wrong scale: the engine's logits are 2.0 times"),
    UnknownIds: ("llama", "sampling distribution: the engine samples ids beyond"),
    AnotherTemplate: ("llama", "template"),
}


def model_of(family, *, adapters=False, seed=0):
    torch.manual_seed(seed)
    model = tiny_causal_lm(family)
    if adapters:
        add_lora(model, dim=4, module_name="", only_optimize_lora=True)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B" in name:
                    parameter.normal_(std=0.3)
    return model


def report_of(model, engine, *, sampling=SAMPLING, seed=0):
    return diagnose(
        model, engine, PROMPTS, sampling=sampling, max_new_tokens=12, eos_token_ids=[2], pad_token_id=0, seed=seed
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_an_injected_fault_is_named(fault):
    family, expected = FAULTS[fault]
    model = model_of(family, adapters=fault is WithoutAdapters)
    vocabulary = model.config.vocab_size // 2 if fault is UnknownIds else None
    report = report_of(model, fault(model), sampling=replace(SAMPLING, vocabulary_size=vocabulary))
    assert report.verdict.startswith(expected), report.verdict
    assert report.worst and report.rollout_gap.shape == report.rollout.response_mask.shape


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("make", [HybridEngine, TransformersEngine])
def test_an_engine_without_a_fault_gives_no_verdict(make, seed):
    family = ("llama", "gpt2", "granite", "gemma2", "qwen3")[seed % 5]
    model = model_of(family, adapters=seed == 5, seed=seed)
    sampling = (SAMPLING, SamplingParams(vocabulary_size=50), SamplingParams(temperature=1.3, top_p=0.9))[seed % 3]
    report = report_of(model, make(model), sampling=sampling, seed=seed)
    assert report.verdict == "" and report.greedy_agreement == 1.0
    assert report.before.mean < 1e-4 and report.after.mean < 1e-4 and report.after.ratio == pytest.approx(1, abs=1e-3)


def test_weights_are_the_changed_ones_afterwards_and_an_update_is_large_enough_to_be_seen():
    model = model_of("llama")
    before = copy.deepcopy(model.state_dict())
    engine = OneUpdateBehind(model)
    report = report_of(model, engine)
    assert report.after.mean > 0.01 > report.before.mean
    assert all(not torch.equal(weight, before[name]) for name, weight in model.named_parameters())
