"""TransformersDecoder gives the same rollouts as Decoder."""

import json

import pytest
import torch
from programs import MAINS
from rlhf_models import QUESTIONS, save_models
from tiny_models import tiny_causal_lm

from dschat.generation import ROLLOUT_ENGINES, Decoder, EngineSettings, SamplingParams, TransformersDecoder

PROMPTS = [[5, 6, 7], [9], [3, 4, 8, 8, 1, 2, 0, 9, 9], [5, 6, 7], [11, 12]]
FAMILIES = ["llama", "qwen2", "gpt2", "opt", "gpt-neox", "gemma"]


def both(name: str, **changes):
    settings = {"max_new_tokens": 12, "eos_token_ids": list(range(3, 67, 7)), "pad_token_id": 0, "seed": 5} | changes
    model, slots = tiny_causal_lm(name).eval(), settings.pop("slots", None)
    return [decoder(model, slots=slots).generate(PROMPTS, **settings) for decoder in (Decoder, TransformersDecoder)]


def assert_equal(expected, actual) -> None:
    for name, value in vars(expected).items():
        torch.testing.assert_close(getattr(actual, name), value, atol=1e-4, rtol=1e-4, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(temperature=0), SamplingParams(temperature=1.4), SamplingParams(2.0, top_k=9, top_p=0.8)],
)
def test_rollouts_equal_those_of_decoder_token_by_token(name, sampling):
    expected, actual = both(name, sampling=sampling)
    assert_equal(expected, actual)
    lengths = expected.response_mask.sum(1)
    assert sampling.greedy or len(set(lengths.tolist())) > 1, "rows of one length prove little"


@pytest.mark.parametrize("eos", [None, [], 3, [3, 0]])
def test_eos_ids_in_any_form_and_a_pad_token_equal_to_the_eos(eos):
    assert_equal(*both("llama", eos_token_ids=eos, sampling=SamplingParams(3.0)))


def test_batch_size_does_not_change_the_numbers_drawn_for_a_sample_and_iteration():
    ids = torch.tensor([2**40, 7, 9, 8, 0])
    expected, actual = both("llama", sampling=SamplingParams(1.4), slots=2, sample_ids=ids, iteration=3)
    assert_equal(expected, actual)
    assert expected.responses() != both("llama", sampling=SamplingParams(1.4))[1].responses()


def test_each_row_has_its_own_limit():
    limits = [3, 1, 12, 7, 5]
    expected, actual = both("llama", max_new_tokens=limits, eos_token_ids=None)
    assert_equal(expected, actual)
    assert expected.response_mask.sum(1).tolist() == limits


def test_sampling_ignores_torchs_generator_and_the_models_generation_config():
    model = tiny_causal_lm("llama").eval()
    expected = TransformersDecoder(model).generate(PROMPTS, max_new_tokens=8, eos_token_ids=None, pad_token_id=0)
    model.generation_config.repetition_penalty = 50.0
    model.generation_config.max_length = 3
    model.generation_config.eos_token_id = 5
    state = torch.get_rng_state()
    actual = TransformersDecoder(model).generate(PROMPTS, max_new_tokens=8, eos_token_ids=None, pad_token_id=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal(expected, actual)


def test_every_rollout_engine_of_the_suite_gives_the_same_rollout():
    model = tiny_causal_lm("gpt2")
    rollouts = []
    for make in (make for name, make in ROLLOUT_ENGINES.items() if name != "vllm"):
        actor = make(model, EngineSettings())
        with actor.generation():
            rollouts.append(actor.generate(PROMPTS, max_new_tokens=6, eos_token_ids=[3], pad_token_id=0, seed=1))
    assert_equal(*rollouts)
    assert model.training


def test_samples_of_step_3_are_the_same_with_either_decoder_and_on_any_number_of_ranks(programs, tmp_path):
    folder = save_models(tmp_path)
    for name, questions in (("often", QUESTIONS[:2]), ("seldom", QUESTIONS[2:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": q}) + "\n" for q in questions))
    results = []
    for processes, hybrid in ((1, True), (1, False), (2, True)):
        output = tmp_path / f"{processes}-{hybrid}"
        settings = {
            "actor_model_name_or_path": folder / "actor", "reward_model_name_or_path": folder / "reward",
            "output_dir": output, "dtype": "fp32", "eval_fraction": 0, "max_prompt_seq_len": 64,
            "max_answer_seq_len": 8, "per_device_generation_batch_size": 8 // processes,
            "per_device_training_batch_size": 8 // processes, "enable_hybrid_engine": hybrid, "actor_zero_stage": 0,
            "critic_zero_stage": 0, "actor_learning_rate": 1e-4,
        }  # fmt: skip
        argv = [word for name, value in settings.items() for word in (f"--{name}", value)]
        sources = [f"{tmp_path / 'often.jsonl'}:0.9", f"{tmp_path / 'seldom.jsonl'}:0.1"]
        programs.run(MAINS["ppo"], [*argv, "--data_path", *sources], processes=processes, log=tmp_path / "log")
        samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
        metrics = json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])
        results.append((sorted((s["prompt"], s["response"]) for s in samples), metrics["kl"], metrics["score"]))
    one_rank, plain, two_ranks = results
    assert one_rank[0] == plain[0] and one_rank[1:] == pytest.approx(plain[1:], abs=1e-5)
    assert two_ranks[1:] == pytest.approx(one_rank[1:], abs=1e-5)
    assert two_ranks[0] == one_rank[0]
    prompts = [prompt for prompt, _ in one_rank[0]]
    assert len(set(prompts)) < len(prompts) - 2 and len(set(one_rank[0])) == len(prompts), (
        "repeated prompts get different responses"
    )
