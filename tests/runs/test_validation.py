"""Validation before loading: every invalid input of every step, through the check that main runs."""

import runpy
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from programs import MAINS
from step_materials import flags, tiny_llama, write_materials, write_rows
from tiny_tokenizers import make_tokenizer
from transformers import DeepseekV3Config, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from dschat import arguments
from dschat.arguments.command_line import SettingsError, parse
from dschat.data.batches import GlobalBatches
from dschat.generation.vllm import requirements
from dschat.rlhf.validation import rlhf_problems, rlhf_warnings
from dschat.runs.session import data_fingerprint
from dschat.runs.set_up import load_splits, make_output_folder
from dschat.runs.validation import one_model_problems

STEPS = {
    "sft": (arguments.SFTSettings, partial(one_model_problems, "sft")),
    "reward": (arguments.RewardModelSettings, partial(one_model_problems, "preference")),
    "ppo": (arguments.RLHFSettings, rlhf_problems),
}


@pytest.fixture(scope="module")
def materials(tmp_path_factory, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("materials")
    write_materials(folder, tiny_tokenizer)
    for name in ("empty", "broken", "foreign", "latin"):
        (folder / f"{name}.jsonl").touch()
    (folder / "broken.jsonl").write_text("{not json\n" * 20)
    (folder / "latin.jsonl").write_bytes('{"prompt": "grün", "response": "ja"}\n'.encode("latin-1") * 20)
    write_rows(folder / "foreign.jsonl", [{"question": "a", "reply": "b"}] * 20)
    bare = folder / "no_tokenizer"
    tiny_llama(LlamaForCausalLM, make_tokenizer(), seed=0).save_pretrained(bare)
    make_tokenizer().save_pretrained(folder / "no_model")
    no_weights = folder / "no_weights"
    tiny_llama(LlamaForCausalLM, make_tokenizer(), seed=0).config.save_pretrained(no_weights)
    make_tokenizer().save_pretrained(no_weights)
    without_eos = make_tokenizer(eos=None, pad=None)
    without_eos.save_pretrained(folder / "no_end")
    tiny_llama(LlamaForCausalLM, without_eos, seed=0).save_pretrained(folder / "no_end")
    return folder


def mistakes(step: str, materials: Path, output: Path, **settings) -> list[str]:
    """The problems main would list; [] if it would start. Values with "@" are files of the materials."""
    values = {
        name: materials / value[1:] if isinstance(value, str) and value.startswith("@") else value
        for name, value in settings.items()
    }
    groups, check = STEPS[step]
    try:
        parse(groups, flags(step, materials, output, **values), description="", check=check)
    except SettingsError as error:
        return str(error).split("\n  - ")[1:]
    return []


@pytest.mark.parametrize("step", STEPS)
def test_valid_settings_are_accepted(step, materials, tmp_path):
    assert mistakes(step, materials, tmp_path) == []


BAD = {  # step, flags, what the message must contain
    "no data file": ("sft", {"data_path": "@nothing.jsonl"}, ["nothing.jsonl", "no such file"]),
    "empty data file": ("sft", {"data_path": "@empty.jsonl"}, ["empty.jsonl", "empty"]),
    "columns of another step": ("reward", {"data_path": "@sft.jsonl"}, ["sft.jsonl", "chosen"]),
    "unknown columns": ("sft", {"data_path": "@foreign.jsonl"}, ["foreign.jsonl", "columns"]),
    "invalid JSON": ("sft", {"data_path": "@broken.jsonl"}, ["broken.jsonl:1", "--max_bad_rows 10"]),
    "invalid UTF-8": ("sft", {"data_path": "@latin.jsonl"}, ["latin.jsonl:1", "UTF-8"]),
    "no evaluation file": ("sft", {"eval_data_path": "@nothing.jsonl"}, ["nothing.jsonl"]),
    "an empty path": ("sft", {"data_path": ""}, ["--data_path : is empty"]),
    "an empty evaluation path": ("sft", {"eval_data_path": ""}, ["--eval_data_path : is empty"]),
    "weight 0": ("sft", {"data_path": "x.jsonl:0"}, ["weight 0 must be positive"]),
    "two shares for three steps": ("sft", {"data_split": "1,2"}, ["--data_split", "three numbers"]),
    "no model folder": ("sft", {"model_name_or_path": "@nowhere"}, ["--model_name_or_path", "no such folder"]),
    "no tokenizer": ("sft", {"model_name_or_path": "@no_tokenizer"}, ["no_tokenizer", "save_pretrained"]),
    "no config": ("sft", {"model_name_or_path": "@no_model"}, ["no_model", "no model configuration"]),
    "no weights": ("sft", {"model_name_or_path": "@no_weights"}, ["no_weights", "has no weights"]),
    "no end token": ("sft", {"model_name_or_path": "@no_end"}, ["no_end", "--add_eot_token"]),
    "too long": ("sft", {"max_seq_len": 129}, ["--max_seq_len 129 = 129 tokens", "128 positions"]),
    "too short": ("sft", {"max_seq_len": 1}, ["--max_seq_len 1: must be at least 2"]),
    "no room for a response": ("ppo", {"max_answer_seq_len": 0}, ["--max_answer_seq_len 0: must be at least 1"]),
    "batches that do not divide": (
        "ppo", {"per_device_training_batch_size": 3},
        ["--generation_batches 2 x --num_samples_per_prompt 1 = 8", "3", "multiple"]),
    "another vocabulary": (
        "ppo", {"critic_model_name_or_path": "@other_reward"}, ["--critic_model_name_or_path", "another vocabulary"]),
    "reward model as critic": (
        "ppo", {"reward_model_name_or_path": "@other_reward"}, ["other_reward", "actor's own folder"]),
    "a group of one": (
        "ppo", {"algorithm": "grpo", "num_samples_per_prompt": 1}, ["--algorithm grpo", "is 1: set it to 2"]),
    "updates that split groups": (
        "ppo", {"algorithm": "rloo", "num_samples_per_prompt": 8}, ["whole groups of --num_samples_per_prompt 8"]),
    "an unknown rollout engine": ("ppo", {"rollout_engine": "none"}, ["--rollout_engine none: choose one of hybrid"]),
    "dynamic sampling without groups": ("ppo", {"dynamic_sampling": 2}, ["--dynamic_sampling", "2 or more"]),
    "KL target without penalty": ("ppo", {"kl_target": 1, "kl_coef": 0}, ["--kl_target", "--kl_coef, which is 0"]),
    "no reference to refresh": (
        "ppo", {"ref_refresh_interval": 1, "kl_coef": 0}, ["--ref_refresh_interval", "--kl_coef 0"]),
    "dual clip below 1": ("ppo", {"dual_clip": 0.5}, ["--dual_clip 0.5", "above 1"]),
    "clipped below 0": ("ppo", {"clip_range_low": 1.5}, ["--clip_range_low 1.5", "at most 1"]),
    "correction cap below the floor": (
        "ppo", {"rollout_correction": "mis", "rollout_correction_cap": 0.4}, ["--rollout_correction_floor 0.5"]),
    "a buffer beyond the answer": ("ppo", {"overlong_buffer": 9}, ["--overlong_buffer 9", "--max_answer_seq_len 8"]),
    "a reward buffer beyond the answer": ("ppo", {"reward": "overlong?buffer=9"}, ["--reward overlong?buffer=9", "8"]),
    "an unknown reward": ("ppo", {"reward": "last_numbr"}, ["--reward last_numbr", "last_number"]),
    "no reward model": ("ppo", {"reward_model_name_or_path": None}, ["--reward: name"]),
    "no judge": ("ppo", {"judge": "nothing.py:f"}, ["--judge nothing.py:f", "FILE.py:FUNCTION"]),
    "missing unsupervised texts": (
        "ppo", {"unsup_coef": 1, "unsupervised_dataset_name": "@nothing.jsonl"}, ["nothing.jsonl", "no such file"]),
    "only adapters without rank": ("sft", {"only_optimize_lora": True}, ["--only_optimize_lora", "--lora_dim"]),
    "only adapters, but of no model": ("ppo", {"only_optimize_lora": True}, ["--actor_lora_dim or --critic_lora_dim"]),
    "offload at stage 0": ("reward", {"offload": True, "zero_stage": 0}, ["--offload", "--zero_stage 0"]),
    "stage four": ("ppo", {"actor_zero_stage": 4}, ["--actor_zero_stage 4: choose one of 0, 1, 2, 3"]),
    "a rollout engine selected and disabled": (
        "ppo", {"rollout_engine": "hybrid", "enable_hybrid_engine": False}, ["--rollout_engine hybrid", "drop one"]),
    "misspelt": ("ppo", {"kl_coeff": 0.1}, ["--kl_coeff is not a flag of this step: did you mean --kl_coef?"]),
    "a flag of another step": ("sft", {"kl_coef": 0.1}, ["--kl_coef is not a flag of this step"]),
}  # fmt: skip


@pytest.mark.parametrize("step, settings, parts", BAD.values(), ids=BAD.keys())
def test_every_bad_input_is_reported_in_one_line(step, settings, parts, materials, tmp_path):
    (line,) = mistakes(step, materials, tmp_path, **settings)
    assert all(part in line for part in parts), line


VLLM_BAD = {
    "adapters alone without adapters": ({"vllm_lora": True}, ["--vllm_lora", "--actor_lora_dim 16"]),
    "adapters and weights": ({"vllm_lora": True, "actor_lora_dim": 4}, ["--vllm_lora", "--only_optimize_lora"]),
    "too large adapters": (
        {"vllm_lora": True, "actor_lora_dim": 513, "only_optimize_lora": True}, ["adapters of rank 512 or less"]),
    "too little memory for one sequence": (
        {"vllm_kv_cache_gib": 1e-6}, ["--vllm_kv_cache_gib 1e-06", "one sequence of 32 tokens", "use 0.01 or more"]),
}  # fmt: skip


@pytest.mark.parametrize("settings, parts", VLLM_BAD.values(), ids=VLLM_BAD.keys())
def test_settings_that_vllm_cannot_work_with_are_reported_in_one_line(
    settings, parts, materials, tmp_path, monkeypatch
):
    for check in ("version_problems", "architecture_problems"):  # it need not be installed
        monkeypatch.setattr(requirements, check, lambda *arguments: [])
    (line,) = mistakes("ppo", materials, tmp_path, rollout_engine="vllm", **settings)
    assert all(part in line for part in parts), line
    assert mistakes("ppo", materials, tmp_path, rollout_engine="vllm", vllm_kv_cache_gib=0.01) == []


def test_keys_and_values_of_a_token_by_hand():
    llama = LlamaConfig(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_size=32)
    assert requirements.kv_bytes_per_token(llama, dtype=torch.bfloat16) == 3 * 2 * 2 * 8 * 2
    gemma = Gemma3TextConfig(num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=1, head_dim=16)
    assert gemma.layer_types.count("full_attention") == 1
    assert requirements.kv_bytes_per_token(gemma, dtype=torch.float32) == 1 * 2 * 1 * 16 * 4
    assert requirements.kv_bytes_per_token(DeepseekV3Config(), dtype=torch.float32) == 0


def test_prompt_and_response_together_must_fit_actor_and_critic(materials, tmp_path):
    lengths = {"max_prompt_seq_len": 100, "max_answer_seq_len": 29}
    for line, model in zip(mistakes("ppo", materials, tmp_path, **lengths), ("actor", "reward"), strict=True):
        assert "--max_prompt_seq_len 100 + --max_answer_seq_len 29 = 129 tokens" in line
        assert f"{materials / model} has 128 positions" in line
    assert mistakes("ppo", materials, tmp_path, **(lengths | {"max_answer_seq_len": 28})) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device trains in fp16")
def test_fp16_is_refused_on_a_cpu(materials, tmp_path):
    (line,) = mistakes("sft", materials, tmp_path, dtype="fp16")
    assert line.startswith("--dtype fp16: not supported on a CPU")


def test_all_kinds_of_mistakes_are_listed_in_one_message(materials, tmp_path):
    (tmp_path / "file").touch()
    lines = mistakes(
        "sft", materials, tmp_path / "file" / "run", data_path="@nothing.jsonl", max_seq_len=500, zero_stage=4,
        learning_rate=0, model_name_or_path="@no_tokenizer", only_optimize_lora=True, learning_rat=1,
        deepspeed_config="@empty.jsonl",
    )  # fmt: skip
    parts = [
        "--output_dir", "nothing.jsonl", "--max_seq_len 500", "--zero_stage 4", "--learning_rate 0.0: must be above 0",
        "no_tokenizer has no tokenizer", "--only_optimize_lora", "--learning_rat is not a flag", "not valid JSON",
    ]  # fmt: skip
    for part in parts:
        assert sum(part in line for line in lines) == 1, (part, lines)
    assert len(lines) == len(parts)


def test_a_reward_model_may_have_another_tokenizer_if_the_critic_shares_the_actors(materials, tmp_path):
    settings = {"reward_model_name_or_path": "@other_reward", "critic_model_name_or_path": "@actor"}
    assert mistakes("ppo", materials, tmp_path, **settings) == []


def test_add_eot_token_makes_a_tokenizer_without_end_token_valid(materials, tmp_path):
    assert mistakes("sft", materials, tmp_path, model_name_or_path="@no_end", add_eot_token=True) == []
    assert mistakes("ppo", materials, tmp_path, add_eot_token=True) == []


@pytest.mark.parametrize(
    ("settings", "truncation"),
    [
        ({"top_p": 0.9}, "--top_p 0.9 with"),
        ({"top_k": 40}, "--top_k 40 with"),
        ({"top_p": 0.9, "top_k": 40}, "--top_p 0.9 --top_k 40 with"),
    ],
)
def test_truncated_sampling_with_rollout_logprobs_warns_of_a_biased_ratio(
    settings, truncation, materials, tmp_path, capsys
):
    groups, check = STEPS["ppo"]

    def printed(**settings) -> str:
        parse(groups, flags("ppo", materials, tmp_path, **settings), description="", check=check, warn=rlhf_warnings)
        return capsys.readouterr().err

    text = printed(**settings, old_logprobs="rollout", clip_range=0.1)
    assert text.startswith(f"warning: {truncation} --old_logprobs rollout: ") and text.count("\n") == 1
    for part in ("ratio starts at the probability mass that was kept, below 1", "before the policy has moved",
                 "below 1 - 0.1", "--top_p 1 --top_k 0", "--old_logprobs recompute", "tis"):  # fmt: skip
        assert part in text
    assert printed(**settings) == printed(old_logprobs="rollout") == ""
    for engine in ("hybrid", "transformers"):  # both keep copies of the weights
        assert printed(pin_generation_buffers=True, rollout_engine=engine) == ""


def test_bad_rows_found_while_loading_are_a_settings_error_too(materials, tmp_path, tiny_tokenizer):
    from dschat.data.datasets import DataOptions

    file = write_rows(tmp_path / "late.jsonl", [{"prompt": "a", "response": "b"}] * 5)
    file.write_text(file.read_text() + "{broken\n" * 3)
    options = DataOptions(data_path=[str(file)], output_path=str(tmp_path / "arrow"), max_tokens=32, max_bad_rows=2)
    with pytest.raises(SettingsError, match=r"late\.jsonl:6"):
        load_splits("sft", tiny_tokenizer, options)


def test_the_data_fingerprint_differs_between_two_runs():
    plain = {"lengths": [1] * 8, "global_batch_size": 2, "seed": 1}
    first = data_fingerprint(GlobalBatches(**plain))
    assert first == {"rows": 8, "global_batch_size": 2, "seed": 1}
    for change in ({"lengths": [1] * 9}, {"global_batch_size": 4}, {"seed": 2}):
        assert data_fingerprint(GlobalBatches(**(plain | change))) != first


OVERWRITTEN = [  # step, flag, folder of the materials, its subfolder of the output folder
    ("sft", "model_name_or_path", "actor", ""),
    ("sft", "model_name_or_path", "actor", "best"),
    ("reward", "model_name_or_path", "reward", ""),
    ("ppo", "actor_model_name_or_path", "actor", ""),
    ("ppo", "actor_model_name_or_path", "actor", "actor_ema"),
    ("ppo", "critic_model_name_or_path", "reward", "critic"),
    ("ppo", "reward_model_name_or_path", "reward", ""),
    ("ppo", "reward", "reward", ""),
    ("ppo", "actor_model_name_or_path", "actor", "checkpoints/exported"),
]


@pytest.mark.parametrize("linked", [False, True], ids=["by name", "by link"])
@pytest.mark.parametrize(("step", "flag", "model", "below"), OVERWRITTEN)
def test_an_output_folder_that_holds_an_input_model_is_refused(step, flag, model, below, linked, materials, tmp_path):
    folder = tmp_path / "run" / below
    shutil.copytree(materials / model, folder)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    output = tmp_path / "link" if linked else tmp_path / "run"
    (line,) = mistakes(step, materials, output, **{flag: str(folder)})
    assert f"--output_dir {output}: this run would overwrite {folder}, the input of --{flag} {folder}" in line
    assert sorted(tmp_path.rglob("*")) == before
    sibling = tmp_path / "run" / "sft"
    folder.rename(sibling) if below else shutil.copytree(folder, sibling)
    assert mistakes(step, materials, output, **{flag: str(sibling)}) == [], "other subfolders are not overwritten"


def test_a_refused_command_creates_no_files(materials, tmp_path):
    output = tmp_path / "output" / "run"
    assert mistakes("sft", materials, output, learning_rate=-1)
    assert mistakes("sft", materials, output) == []
    assert not (tmp_path / "output").exists()
    make_output_folder(str(output))
    assert output.is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--output_dir .*file/run: cannot be created .*name another folder"):
        make_output_folder(str(tmp_path / "file" / "run"))


def test_an_output_folder_that_holds_the_dpo_reference_is_refused(materials, tmp_path):
    main = runpy.run_path(str(MAINS["dpo"]))
    shutil.copytree(materials / "actor", tmp_path / "run")
    argv = flags("dpo", materials, tmp_path / "run", ref_model_name_or_path=tmp_path / "run")
    with pytest.raises(SettingsError, match="would overwrite .*run, the input of --ref_model_name_or_path"):
        parse(arguments.PreferenceSettings, argv, description="", check=main["check"])
