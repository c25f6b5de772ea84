"""Model cards: what they state is what the run did, and their code loads the model."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from programs import MAINS
from step_materials import flags, metrics_of, write_materials
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat.arguments import PPOArguments
from dschat.models.causal_lm import load_tokenizer
from dschat.models.scalar_head import TokenScores, load_scalar_head
from dschat.rewards.server.score_request import ScoreRequest
from dschat.rewards.server.text_scorer import TextScorer
from dschat.runs.card_settings import changed_settings, portable
from dschat.runs.card_sources import base_metadata, hub_data_sets, hub_name
from dschat.runs.model_card import MARK, write_model_card

QUESTION, ANSWER = "What is 2 plus 3?", "It is 5."  # of the code in the cards


@pytest.fixture(scope="module")
def materials(tmp_path_factory, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("materials")
    write_materials(folder, tiny_tokenizer)
    card = "---\nbase_model: org/tiny\nlicense: other\nlicense_name: tiny-license\n---\n# tiny\n"
    (folder / "actor" / "README.md").write_text(card, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def outputs(programs, materials, tmp_path_factory) -> dict[str, Path]:
    """A short run of each step; the adapters of step 3 are exported beside its models."""
    root = tmp_path_factory.mktemp("runs")
    beside, only = ({"only_optimize_lora": True, "export_adapters": where} for where in ("beside", "only"))
    settings = {
        "sft": only | {"lora_dim": 2, "best_metric": "eval_loss", "best_mode": "min"},
        "reward": {},
        "dpo": {"preference_loss": "ipo"},
        "ppo": beside | {"enable_ema": True, "actor_lora_dim": 2, "critic_lora_dim": 2},
    }
    for step, others in settings.items():
        argv = flags(step, materials, root / step, max_steps=1, zero=0, **others)
        programs.run(MAINS[step], argv, log=root / f"{step}.log")
    return {step: root / step for step in settings}


def front_matter(folder: Path) -> dict:
    return yaml.safe_load((folder / "README.md").read_text(encoding="utf-8").split("---\n")[1])


def run_example(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Run the Python block of the card in its folder; returns the variables that it sets."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(folder)
    variables: dict = {}
    exec(compile(code, "card", "exec"), variables)
    return variables


CAUSAL = [("sft", "adapter"), ("sft", "best"), ("dpo", ""), ("ppo", ""), ("ppo", "adapter"), ("ppo", "actor_ema")]
SCALAR = [("reward", ""), ("ppo", "critic"), ("ppo", "critic/adapter")]


@pytest.mark.parametrize("step, name", CAUSAL)
def test_the_code_of_a_causal_model_generates_with_the_exported_weights(step, name, outputs, monkeypatch, capsys):
    folder = outputs[step] / name
    variables = run_example(folder, monkeypatch)
    tokenizer, model = variables["tokenizer"], variables["model"]
    response = tokenizer.decode(variables["output"][0, variables["inputs"]["input_ids"].shape[1] :])
    assert capsys.readouterr().out.strip() == re.sub(r"<\|?[\w/]+\|?>", "", response).strip()
    prompt = tokenizer.decode(variables["inputs"]["input_ids"][0])
    assert prompt.count(QUESTION) == 1 and ANSWER not in prompt
    if name == "adapter" and step == "ppo":  # the merged model lies beside it
        merged = AutoModelForCausalLM.from_pretrained(outputs[step])
        ids = variables["output"]
        torch.testing.assert_close(model(ids).logits, merged(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("step, name", SCALAR)
def test_the_code_of_a_scalar_model_gives_the_score_of_the_suite(step, name, outputs, monkeypatch):
    score = run_example(outputs[step] / name, monkeypatch)["score"]
    merged = outputs[step] / name.removesuffix("/adapter")
    assert score == pytest.approx(suite_score(merged), rel=1e-4)


def suite_score(folder: Path) -> float:
    tokenizer = load_tokenizer(str(folder))
    model = load_scalar_head(folder, dtype=torch.float32, tokenizer=tokenizer)
    scorer = TextScorer(TokenScores(model), tokenizer, max_tokens=64)
    chat = [{"role": "user", "content": QUESTION}]
    request = ScoreRequest(messages=[chat], responses=[ANSWER], ended=[True])
    return scorer.score(scorer.encode(request))[0]


@pytest.mark.parametrize("pad", ["<|im_end|>", "<|pad|>"])
def test_text_after_the_end_of_turn_and_padding_that_is_the_end_of_turn_do_not_change_the_score(
    pad, outputs, tiny_tokenizer, tmp_path, monkeypatch
):  # fmt: skip
    """ChatML writes a newline after the end of turn, which is never scored."""
    folder = tmp_path / "run"
    shutil.copytree(outputs["reward"], folder)
    tiny_tokenizer.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, pad_token=pad)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": tokenizer.pad_token_id}))
    write_model_card(folder, run_folder=folder, name="")
    variables = run_example(folder, monkeypatch)
    assert variables["ids"][0, -1] == tokenizer.eos_token_id
    assert variables["score"] == pytest.approx(suite_score(folder), rel=1e-4)


def test_front_matter_names_library_task_and_the_base_model_of_the_base_model(outputs):
    ppo, adapter, sft = (front_matter(outputs[step] / name) for step, name in
                         (("ppo", ""), ("ppo", "adapter"), ("sft", "best")))  # fmt: skip
    assert (ppo["library_name"], ppo["pipeline_tag"]) == ("transformers", "text-generation")
    assert ppo["base_model"] == sft["base_model"] == "org/tiny" and ppo["license"] == "other"
    assert ppo["license_name"] == "tiny-license" and ppo["base_model_relation"] == "finetune"
    assert ppo["tags"] == ["dschat", "rlhf", "ppo"] and sft["tags"] == ["dschat", "sft"]
    assert adapter["library_name"] == "peft" and "lora" in adapter["tags"]
    critic = front_matter(outputs["ppo"] / "critic")
    assert critic["pipeline_tag"] == "text-classification" and "base_model" not in critic
    assert "ipo" in front_matter(outputs["dpo"])["tags"]
    assert "datasets" not in ppo  # local files


@pytest.mark.parametrize("step, name", CAUSAL + SCALAR)
def test_the_card_shows_the_last_metrics_and_no_local_folder(step, name, outputs, materials):
    text = (outputs[step] / name / "README.md").read_text(encoding="utf-8")
    evaluations = [line for line in metrics_of(outputs[step]) if line["phase"] == "eval"]
    metric = "score" if step == "ppo" else "eval_loss"
    expected = [f"{line[metric]:.4g}" for line in (evaluations[0], evaluations[-1])]
    if name != "best" or "step 1" in text:
        assert f"| `{metric}` | {expected[0]} | {expected[1]} |" in text
    assert "seconds_" not in text and "tokens_per_second" not in text
    assert str(materials) not in text and str(outputs[step]) not in text


def test_the_settings_are_those_that_differ_and_can_be_given_to_config(outputs, materials):
    text = (outputs["ppo"] / "README.md").read_text(encoding="utf-8")
    settings = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    assert settings["actor_lora_dim"] == 2 and settings["max_answer_seq_len"] == 8
    assert settings["data_path"] == [f"…/{materials.name}/prompts.jsonl"]
    assert not {"output_dir", "kl_coef", "resume", "data_output_path"} & settings.keys()


def test_defaults_of_an_algorithm_are_no_changed_settings():
    run = {"algorithm": "grpo", "kl_coef": 0.001, "reward": ["http://me:pw@host/score?api_key=SECRET&n=2"]}
    defaults = vars(PPOArguments(algorithm="grpo"))
    changed = changed_settings("step3_rlhf_finetuning", defaults | run)
    assert changed == run | {"reward": ["http://***@host/score?api_key=***&n=2"]}


@pytest.mark.parametrize("text, expected", [
    ("/home/ann/data/chats.jsonl:0.5", "…/data/chats.jsonl:0.5"), ("/a/b/c/", "…/b/c"), ("~/models/x", "…/models/x"),
    ("openai/gsm8k=/home/ann/gsm8k", "openai/gsm8k=…/ann/gsm8k"), ("org/data", "org/data"), ("./data/x", "./data/x"),
    ("http://host/a/b", "http://host/a/b"), ("/home/ann/rules.py:length@0.5", "…/ann/rules.py:length@0.5"),
])  # fmt: skip
def test_portable_paths(text, expected):
    assert portable(text) == expected


def test_hub_names_are_distinguished_from_local_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("org/data").mkdir(parents=True)
    arguments = {
        "data_path": ["org/data:0.5", "Dahoas/rm-static:0.5", "openai/gsm8k=/x/y", "reasoning_gym:chain_sum?size=2"],
        "eval_data_path": ["Dahoas/rm-static", "./more.jsonl"],
    }
    assert hub_data_sets(arguments) == ["Dahoas/rm-static", "openai/gsm8k"]
    assert hub_name("gpt2") == "gpt2" and hub_name("org/data") is None and hub_name("/x/y") is None
    assert base_metadata("org/base", is_adapter=True) == {
        "base_model": "org/base", "base_model_relation": "adapter"
    }  # fmt: skip


def test_a_readme_of_the_user_is_kept_and_a_card_of_this_suite_is_replaced(outputs, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(outputs["dpo"], folder)
    card = folder / "README.md"
    card.write_text(f"{MARK}\nan older card", encoding="utf-8")
    write_model_card(folder, run_folder=folder, name="")
    written = card.read_text(encoding="utf-8")
    assert "an older card" not in written and MARK in written
    card.write_text(written.replace(MARK, "").replace("IPO", "mine"), encoding="utf-8")
    write_model_card(folder, run_folder=folder, name="")
    assert "mine" in card.read_text(encoding="utf-8")
    assert "is kept" in capsys.readouterr().out


def test_a_readme_of_the_user_survives_in_the_folder_of_the_best_model(programs, materials, tmp_path):
    output = tmp_path / "run"
    (output / "best").mkdir(parents=True)
    (output / "best" / "README.md").write_text("mine", encoding="utf-8")
    argv = flags("sft", materials, output, zero=0, max_steps=1, best_metric="eval_loss", best_mode="min")
    programs.run(MAINS["sft"], argv, log=tmp_path / "log")
    assert (output / "best" / "README.md").read_text(encoding="utf-8") == "mine"
    assert (output / "best" / "model.safetensors").exists() and MARK in (output / "README.md").read_text()


def test_a_card_that_cannot_be_written_is_a_warning(outputs, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(outputs["dpo"], folder)
    (folder / "README.md").unlink()
    (folder / "run.json").write_text('{"name": ', encoding="utf-8")
    write_model_card(folder, run_folder=folder, name="")
    assert "warning" in capsys.readouterr().err and not (folder / "README.md").exists()
    (folder / "README.md").mkdir()
    write_model_card(folder, run_folder=outputs["dpo"], name="")
    assert "is kept" in capsys.readouterr().out and (folder / "README.md").is_dir()


def test_a_truncated_line_of_metrics_is_skipped(outputs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(outputs["dpo"], folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "phase": "tr')
    (folder / "README.md").unlink()
    write_model_card(folder, run_folder=folder, name="")
    assert (folder / "README.md").read_text() == (outputs["dpo"] / "README.md").read_text()
