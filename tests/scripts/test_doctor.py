"""scripts/doctor.py: report, verdict and exit status."""

import sys
from contextlib import contextmanager

import pytest
from repository import SCRIPTS
from rlhf_models import group_of_one, save_models

sys.path.insert(0, str(SCRIPTS))

import doctor  # noqa: E402

from dschat.generation import ROLLOUT_ENGINES, HybridEngine  # noqa: E402


class OneUpdateBehind(HybridEngine):
    """Gives the responses of its first context again, as an engine with old weights would."""

    def __init__(self, policy, settings):
        super().__init__(policy)
        self.contexts, self.first = 0, {}

    @contextmanager
    def generation(self):
        self.contexts += 1
        with super().generation():
            yield self

    def generate(self, prompts, **request):
        greedy = request["sampling"].greedy
        if self.contexts > 1:
            return self.first[greedy]
        self.first[greedy] = super().generate(prompts, **request)
        return self.first[greedy]


@pytest.fixture
def model(tmp_path):
    return str(save_models(tmp_path) / "actor")


def run(arguments):
    with group_of_one():
        return doctor.main(["--max_new_tokens", "8", *arguments])


@pytest.mark.parametrize("arguments", [[], ["--rollout_engine", "transformers", "--top_p", "0.9"],
                                       ["--lora_dim", "2", "--dtype", "bf16"]], ids=str)  # fmt: skip
def test_an_engine_that_agrees_has_status_0(model, monkeypatch, capsys, arguments):
    monkeypatch.setattr(doctor, "QUESTIONS", ("What is 2 plus 3?", "sum"))
    assert run([model, *arguments]) == 0
    text = capsys.readouterr().out
    assert "verdict: rounding only" in text and "greedy tokens" in text and "stop tokens" in text
    assert "the model's own" in text and "largest differences" not in text


def test_a_fault_has_status_1_its_name_and_the_worst_tokens(model, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "QUESTIONS", ("What is 2 plus 3?", "sum"))
    monkeypatch.setitem(ROLLOUT_ENGINES, "hybrid", OneUpdateBehind)
    assert run([model]) == 1
    text = capsys.readouterr().out
    assert "verdict: stale weights: the engine has the weights of one update before" in text
    assert text.count("response ") >= 5 and "engine" in text


@pytest.mark.parametrize(("arguments", "expected"), [
    (["nowhere"], "nowhere"),
    (["{model}", "--max_new_tokens", "90"], "96 positions"),
], ids=["no model", "too long"])  # fmt: skip
def test_mistakes_end_with_status_2_and_a_message(model, capsys, arguments, expected):
    with pytest.raises(SystemExit) as stopped:
        doctor.main([word.format(model=model) for word in arguments])
    assert stopped.value.code == 2 and expected in capsys.readouterr().err
