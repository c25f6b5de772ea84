"""scripts/push_to_hub.py: which folders it takes, and which files reach the hub."""

import json
import os
import subprocess
import sys

import huggingface_hub
import pytest
import torch
from hub_server import hub_server
from peft import LoraConfig, get_peft_model
from repository import SCRIPTS
from rlhf_models import save_models
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat.runs.card_examples import FOLDER_LINE

sys.path.insert(0, str(SCRIPTS))

import push_to_hub  # noqa: E402

TOKEN = "hf_secret_of_the_test"
MODEL_FILES = {
    "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """An export as a finished run leaves it, among the other files of the run."""
    folder = save_models(tmp_path / "models") / "actor"
    (folder / "README.md").write_text(f"---\ntags: [dschat]\n---\n# card\n{FOLDER_LINE}\n", encoding="utf-8")
    (folder / "run.json").write_text('{"arguments": {"reward": "http://host?key=SECRET"}}')
    (folder / ".lock").touch()
    for name in ("metrics.jsonl", "samples.jsonl", "best.json", "code.py"):
        (folder / name).write_text("{}")
    for name in ("checkpoints/step-00000001", "critic", "data", "tensorboard", "lm_eval"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").write_bytes(b"0")
    return folder


@pytest.fixture
def push(monkeypatch, capsys):
    """push(arguments, hub) runs the script here and returns what it printed; hub: None for one that does not run."""
    for name, value in {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    def run(*arguments, hub=None, code=0) -> str:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address if hub else "http://127.0.0.1:9")
        try:
            status = push_to_hub.main([*map(str, arguments)])
        except SystemExit as exited:
            status = exited.code
        printed = capsys.readouterr()
        assert status == code, printed
        assert TOKEN not in printed.out + printed.err
        return printed.out + printed.err

    return run


@pytest.fixture
def hub():
    with hub_server() as server:
        yield server


def test_only_the_files_of_the_model_reach_the_hub_and_the_card_names_the_repository(folder, hub, tmp_path):
    environment = os.environ | {
        "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN
    }  # fmt: skip
    command = [sys.executable, SCRIPTS / "push_to_hub.py", folder, "org/sums", "--private"]
    text = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    files = hub.files["org/sums", "main"]
    assert files.keys() == MODEL_FILES and hub.private == {"org/sums": True}
    assert {name: files[name] for name in MODEL_FILES - {"README.md"}} == {
        name: (folder / name).read_bytes() for name in MODEL_FILES - {"README.md"}
    }
    assert files["README.md"].decode().endswith('# card\nfolder = "org/sums"\n')
    assert FOLDER_LINE in (folder / "README.md").read_text(), "the local card is unchanged"
    assert hub.tokens == {f"Bearer {TOKEN}"} and TOKEN not in text and f"{hub.address}/org/sums/commit/1" in text
    for name, content in files.items():
        (tmp_path / "downloaded").mkdir(exist_ok=True)
        (tmp_path / "downloaded" / name).write_bytes(content)
    ids = torch.tensor([[5, 6, 7]])
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (folder, tmp_path / "downloaded")]
    assert torch.equal(models[0](ids).logits, models[1](ids).logits)


def test_a_branch_gets_the_upload_and_weights_of_an_earlier_one_are_deleted(push, folder, hub):
    push(folder, "sums", hub=hub)
    hub.files["me/sums", "main"] |= {"model-00001-of-00002.safetensors": b"old", "NOTES.md": b"mine"}
    push(folder, "sums", "--revision", "v2", hub=hub)
    assert hub.files["me/sums", "v2"].keys() == MODEL_FILES | {"NOTES.md"}
    assert "model-00001-of-00002.safetensors" in hub.files["me/sums", "main"]
    assert hub.private == {"me/sums": None}


def test_a_dry_run_needs_no_token_and_no_network(folder, monkeypatch, capsys):
    monkeypatch.setattr(push_to_hub, "get_token", lambda: None)  # of the user who runs the tests
    assert push_to_hub.main([str(folder), "org/sums", "--dry_run"]) == 0
    text = capsys.readouterr().out
    assert "7 files would be uploaded to org/sums" in text and "run.json" not in text
    with pytest.raises(SystemExit) as caught:
        push_to_hub.main([str(folder), "org/su ms"])
    text = capsys.readouterr().err
    assert caught.value.code == 2 and "is no name of a repository" in text and "set HF_TOKEN" in text
    assert "HF_HUB_OFFLINE is set" in text


def test_a_refused_and_an_impossible_upload_end_with_one_message(push, folder, hub):
    hub.refused.add("org/sums")
    assert "the upload failed: 403" in push(folder, "org/sums", hub=hub, code=2)
    assert "org/sums: the upload failed" in push(folder, "org/sums", code=2)


def test_python_files_are_uploaded_only_with_a_config_that_names_them(folder):
    assert "code.py" not in map(str, push_to_hub.model_files(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "code.Model"}}))
    assert "code.py" in map(str, push_to_hub.model_files(folder))


def test_incomplete_folders_are_refused_with_all_their_problems(folder, tmp_path):
    assert push_to_hub.folder_problems(folder) == []
    (folder / "README.md").write_text("reward: http://me:password@host/score")
    (folder / "tokenizer_config.json").unlink()
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-00001-of-00002.safetensors").touch()
    shards, tokenizer, card = push_to_hub.folder_problems(folder)
    assert "model-00002-of-00002.safetensors of" in shards and "00001-of" not in shards.partition(" of ")[0]
    assert "has no tokenizer" in tokenizer and "has a password or key" in card
    (line,) = push_to_hub.folder_problems(tmp_path)
    assert "neither config.json nor adapter_config.json" in line


def test_adapters_need_a_base_model_that_the_hub_has(folder, tmp_path):
    adapters = tmp_path / "run" / "adapter"
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(adapters)
    AutoTokenizer.from_pretrained(folder).save_pretrained(adapters)
    (line,) = push_to_hub.folder_problems(adapters)
    assert "is a local folder" in line and str(folder) in line
    assert str(adapters) in push_to_hub.folder_problems(adapters.parent)[0]
    config = json.loads((adapters / "adapter_config.json").read_text())
    (adapters / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/base"}))
    assert push_to_hub.folder_problems(adapters) == []
    names = set(map(str, push_to_hub.model_files(adapters)))
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= names
