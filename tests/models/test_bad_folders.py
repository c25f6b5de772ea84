"""Invalid model folders are reported in one line before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input import INVALID_JSON
from safetensors.torch import load_file, save_file
from step_materials import write_materials
from tiny_models import CONFIGS, tiny_causal_lm, tiny_classifier
from tiny_tokenizers import make_tokenizer
from transformers import AutoConfig

from dschat.models.folder_check import causal_problems, shape_problems
from dschat.runs.validation import model_problems


def edited(name: str, **changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(content | changes), encoding="utf-8")

    return edit


def written(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def tensors(renamed: Callable[[str], str | None], *, dtype: torch.dtype | None = None) -> Callable[[Path], None]:
    """Rename the tensors of the weights; those that become None are left out."""

    def edit(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        result = {renamed(name): value.to(dtype or value.dtype) for name, value in stored.items() if renamed(name)}
        save_file(result, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


MODELS = {  # damage to the folder of a valid causal language model → part of the message
    "hidden size": (edited("config.json", hidden_size=64), "contradicts the weights"),
    "vocabulary": (edited("config.json", vocab_size=7), "contradicts the weights"),
    "feed-forward size": (edited("config.json", intermediate_size=40), "contradicts the weights"),
    "key heads": (edited("config.json", num_key_value_heads=4), "contradicts the weights"),
    "head size": (edited("config.json", head_dim=16), "contradicts the weights"),
    "three more layers": (edited("config.json", num_hidden_layers=5), "num_hidden_layers is 5, and the files hold 2"),
    "negative size": (edited("config.json", hidden_size=-32), ""),
    "size is text": (edited("config.json", hidden_size="wide"), ""),
    "size is null": (edited("config.json", hidden_size=None), ""),
    "unknown activation": (edited("config.json", hidden_act="none_such"), "no model can be built from config.json"),
    "unknown architecture": (edited("config.json", model_type="none_such"), "no model configuration"),
    "a classifier": (edited("config.json", architectures=["LlamaForSequenceClassification"]), "does not generate text"),
    "tagger": (edited("config.json", architectures=["LlamaForTokenClassification"]), "does not generate text"),
    "an encoder": (edited("config.json", architectures=["BertForMaskedLM"], model_type="bert"), "does not generate"),
    "encoder and decoder": (edited("config.json", architectures=["T5Model"], model_type="t5"), "not causal language"),
    "template": (written("chat_template.jinja", b"{% for m in messages %}"), "not valid Jinja (line 1"),
    "template's braces": (written("chat_template.jinja", b"a\n{{ messages"), "not valid Jinja (line 2"),
    "template's tag": (written("chat_template.jinja", b"\n\n{% whilst %}"), "not valid Jinja (line 3"),
    "tokenizer's model": (edited("tokenizer.json", model={"type": "None"}), "no tokenizer could be loaded"),
    "tokenizer's vocabulary": (edited("tokenizer.json", model=3), "no tokenizer could be loaded"),
    "tokenizer's version": (edited("tokenizer.json", version="99"), "no tokenizer could be loaded"),
    "weights cut short": (written("model.safetensors", b"\x10\0\0\0\0\0\0\0{}"), "is damaged"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "no config": (
        lambda folder: (folder / "config.json").unlink(), "no model configuration: the folder has no config.json"),
    "no tokenizer": (lambda folder: [file.unlink() for file in folder.glob("tokenizer*")], "has no tokenizer"),
    "more layers than the files": (edited("config.json", num_hidden_layers=99), "the files hold 2"),
    "fewer layers than the files": (edited("config.json", num_hidden_layers=1), "the files hold 2 layers"),
    "architectures are a number": (edited("config.json", architectures=3), "must be a list of class names"),
    "architectures are a text": (edited("config.json", architectures="LlamaForCausalLM"), "must be a list of class"),
    "architectures hold a number": (edited("config.json", architectures=[3]), "must be a list of class names"),
    "biases that no file has": (edited("config.json", attention_bias=True), "lack 8 parameters"),
    "biases of the feed-forward": (edited("config.json", mlp_bias=True), "lack 6 parameters"),
    "quantized by nothing": (edited("config.json", quantization_config={}), "must be an object with a quant_method"),
    "quantized by a number": (edited("config.json", quantization_config=3), "must be an object with a quant_method"),
    "quantized by null method": (edited("config.json", quantization_config={"bits": 4}), "with a quant_method"),
    "dropout above 1": (edited("config.json", attention_dropout=2), "attention_dropout is 2"),
    "dropout below 0": (edited("config.json", attention_dropout=-0.5), "attention_dropout is -0.5"),
    "cache implementation": (edited("generation_config.json", cache_implementation="none"), "generation_config.json"),
    "end token is text": (edited("generation_config.json", eos_token_id="x"), "eos_token_id is 'x'"),
    "end tokens hold text": (edited("generation_config.json", eos_token_id=[1, "x"]), "eos_token_id is [1, 'x']"),
    "adapter": (written("adapter_config.json", b"{}"), "holds a PEFT adapter"),
    "adapter without config": (
        lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"), "has adapters, not a model"),
    "adapter's weights only": (lambda folder: (folder / "model.safetensors").rename(folder / "adapter.safetensors")
                               and None, "has no weights"),
    "weights of another model": (tensors(lambda name: f"foo.{name}"), "lack 21 parameters"),
    "no head": (tensors(lambda name: name if "lm_head" not in name else None), "lack 1 parameters"),
    "no embedding": (tensors(lambda name: name if "embed" not in name else None), "lack 1 parameters"),
    "one matrix missing": (tensors(lambda name: name if "0.mlp.up" not in name else None), "0.mlp.up_proj.weight"),
    "weights of whole numbers": (tensors(lambda name: name, dtype=torch.int32), "is stored as I32"),
    "index of nothing": (written("model.safetensors.index.json", b'{"metadata": {}, "weight_map": {}}'), "no file"),
    "index without metadata": (written("model.safetensors.index.json", b'{"weight_map": {"a": "model.safetensors"}}'),
                               "it has no metadata"),
    "index of a list": (written("model.safetensors.index.json", b'{"weight_map": ["a"]}'), "cannot be read"),
    "index of numbers": (written("model.safetensors.index.json", b'{"metadata": {}, "weight_map": {"a": 3}}'),
                         "names files outside its folder"),
    "index that leaves": (written("model.safetensors.index.json", b'{"metadata": {}, "weight_map": {"a": "../b"}}'),
                          "names files outside its folder"),
    "index of what is missing": (written("model.safetensors.index.json", b'{"metadata": {}, "weight_map": {"a": "b"}}'),
                                 "lacks b"),
    "tokenizer of words": (edited("tokenizer_config.json", tokenizer_class="BertTokenizer"), "cannot encode"),
    "longest text is text": (edited("tokenizer_config.json", model_max_length="x"), "model_max_length"),
    "files of Git LFS": (written("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"), "is damaged"),
    "empty weights": (written("model.safetensors", b""), "is damaged"),
} | {
    f"{name} layers": (edited("config.json", num_hidden_layers=name), "num_hidden_layers is") for name in (0, -1, 10**9)
} | {
    f"template {name}": (written("chat_template.jinja", text), part)
    for name, (text, part) in {
        "calls a list": (b"{{ messages() }}", "cannot render a conversation"),
        "divides by 0": (b"{{ 1 / 0 }}", "cannot render a conversation"),
        "imports": (b"{% import 'os' as os %}", "cannot render a conversation"),
        "includes": (b"{% include 'x' %}", "cannot render a conversation"),
        "refuses all": (b"{{ raise_exception('no') }}", "cannot render a conversation, not even one user message (no)"),
        "of unknown names": (b"{{ nothing.here }}", "cannot render a conversation"),
        "leaves its sandbox": (b"{{ ''.__class__.__mro__ }}", "cannot render a conversation"),
        "counts for ever": (b"{% for i in range(10 ** 9) %}{% endfor %}", "cannot render a conversation"),
        "reads message 99": (b"{{ messages[99].x.y }}", "cannot render a conversation"),
        "of a constant": (b"constant", "omits the user's message"),
        "of NUL": (b"\0\0", "omits the user's message"),
        "of roles only": (b"{% for m in messages %}{{ m.role }}{% endfor %}", "omits the user's message"),
        "with an unknown filter": (b"{{ messages | nosuchfilter }}", "not valid Jinja"),
    }.items()
} | {
    f"config {name}={str(value)[:12]}": (edited("config.json", **{name: value}), "")
    for name, values in {
        "hidden_size": (0, -1, 31, [32], 10**18), "vocab_size": (0, -5, None, "x", 10**12),
        "num_attention_heads": (0, 3, -4, None, "x"), "num_key_value_heads": (0, 3, -1), "head_dim": (0, -1, 7),
        "max_position_embeddings": (None, "x"), "rms_norm_eps": ("x",), "hidden_act": ("", 3, None),
        "rope_parameters": (3, {"rope_type": "none_such"}), "layer_types": (["x"], 3), "model_type": (3, None, "clip"),
        "tie_word_embeddings": ("x",), "id2label": (3, {"x": 1}), "is_encoder_decoder": (True,),
    }.items()
    for value in values
} | {
    f"{name} {content[:12]!r}": (written(name, content), name)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    for content in [*(c for c in INVALID_JSON), b"[]", b"3", b"null"]
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    write_materials(folder, make_tokenizer(eos="</s>", pad="<pad>"))
    return folder / "actor"


@pytest.mark.parametrize("name", MODELS)
def test_a_broken_model_folder_is_reported_in_one_line_before_anything_is_loaded(name, model, tmp_path):
    damage, part = MODELS[name]
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    damage(folder)
    lines = model_problems("--actor", str(folder), tokens=8, lengths="--max_seq_len 8", causal=True)
    assert lines and all(line.startswith(f"--actor {folder}: ") and "\n" not in line for line in lines), lines
    assert any(part in line for line in lines), lines


def test_a_valid_model_folder_is_accepted_and_a_file_is_refused(model):
    check = partial(model_problems, "--actor", tokens=8, lengths="--max_seq_len 8", causal=True)
    assert check(str(model)) == []
    assert "is a file; name the folder" in check(str(model / "model.safetensors"))[0]
    assert model_problems("--critic", str(model.parent / "reward"), tokens=8, lengths="") == []


@pytest.mark.parametrize("name", CONFIGS)
def test_no_architecture_is_reported_to_contradict_its_own_weights(name, tmp_path):
    for kind, build in (("causal", tiny_causal_lm), ("classifier", tiny_classifier)):
        if kind == "classifier" and name in ("cohere", "granite"):  # transformers has no classifiers of them
            continue
        build(name).save_pretrained(tmp_path / kind)
        config = AutoConfig.from_pretrained(tmp_path / kind)
        assert shape_problems(tmp_path / kind, config) == []
        assert bool(causal_problems(config)) == (kind == "classifier")
