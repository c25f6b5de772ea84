"""Every main.py end to end: real processes, every ZeRO stage, killed and resumed, exported and loaded."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from programs import MAINS
from step_materials import (
    assert_loads_with_plain_transformers,
    assert_same_line,
    flags,
    metrics_of,
    weights_of,
    write_materials,
    write_rows,
)
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

METRICS = {
    "sft": {"loss", "token_accuracy", "grad_norm", "learning_rate"},
    "reward": {"loss", "accuracy", "grad_norm", "learning_rate"},
    "dpo": {
        "loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected", "grad_norm",
        "learning_rate",
    },
    "ppo": {
        "score", "reward", "kl", "entropy", "response_length", "ended_by_eos", "policy_loss", "value_loss",
        "clip_fraction", "explained_variance", "actor_grad_norm", "critic_grad_norm",
    },
}  # fmt: skip
CUTS = [  # processes, ZeRO stage, accumulation; the first is the reference
    (1, 0, 1), (1, 2, 1), (1, 3, 1), (2, 0, 1), (2, 2, 1), (2, 3, 1), (1, 2, 2), (2, 3, 2),
]  # fmt: skip


@pytest.fixture(scope="session")
def materials(tmp_path_factory, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("materials")
    write_materials(folder, tiny_tokenizer)
    return folder


@pytest.fixture
def run(programs, materials, tmp_path):
    """run(step, name, …) runs a step into tmp_path/name and returns that folder; see step_materials.flags."""

    def run_step(step: str, name: str, *, processes: int = 1, kill_when=None, **settings) -> Path:
        output = tmp_path / name
        argv = flags(step, materials, output, processes=processes, **settings)
        programs.run(MAINS[step], argv, processes=processes, log=tmp_path / f"{name}.log", kill_when=kill_when)
        return output

    return run_step


@pytest.mark.parametrize("step", MAINS)
def test_curve_and_export_do_not_depend_on_processes_zero_stage_and_accumulation(step, run):
    runs = {}
    for processes, zero, accumulation in CUTS:
        output = run(
            step, f"{processes}-{zero}-{accumulation}", processes=processes, zero=zero, accumulation=accumulation
        )
        runs[processes, zero, accumulation] = metrics_of(output), output
    expected, first = runs[CUTS[0]]
    steps = 2 if step == "ppo" else 4
    order = [(line["phase"], line["step"]) for line in expected]
    assert order == [("eval", 0), *(("train", n + 1) for n in range(steps)), ("eval", steps)]
    train = [line for line in expected if line["phase"] == "train"]
    assert all(METRICS[step] <= line.keys() and None not in line.values() for line in train)
    assert all(line["grad_norm" if step != "ppo" else "actor_grad_norm"] > 0 for line in train)
    before, after = expected[0], expected[-1]
    metric = "score" if step == "ppo" else "eval_loss"
    assert abs(after[metric] - before[metric]) > 1e-2  # the comparison needs curves that change
    for cut, (metrics, output) in runs.items():
        for actual_line, expected_line in zip(metrics, expected, strict=True):
            assert_same_line(actual_line, expected_line, cut)
        for name, weight in weights_of(output).items():
            # Adam takes a step of up to lr even on a gradient that is pure rounding error.
            torch.testing.assert_close(weight, weights_of(first)[name], rtol=1e-3, atol=1e-4, msg=f"{cut} {name}")
    for cut in CUTS[0], (2, 3, 1):
        assert_loads_with_plain_transformers(step, runs[cut][1])
    if step == "ppo":
        assert_loads_with_plain_transformers("reward", first / "critic")
        samples = [json.loads(line) for line in (first / "samples.jsonl").read_text().splitlines()]
        assert {len(sample["response"]) > 0 for sample in samples} and {True, False} == {s["ended"] for s in samples}


def test_with_the_decoders_log_probs_every_iteration_logs_the_mismatch_and_truncated_sampling_warns_once(run):
    settings = {"old_logprobs": "rollout", "top_p": 0.8, "zero": 0}
    (metrics, output), (others, _) = (
        (metrics_of(folder), folder) for folder in (run("ppo", f"{n}", processes=n, **settings) for n in (1, 2))
    )
    mismatch = {"rollout_logprob_mismatch_mean", "rollout_logprob_mismatch_max", "rollout_ratio"}
    for line, expected_line in zip(metrics, others, strict=True):
        assert_same_line(line, expected_line, "two processes")
        assert mismatch & line.keys() == (mismatch if line["phase"] == "train" else set())
        assert line["phase"] == "eval" or 0.8 <= line["rollout_ratio"] < 1  # the probability mass that was kept
    for processes in (1, 2):
        assert output.with_name(f"{processes}.log").read_text().count("--top_p 0.8 with --old_logprobs rollout") == 1


def test_packed_training_does_not_depend_on_the_micro_batch_and_evaluates_as_unpacked(run):
    (first, _), (cut, _), (plain, _) = (
        (metrics_of(run("sft", name, max_steps=2, **settings)), name)
        for name, settings in {
            "packed": {"packing": True, "zero": 0},
            "packed and cut": {"packing": True, "zero": 3, "processes": 2},
            "plain": {"zero": 0},
        }.items()
    )
    for line, expected_line in zip(cut, first, strict=True):
        assert_same_line(line, expected_line, "two processes")
    assert_same_line(first[0], plain[0], "evaluation before training")
    assert first[1]["loss"] != plain[1]["loss"]  # more conversations a step


OFFLOAD = {"offload": True, "gradient_checkpointing": True, "max_steps": 2}


@pytest.mark.parametrize(
    "step, zero, settings",
    [
        ("sft", 2, OFFLOAD),
        ("reward", 3, OFFLOAD),
        ("ppo", 3, OFFLOAD | {"offload_reference_model": True, "offload_reward_model": True}),
    ],
)
def test_offload_and_recomputed_activations_do_not_change_the_curve(step, zero, settings, run):
    plain = metrics_of(run(step, "plain", zero=zero, max_steps=2))
    saving = metrics_of(run(step, "saving", zero=zero, **settings))
    for line, expected_line in zip(saving, plain, strict=True):
        assert_same_line(line, expected_line, "offload")


@pytest.mark.parametrize("step", MAINS)
def test_bf16_trains_under_zero_0_2_and_3_close_to_fp32(step, run):
    first = "kl" if step == "ppo" else "loss"
    settings = {"max_steps": 2, "enable_tensorboard": True}
    exact = metrics_of(run(step, "fp32", max_steps=2))
    for zero in (0, 2, 3):  # each has an optimizer of its own in DeepSpeed; 1 shares that of 2
        output = run(step, f"zero-{zero}", zero=zero, dtype="bf16", **settings)
        rounded = metrics_of(output)
        assert [line["step"] for line in rounded] == [line["step"] for line in exact]
        assert all(value is not None for line in rounded for value in line.values())
        assert rounded[0].get("eval_loss", 0) == pytest.approx(exact[0].get("eval_loss", 0), rel=0.05)
        assert rounded[1][first] == pytest.approx(exact[1][first], rel=0.05, abs=0.05)
        assert {weight.dtype for weight in weights_of(output).values()} == {torch.bfloat16}
        assert list((output / "tensorboard").iterdir())


@pytest.mark.parametrize(
    "step, settings",
    [
        ("sft", {"zero": 2, "processes": 1, "max_steps": 8, "dropout": 0.1}),
        ("ppo", {"zero": 3, "processes": 2, "max_steps": 4, "enable_ema": True, "actor_dropout": 0.1}),
    ],
)
def test_a_killed_and_resumed_run_equals_the_unbroken_one(step, settings, run, tmp_path):
    unbroken = run(step, "unbroken", save_interval=2, **settings)
    checkpoints = tmp_path / "broken" / "checkpoints"
    # SFT dies while it writes its second checkpoint, PPO in the iteration after its first.
    marker = checkpoints / (".step-00000004.tmp" if step == "sft" else "latest")
    run(step, "broken", save_interval=2, kill_when=marker.exists, **settings)
    assert not (tmp_path / "broken" / "model.safetensors").exists()
    assert (checkpoints / "latest").read_text() in ("step-00000002", "step-00000004")
    resumed = run(step, "broken", save_interval=2, resume="auto", **settings)
    assert metrics_of(resumed) == metrics_of(unbroken)
    folders = [""] if step == "sft" else ["", "critic", "actor_ema"]
    for folder in folders:
        actual, expected = weights_of(resumed / folder), weights_of(unbroken / folder)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected), folder
    if step == "ppo":
        assert (resumed / "samples.jsonl").read_text() == (unbroken / "samples.jsonl").read_text()
    assert sorted(path.name for path in checkpoints.iterdir())[-1].startswith("step-")
    assert not list(checkpoints.glob(".step*"))


@pytest.mark.parametrize("step, metric, mode", [("sft", "eval_loss", "min"), ("dpo", "rewards/accuracies", "max")])
def test_the_best_model_of_steps_1_and_2_survives_a_kill(step, metric, mode, run, tmp_path):
    settings = {"best_metric": metric, "best_mode": mode, "eval_interval": 1, "eval_fraction": 0.2}
    whole = run(step, "whole", **settings)
    values = [line[metric] for line in metrics_of(whole) if line["phase"] == "eval"]
    best = {"min": min, "max": max}[mode](values)
    assert len(set(values)) > 1
    assert json.loads((whole / "best" / "best.json").read_text()) == {"step": values.index(best), metric: best}
    assert_loads_with_plain_transformers(step, whole / "best")
    killed = tmp_path / "killed"
    settings |= {"save_interval": 1, "resume": "auto"}
    run(step, "killed", kill_when=lambda: (killed / "checkpoints" / "step-00000002").exists(), **settings)
    run(step, "killed", **settings)
    assert (killed / "best" / "best.json").read_text() == (whole / "best" / "best.json").read_text()
    for name, weight in weights_of(whole / "best").items():
        assert torch.equal(weights_of(killed / "best")[name], weight)


@pytest.mark.parametrize("zero, processes", [(0, 1), (3, 2)])
def test_the_exported_ema_is_the_average_of_the_actors_weights(zero, processes, run, materials, tmp_path):
    """Two updates with decay d: a = d (d w0 + (1 - d) w1) + (1 - d) w2; the run is resumed between them."""
    settings = {"zero": zero, "processes": processes, "enable_ema": True, "ema_decay": 0.75, "ppo_epochs": 1,
                "per_device_training_batch_size": 8 // processes, "lr_scheduler_type": "constant",
                "save_interval": 1, "resume": "auto"}  # fmt: skip
    run("ppo", "run", max_steps=1, **settings)
    first = weights_of(tmp_path / "run")
    output = run("ppo", "run", max_steps=2, **settings)
    second, average = weights_of(output), weights_of(output / "actor_ema")
    start = weights_of(materials / "actor")
    assert average.keys() == start.keys()
    for name in average:
        expected = 0.75 * (0.75 * start[name] + 0.25 * first[name]) + 0.25 * second[name]
        assert not torch.equal(first[name], start[name]) and not torch.equal(first[name], second[name]), name
        torch.testing.assert_close(average[name], expected, rtol=0, atol=1e-6)


def test_only_adapters_are_trained_and_the_export_is_plain(run, materials):
    output = run(
        "ppo", "lora", processes=2, zero=3, actor_lora_dim=2, critic_lora_dim=2, only_optimize_lora=True,
        lora_learning_rate=1e-2, lora_alpha=6, lora_target_modules=["q_proj", "down_proj", "v_proj"],
        export_adapters="beside",
    )  # fmt: skip
    ids = torch.tensor([[5, 6, 7, 8]])
    for folder, origin, auto in (
        (output, "actor", AutoModelForCausalLM), (output / "critic", "reward", AutoModelForSequenceClassification),
    ):  # fmt: skip
        config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
        assert (config["lora_alpha"], config["base_model_name_or_path"]) == (6, str(materials / origin))
        assert (folder / "adapter" / "tokenizer_config.json").exists()
        base = auto.from_pretrained(materials / origin, num_labels=1) if origin == "reward" else auto.from_pretrained(
            materials / origin
        )  # fmt: skip
        merged = auto.from_pretrained(folder)
        with torch.no_grad():
            plain = base(ids).logits.clone()
            adapted = PeftModel.from_pretrained(base, folder / "adapter")(ids).logits
            torch.testing.assert_close(adapted, merged(ids).logits, atol=1e-4, rtol=1e-4)
        assert (adapted - plain).abs().max() > 1e-3, "the adapters change nothing"
    for folder, origin, trained_whole in ((output, "actor", ""), (output / "critic", "reward", "score.weight")):
        start, after = weights_of(materials / origin), weights_of(folder)
        assert after.keys() == start.keys()
        for name, weight in after.items():
            change = weight - start[name]
            if name == trained_whole:
                assert change.any()
            elif any(part in name for part in ("q_proj.", "down_proj.", "v_proj.")):
                # A product B A of rank 2, up to float32's rounding.
                values = torch.linalg.svdvals(change.double())
                assert values[1] > 1e-4 > 1e2 * values[2], (name, values)
            else:
                assert not change.any(), name
    assert_loads_with_plain_transformers("ppo", output)


def test_the_logged_pretraining_loss_equals_the_loss_of_the_texts(run, materials, tmp_path):
    """As many texts as an update takes, so the first update's loss is the mean over all their tokens but the first."""
    texts = ["It is five.", "the sum of 17 and 4 is 21.", "Of course", "Please add 3 and 4, and then 5."] * 2
    file = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    settings = {"max_steps": 1, "ppo_epochs": 1, "unsupervised_dataset_name": file, "eval_iters": 1}
    alone, shared = (
        run("ppo", f"on-{n}", processes=n, zero=2, unsup_coef=0.5, per_device_training_batch_size=8 // n, **settings)
        for n in (1, 2)
    )
    model = AutoModelForCausalLM.from_pretrained(materials / "actor")
    tokenizer = AutoTokenizer.from_pretrained(materials / "actor")
    total, tokens = 0.0, 0
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        total += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
    line = metrics_of(alone)[1]
    assert line["unsupervised_loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert_same_line(metrics_of(shared)[1], line, "2 processes")
    without = run("ppo", "without", zero=2, per_device_training_batch_size=8, max_steps=1, ppo_epochs=1, eval_iters=1)
    # policy_loss is logged without the PTX term; the update includes it.
    assert line["policy_loss"] == pytest.approx(metrics_of(without)[1]["policy_loss"], abs=1e-6)
    assert line["actor_grad_norm"] > 1.5 * metrics_of(without)[1]["actor_grad_norm"]


def test_a_reward_model_reads_the_text_with_its_own_tokenizer(run, materials):
    """The scores in samples.jsonl against plain transformers on the conversation as text."""
    output = run(
        "ppo", "other", processes=2, zero=3, reward_model_name_or_path=materials / "other_reward",
        critic_model_name_or_path=materials / "actor", max_steps=1,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(materials / "other_reward")
    model = AutoModelForSequenceClassification.from_pretrained(materials / "other_reward")
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    assert len(samples) > 8
    for sample in samples:
        turn = {"role": "user", "content": sample["prompt"]}
        prompt = tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
        text = prompt + sample["response"] + ("<|im_end|>" if sample["ended"] else "")
        score = model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits.item()
        assert sample["score"] == pytest.approx(score, rel=1e-4, abs=1e-5), text
    assert_loads_with_plain_transformers("reward", output / "critic")


@pytest.mark.parametrize(
    "step, launcher",
    [
        ("sft", ["deepspeed", "--num_accelerators", "2"]),
        ("reward", ["torchrun", "--standalone", "--nproc_per_node", "2"]),
        ("ppo", [sys.executable]),
    ],
)
def test_every_launcher_starts_each_step(step, launcher, materials, tmp_path):
    processes = 1 if step == "ppo" else 2
    argv = flags(step, materials, tmp_path / "run", processes=processes, zero=2, max_steps=1)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with (tmp_path / "log").open("w+") as log:
        started = subprocess.Popen(
            [*launcher, MAINS[step], *argv], stdout=log, stderr=log, env=os.environ | {"PATH": path},
            start_new_session=True,
        )  # fmt: skip
        try:
            code = started.wait(timeout=300)
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
    assert code == 0, (tmp_path / "log").read_text()[-4000:]
    assert [line["phase"] for line in metrics_of(tmp_path / "run")] == ["eval", "train", "eval"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["devices"]["processes"] == processes
    assert_loads_with_plain_transformers(step, tmp_path / "run")


@pytest.mark.gpu
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("step", MAINS)
def test_each_step_trains_on_a_gpu_in_bf16(step, zero, materials, tmp_path):
    argv = flags(step, materials, tmp_path / "run", zero=zero, dtype="bf16")
    subprocess.run([sys.executable, MAINS[step], *argv], check=True, env=os.environ | {"DS_ACCELERATOR": "cuda"})
    train = [line for line in metrics_of(tmp_path / "run") if line["phase"] == "train"]
    assert len(train) == (2 if step == "ppo" else 4) and all(None not in line.values() for line in train)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["devices"]["accelerator"] == "cuda"
    assert_loads_with_plain_transformers(step, tmp_path / "run")


def test_bad_input_ends_every_process_with_one_message_and_no_traceback(programs, materials, tmp_path):
    def message_of(**settings) -> str:
        log = tmp_path / f"{len(list(tmp_path.iterdir()))}.log"
        argv = flags("sft", materials, tmp_path / "run", processes=2, **settings)
        text = programs.run(MAINS["sft"], argv, processes=2, log=log, code=2)
        assert "Traceback" not in text
        return text

    several = message_of(learning_rate=-1, max_sq_len=3, data_path=tmp_path / "nothing.jsonl", zero_stage=4)
    for part in ("4 mistakes", "--learning_rate -1.0", "did you mean --max_seq_len", "nothing.jsonl", "--zero_stage 4"):
        assert several.count(part) == 1, several
    rows = [{"prompt": "a", "response": "b"}] * 30
    late = write_rows(tmp_path / "late.jsonl", rows)
    late.write_text(late.read_text() + "{not json\n" + late.read_text())
    late_error = message_of(data_path=late, max_bad_rows=0)
    assert late_error.count("late.jsonl:31") == 1
    few = write_rows(tmp_path / "few.jsonl", rows[:5])
    assert "needs 8" in message_of(data_path=few)
