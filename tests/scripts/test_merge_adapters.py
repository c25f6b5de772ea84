"""scripts/merge_adapters.py: PEFT folders, of PEFT itself and of --export_adapters, become plain models."""

import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from repository import SCRIPTS
from rlhf_models import save_models
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

sys.path.insert(0, str(SCRIPTS))

import merge_adapters  # noqa: E402

from dschat.runs.validation import model_problems  # noqa: E402

IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def models(tmp_path):
    return save_models(tmp_path)


@pytest.mark.parametrize("kind", ["actor", "reward"])
def test_a_folder_of_peft_is_merged_with_its_head(kind, models, tmp_path):
    torch.manual_seed(0)
    auto = AutoModelForCausalLM if kind == "actor" else AutoModelForSequenceClassification
    task = {"task_type": "CAUSAL_LM"} if kind == "actor" else {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
    base = str(models / kind)
    model = get_peft_model(auto.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj", "up_proj"], **task))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.normal_(std=0.3)
        expected = model(IDS).logits
    model.save_pretrained(tmp_path / "adapters")
    assert merge_adapters.main([str(tmp_path / "adapters"), str(tmp_path / "merged")]) == 0
    with torch.no_grad():
        merged = auto.from_pretrained(tmp_path / "merged")(IDS).logits
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-4)
    line = model_problems("--model_name_or_path", str(tmp_path / "merged"), tokens=8, lengths="")
    assert line == []


def test_a_run_that_is_given_adapters_names_the_command(models, tmp_path):
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(models / "actor"), LoraConfig(r=2, target_modules=["q_proj"])
    )
    folder = tmp_path / "adapters"
    model.save_pretrained(folder)
    (line,) = model_problems("--model_name_or_path", str(folder), tokens=8, lengths="")
    assert f"python scripts/merge_adapters.py {folder} {folder}-merged" in line


def test_mistakes_end_with_a_message(models, tmp_path, capsys):
    for arguments, part in (
        ([models / "actor", tmp_path / "new"], "is not a PEFT folder: it has no adapter_config.json"),
        ([models / "actor", models], "is not a PEFT folder"),
    ):
        with pytest.raises(SystemExit) as caught:
            merge_adapters.main([str(argument) for argument in arguments])
        assert caught.value.code == 2 and part in capsys.readouterr().err
