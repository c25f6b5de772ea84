"""Rollouts by vLLM: weights, sampling, tensor parallelism, faults. Needs an environment with vLLM: test.sh --vllm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import MAINS
from repository import ROOT
from rlhf_models import save_models
from safetensors.torch import load_file
from step_materials import metrics_of

pytestmark = pytest.mark.vllm

SUPPORT = ROOT / "tests" / "support"
RANKS = Path(__file__).with_name("vllm_ranks.py")
CASES = {
    "ppo": (1, {}),
    "grpo, zero 3": (2, {
        "algorithm": "grpo", "num_samples_per_prompt": 2, "actor_zero_stage": 3, "critic_zero_stage": 3,
    }),
    "tensor parallel": (2, {"vllm_tensor_parallel_size": 2, "top_k": 20}),
    "tensor parallel, zero 3, adapters": (2, {
        "vllm_tensor_parallel_size": 2, "actor_zero_stage": 3, "actor_lora_dim": 4,
    }),
    "adapters alone": (1, {"actor_lora_dim": 4, "only_optimize_lora": True, "vllm_lora": True}),
    "adapters alone, tensor parallel, zero 3": (2, {
        "vllm_tensor_parallel_size": 2, "actor_zero_stage": 3, "actor_lora_dim": 12, "only_optimize_lora": True,
        "vllm_lora": True,
    }),
    "unknown ids": (1, {}),
    "unknown ids, tied, adapters alone": (1, {"actor_lora_dim": 4, "only_optimize_lora": True, "vllm_lora": True}),
    "prompts for several forward passes": (1, {
        "max_prompt_seq_len": 40, "vllm_engine_args": ["max_num_batched_tokens=50"],
    }),
    "experts": (1, {}),
    "experts, zero 3": (2, {"actor_zero_stage": 3, "critic_zero_stage": 3}),
    "tied": (1, {"top_p": 0.9}),
    "tied by name": (1, {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save_models(root / "untied", head_width=64)
    save_models(root / "tied", head_width=64, tied=True)
    for name in ("experts", "experts, zero 3"):
        save_models(root / name, "qwen3_moe", head_width=64)
    save_models(root / "unknown ids", head_width=64, unknown_ids=50)
    save_models(root / "unknown ids, tied, adapters alone", head_width=64, unknown_ids=50, tied=True)
    save_models(root / "tied by name", head_width=64)
    path = root / "tied by name" / "actor" / "config.json"  # with a head of its own nevertheless
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    return root


def launched(script, *arguments, processes, code=0, timeout=420, **environment):
    """Run a script under torchrun in fresh processes, as vLLM cannot be forked; returns its output."""
    completed = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone",
         script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{SUPPORT}"} | environment, text=True, capture_output=True,
        timeout=timeout,
    )  # fmt: skip
    output = completed.stdout + completed.stderr
    assert (completed.returncode == 0) == (code == 0), output[-6000:]
    return output


@pytest.mark.parametrize("case", CASES)
def test_rollouts_follow_the_weights_and_equal_the_hybrid_engines_greedy_tokens(folder, case):
    processes, settings = CASES[case]
    root = folder / (case if (folder / case).exists() else "untied")
    output = launched(RANKS, root, json.dumps(settings), processes=processes)
    assert "rollouts follow the policy" in output


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_stale_weights_wrong_log_probs_and_failed_requests_end_with_a_message(folder, kind):
    output = launched(Path(__file__).with_name("vllm_faults.py"), folder / kind, processes=1)
    assert "all faults ended with a message" in output


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"What is {i} plus {i % 7}?"}) + "\n" for i in range(40)))
    return path


def run_flags(folder, prompts, output, **changes):
    """Two iterations of step 3 with two updates each, on 8 prompts."""
    values = {
        "actor_model_name_or_path": folder / "untied" / "actor",
        "reward_model_name_or_path": folder / "untied" / "reward", "data_path": prompts, "output_dir": output,
        "rollout_engine": "vllm", "dtype": "fp32", "max_prompt_seq_len": 32, "max_answer_seq_len": 8,
        "per_device_generation_batch_size": 4, "per_device_training_batch_size": 2, "max_steps": 2,
        "actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3, "eval_fraction": 0.1, "eval_interval": 1,
    } | changes  # fmt: skip
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


@pytest.mark.parametrize("settings", [
    {"vllm_tensor_parallel_size": 2}, {"algorithm": "grpo", "num_samples_per_prompt": 2, "actor_zero_stage": 3},
], ids=["ppo, tensor parallel", "grpo, zero 3"])  # fmt: skip
def test_step_3_runs_and_its_log_probs_are_the_policys(folder, prompts, tmp_path, settings):
    launched(MAINS["ppo"], *run_flags(folder, prompts, tmp_path / "run", **settings), processes=2)
    train = [line for line in metrics_of(tmp_path / "run") if line["phase"] == "train"]
    assert len(train) == 2 and all(line["rollout_logprob_mismatch_max"] < 1e-3 for line in train)
    assert all(line["actor_grad_norm"] > 0 for line in train)
    assert (tmp_path / "run" / "config.json").exists()


def test_a_run_stopped_between_two_updates_of_an_iteration_resumes_bit_for_bit(folder, prompts, tmp_path):
    for name in ("whole", "resumed"):
        arguments = run_flags(folder, prompts, tmp_path / name, eval_fraction=0)
        if name == "resumed":  # asked to end in the first update of the second iteration
            launched(MAINS["ppo"], *arguments, processes=1, code=1, DSCHAT_FAILPOINT="update:TERM#3")
            arguments += ["--resume", "auto"]
        launched(MAINS["ppo"], *arguments, processes=1)
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    whole, resumed = ([line for line in metrics_of(tmp_path / name) if line["phase"] == "train"][-1]
                      for name in ("whole", "resumed"))  # fmt: skip
    same = ("score", "kl", "policy_loss", "value_loss", "actor_grad_norm", "rollout_logprob_mismatch_mean")
    assert [whole[name] for name in same] == [resumed[name] for name in same]


BAD_INPUT = {
    "tensor-parallel size": ({"vllm_tensor_parallel_size": 2}, "--vllm_tensor_parallel_size 2 does not divide the 1"),
    "hybrid flags": ({"pin_generation_buffers": True}, "--pin_generation_buffers: is a flag of the hybrid engine"),
    "model length": ({"vllm_max_model_len": 20}, "--vllm_max_model_len 20: --max_prompt_seq_len"),
    "quantised": ({"vllm_quantization": "fp8"}, "--rollout_correction must correct"),
    "engine arguments": ({"vllm_engine_args": "swap-space"}, "write KEY=VALUE"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUT)
def test_mistakes_are_reported_before_models_are_loaded(folder, prompts, tmp_path, case):
    settings, expected = BAD_INPUT[case]
    output = launched(MAINS["ppo"], *run_flags(folder, prompts, tmp_path / "run", **settings), processes=1, code=2)
    assert expected in output and "Traceback" not in output.partition("ChildFailedError")[0].rpartition("E1")[0]
    assert not (tmp_path / "run").exists()
