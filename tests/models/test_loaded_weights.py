"""Checks after loading: NaN and infinite weights, missing and unused ones; by every loader and by the programs."""

import io
import math
import sys
from pathlib import Path

import pytest
import torch
from repository import SCRIPTS
from safetensors.torch import load_file, save_file
from tiny_models import tiny_causal_lm, tiny_classifier, tiny_tokenizer

from dschat.models.causal_lm import load_causal_lm
from dschat.models.scalar_head import load_scalar_head

sys.path.insert(0, str(SCRIPTS))
import chat  # noqa: E402
import serve_reward_model  # noqa: E402

NORM = "model.layers.1.input_layernorm.weight"


def rewrite(folder: Path, change, *, file: str = "model.safetensors") -> None:
    """Apply `change` to the tensors of a weight file."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


def set_value(name: str, value: float):
    def change(tensors):
        tensors[name].view(-1)[-1] = value

    return change


@pytest.fixture
def folders(tmp_path) -> dict[str, Path]:
    for kind, model in (("causal", tiny_causal_lm("llama")), ("classifier", tiny_classifier("llama"))):
        model.save_pretrained(tmp_path / kind)
        tiny_tokenizer().save_pretrained(tmp_path / kind)
    return {kind: tmp_path / kind for kind in ("causal", "classifier")}


LOADERS = {"causal": load_causal_lm, "classifier": load_scalar_head}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_named_with_its_file(kind, dtype, value, folders):
    rewrite(folders[kind], set_value(NORM, value))
    kind_of_value = "NaN" if math.isnan(value) else "infinite"
    with pytest.raises(ValueError, match=rf"tensor {NORM} in model\.safetensors has {kind_of_value} values:"):
        LOADERS[kind](folders[kind], dtype=dtype)


def test_a_backbone_with_nan_gets_no_new_head(folders):
    rewrite(folders["causal"], set_value(NORM, math.nan))
    with pytest.raises(ValueError, match=rf"tensor {NORM} in model\.safetensors has NaN"):
        load_scalar_head(folders["causal"], dtype=torch.float32)


def test_the_shard_of_a_bad_tensor_is_named(tmp_path):
    tiny_causal_lm("llama").save_pretrained(tmp_path, max_shard_size="5KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    (shard,) = (path for path in shards if NORM in load_file(path))
    assert len(shards) > 1
    rewrite(tmp_path, set_value(NORM, math.nan), file=shard.name)
    with pytest.raises(ValueError, match=f"{NORM} in {shard.name} has NaN"):
        load_causal_lm(tmp_path, dtype=torch.float32)


def test_a_weight_beyond_the_range_of_the_dtype_is_not_blamed_on_the_files(folders):
    rewrite(folders["causal"], set_value(NORM, 1e5))
    with pytest.raises(ValueError, match=rf"{NORM} has NaN or infinite values in float16, though its files have none"):
        load_causal_lm(folders["causal"], dtype=torch.float16)


def add_unused(tensors):
    tensors["v_head.weight"] = torch.zeros(3)


PROGRAMS = {"causal": chat.main, "classifier": serve_reward_model.main}
BAD_WEIGHTS = {
    "not finite": (set_value(NORM, math.nan), f"the tensor {NORM} in model.safetensors has NaN values"),
    "missing": (lambda tensors: tensors.pop(NORM), f"lack 1 parameters of Llama.*{NORM}"),
}


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("problem", BAD_WEIGHTS)
def test_chat_and_the_reward_server_refuse_the_weights_that_training_refuses(
    kind, problem, folders, monkeypatch, capsys
):
    change, message = BAD_WEIGHTS[problem]
    rewrite(folders[kind], change)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert PROGRAMS[kind]([str(folders[kind]), *(["--port", "0"] if kind == "classifier" else [])]) == 2
    with pytest.raises(ValueError, match=message):
        LOADERS[kind](folders[kind], dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        raise ValueError(capsys.readouterr().err)


@pytest.mark.parametrize("kind", LOADERS)
def test_weights_that_no_parameter_uses_are_reported(kind, folders, caplog):
    rewrite(folders[kind], add_unused)
    LOADERS[kind](folders[kind], dtype=torch.float32)
    report = caplog.text
    assert "v_head.weight" in report and "UNEXPECTED" in report
