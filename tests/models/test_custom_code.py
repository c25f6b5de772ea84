"""Model code runs only with --trust_remote_code, without a prompt on standard input."""

import ast
import importlib.util
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from repository import ROOT
from transformers import AutoTokenizer, dynamic_module_utils

from dschat.models.causal_lm import load_causal_lm
from dschat.models.scalar_head import has_scalar_head, load_scalar_head
from dschat.models.tokenizer import load_tokenizer
from dschat.models.weights import export_model
from dschat.runs.validation import model_problems

CONFIGURATION = """
from pathlib import Path
from transformers import LlamaConfig
Path({marker!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
TOKENIZATION = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({marker!r}).touch()
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def change_json(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture
def marker(tmp_path, monkeypatch) -> Path:
    """The file that custom code creates when it runs; modules that transformers copies go to a folder of the test."""
    modules = tmp_path / "modules"
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path / "was_run"
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


@pytest.fixture
def own_model(tiny_llama_folder, marker) -> Path:
    """A Llama whose configuration and model are classes of its own folder."""
    (tiny_llama_folder / "configuration_own.py").write_text(CONFIGURATION.format(marker=str(marker)))
    (tiny_llama_folder / "modeling_own.py").write_text(MODELING)
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    change_json(tiny_llama_folder / "config.json", auto_map=classes, model_type="own_llama")
    return tiny_llama_folder


@pytest.fixture
def own_tokenizer(tiny_llama_folder, marker) -> Path:
    (tiny_llama_folder / "tokenization_own.py").write_text(TOKENIZATION.format(marker=str(marker)))
    classes = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    change_json(
        tiny_llama_folder / "tokenizer_config.json", auto_map=classes, tokenizer_class="OwnTokenizer"
    )
    return tiny_llama_folder


@pytest.fixture
def yes(monkeypatch) -> io.StringIO:
    """Standard input that answers yes to every question."""
    answers = io.StringIO("y\n" * 9)
    monkeypatch.setattr(sys, "stdin", answers)
    return answers


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch):
    """Programs of scripts/ import modules beside them."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def script(name: str):
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_custom_model_code_is_refused_by_every_program_without_reading_standard_input(own_model, marker, yes, capsys):
    refused = rf"{own_model} has custom Python code .* --trust_remote_code"
    with pytest.raises(ValueError, match=refused):
        load_causal_lm(own_model, dtype=torch.float32)
    with pytest.raises(ValueError, match=refused):
        load_scalar_head(own_model, dtype=torch.float32)
    with pytest.raises(ValueError, match=refused):
        has_scalar_head(own_model)
    (problem,) = model_problems("--model_name_or_path", str(own_model), tokens=8, lengths="--max_seq_len 8")
    assert problem.startswith(f"--model_name_or_path: {own_model} has") and problem.endswith("its author")
    assert script("chat").main([str(own_model)]) == 2
    assert script("serve_reward_model").main([str(own_model)]) == 2
    assert capsys.readouterr().err.count("--trust_remote_code") == 2
    assert not marker.exists() and yes.tell() == 0


def test_custom_tokenizer_code_is_refused(own_tokenizer, marker, yes):
    with pytest.raises(ValueError, match=rf"{own_tokenizer} has custom Python code .* --trust_remote_code"):
        load_tokenizer(own_tokenizer)
    (problem,) = model_problems("--model_name_or_path", str(own_tokenizer), tokens=8, lengths="--max_seq_len 8")
    assert "has custom Python code" in problem
    assert not marker.exists() and yes.tell() == 0


def test_trusted_code_runs_and_is_exported_with_the_model(own_model, marker, tmp_path):
    lines = model_problems(
        "--model_name_or_path", str(own_model), tokens=8, lengths="--max_seq_len 8", trust_remote_code=True
    )
    assert lines == [] and marker.exists()
    model = load_causal_lm(own_model, dtype=torch.float32, trust_remote_code=True)
    assert type(model).__name__ == "OwnForCausalLM"
    export_model(model, tmp_path / "export", AutoTokenizer.from_pretrained(own_model))
    again = load_causal_lm(tmp_path / "export", dtype=torch.float32, trust_remote_code=True)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_a_trusted_tokenizer_loads(own_tokenizer, marker):
    assert type(load_tokenizer(own_tokenizer, trust_remote_code=True)).__name__.startswith("OwnTokenizer")
    assert marker.exists()


@pytest.mark.parametrize("flags", [[], ["--trust_remote_code"]])
def test_chat_passes_the_flag_on(flags, own_model, yes, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert script("chat").main([str(own_model), *flags]) == (0 if flags else 2)


def test_every_call_of_from_pretrained_passes_trust_remote_code():
    """`from_pretrained` and `from_config` without trust_remote_code ask on standard input."""
    files = [file for folder in ("dschat", "scripts", "training") for file in (ROOT / folder).rglob("*.py")]
    calls = [
        (file, node)
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("from_pretrained", "from_config")
        and ast.unparse(node.func.value) not in ("PeftConfig", "PeftModel")  # load no code of a model
    ]  # fmt: skip
    assert len(calls) >= 8
    without_flag = [f"{file}:{node.lineno}" for file, node in calls
              if "trust_remote_code" not in [keyword.arg for keyword in node.keywords]]  # fmt: skip
    assert without_flag == []


def test_every_call_of_the_loaders_of_dschat_passes_trust_remote_code():
    """Programs that load a model named by the user pass trust_remote_code to the loaders of dschat too."""
    loaders = ("load_tokenizer", "load_causal_lm", "load_scalar_head", "has_scalar_head", "LoadOptions", "read_config")
    own_models = ("summarize.py", "evaluate.py")  # of the quickstart and of chain_sum: they load their own models
    for file in [file for folder in ("dschat", "scripts", "training") for file in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in loaders:
                names = [keyword.arg for keyword in node.keywords]
                assert "trust_remote_code" in names or None in names or file.name in own_models, f"{file}:{node.lineno}"
