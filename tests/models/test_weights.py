from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from architectures import tiny_architecture
from disk_limits import limit_file_size
from safetensors.torch import load_file
from tiny_models import left_and_right_padded, tiny_causal_lm, tiny_classifier, tiny_tokenizer

from dschat.models.causal_lm import TokenLogprobs, load_tokenizer
from dschat.models.lora import add_lora
from dschat.models.scalar_head import TokenScores
from dschat.models.weight_files import weights_digest
from dschat.models.weights import ExportError, checkpoint_weights, export_model, full_weights, pretrained_model


def with_adapters(name, dtype=torch.float32):
    """A model with non-zero adapters: B is random as well."""
    model = tiny_causal_lm(name).to(dtype)
    add_lora(model, dim=2, module_name="all", only_optimize_lora=False)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if ".lora_B." in parameter_name:
                parameter.normal_(std=0.3)
    return model.eval()


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gpt-neox", "phi"])
def test_without_zero3_and_lora_full_weights_are_the_parameters_under_their_own_names(name):
    model = tiny_causal_lm(name)
    weights = dict(full_weights(TokenLogprobs(model)))
    plain = dict(model.named_parameters())  # tied ones once, under the first name: the embedding's
    assert weights.keys() == plain.keys()
    assert all(weights[key] is plain[key] for key in plain)


def test_a_tied_weight_is_included_once_under_the_name_that_loading_needs(tmp_path):
    model = tiny_causal_lm("llama-tied")
    names = [name for name, _ in full_weights(model)]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert len(names) == len(set(names))
    export_model(model, tmp_path, tiny_tokenizer())
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert again.lm_head.weight.equal(model.lm_head.weight)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "mixtral", "deepseek_v3", "jamba", "qwen3_next", "phimoe"])
def test_checkpoint_weights_have_the_names_and_values_of_the_files(kind, loaded, tmp_path):
    model = tiny_architecture(kind)
    model.save_pretrained(tmp_path, state_dict=dict(full_weights(model)))
    if loaded:
        model = type(model).from_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    weights = dict(checkpoint_weights(model))
    assert weights.keys() == files.keys()
    assert all(torch.equal(weight, files[name]) for name, weight in weights.items())
    assert (weights.keys() == dict(full_weights(model)).keys()) is (kind == "llama"), "nothing is fused"


def test_persistent_buffers_are_included_and_others_are_not():
    model = tiny_causal_lm("llama")
    model.model.register_buffer("kept", torch.ones(2))
    model.model.register_buffer("dropped", torch.ones(2), persistent=False)
    weights = dict(full_weights(model))
    assert "model.kept" in weights and "model.dropped" not in weights and weights.keys() == model.state_dict().keys()


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "opt", "gpt-neox", "gemma2"])
def test_an_export_with_adapters_has_the_logprobs_of_the_model_and_does_not_change_its_weights(name, tmp_path):
    model = with_adapters(name)
    tokens, mask = left_and_right_padded()
    expected = TokenLogprobs(model)(tokens, mask, mask)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    export_model(TokenLogprobs(model), tmp_path, tiny_tokenizer())
    after = model.state_dict()
    assert before.keys() == after.keys() and all(value.equal(after[key]) for key, value in before.items())
    plain, info = hf.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(TokenLogprobs(plain.eval())(tokens, mask, mask), expected, atol=1e-4, rtol=1e-4)
    base = TokenLogprobs(tiny_causal_lm(name).eval())(tokens, mask, mask)
    assert (base - expected).abs().max() > 0.1


def test_merging_adapters_in_bfloat16_rounds_once():
    model = with_adapters("llama", torch.bfloat16)
    layer = model.model.layers[1].mlp.down_proj
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    exact = (layer.base_layer.weight.double() + 2.0 * b @ a).to(torch.bfloat16)
    merged = dict(full_weights(model))["model.layers.1.mlp.down_proj.weight"]
    assert merged.dtype == torch.bfloat16
    # fp32 and fp64 sums rarely round to different values.
    assert (merged != exact).float().mean() < 0.01


def test_adapters_that_are_merged_or_switched_off_are_not_added_again():
    model = with_adapters("llama")
    name = "model.layers.0.self_attn.q_proj.weight"
    merged = dict(full_weights(model))[name]
    layer = model.model.layers[0].self_attn.q_proj
    layer.enable_adapters(False)
    assert dict(full_weights(model))[name] is layer.base_layer.weight
    layer.enable_adapters(True)
    layer.merge()
    torch.testing.assert_close(dict(full_weights(model))[name].data, merged)


def test_an_export_keeps_dtype_and_chat_template_and_is_safetensors_only(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    export_model(TokenLogprobs(tiny_causal_lm("qwen2").bfloat16()), tmp_path, tokenizer)
    assert not list(tmp_path.glob("*.bin")) and list(tmp_path.glob("*.safetensors"))
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    again = load_tokenizer(tmp_path)
    assert again.chat_template == tokenizer.chat_template and again.get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_an_export_has_the_permissions_that_the_umask_leaves(umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        export_model(tiny_causal_lm("llama"), tmp_path / "model", tiny_tokenizer())
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert set(modes.values()) == {mode} and "model.safetensors" in modes


def test_a_classifier_exports_with_its_head(tmp_path):
    model = tiny_classifier("gpt2")
    add_lora(model, dim=2, module_name="attn", only_optimize_lora=True)
    export_model(TokenScores(model), tmp_path, tiny_tokenizer())
    assert hf.AutoModelForSequenceClassification.from_pretrained(tmp_path).score.weight.equal(model.score.weight)


def test_modules_and_folders_that_cannot_be_exported_are_refused(tmp_path):
    with pytest.raises(ValueError, match="Linear contains no Hugging Face model"):
        pretrained_model(torch.nn.Linear(1, 1))
    (tmp_path / "occupied").write_text("")
    with pytest.raises(RuntimeError, match="could not be written"):
        export_model(tiny_causal_lm("llama"), tmp_path / "occupied", tiny_tokenizer())


def test_two_ranks_with_partitioned_weights_train_and_export_as_one_process_does(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    worker = Path(__file__).parent / "zero3_models.py"
    completed = subprocess.run(
        [*command, str(worker), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-6000:]
    assert completed.stdout.count("all equal") == 2


def test_a_hub_models_digest_is_its_name_and_commit_without_running_its_code(tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--owner--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"auto_map": {"AutoConfig": "own.OwnConfig"}}')
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert weights_digest("owner/name") == f"owner/name@{commit}"


def test_an_export_on_a_full_disk_keeps_the_previous_one_or_leaves_nothing(tmp_path):
    first, second, tokenizer = tiny_causal_lm("llama"), tiny_causal_lm("llama"), tiny_tokenizer()
    with torch.no_grad():
        second.lm_head.weight += 1
    export_model(first, tmp_path / "model", tokenizer)
    (tmp_path / "model" / "metrics.jsonl").touch()  # of the run, not of the model
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    for folder in ("model", "new"):
        with limit_file_size(10_000), pytest.raises(ExportError, match=f"could not be written to .*{folder}"):
            export_model(second, tmp_path / folder, tokenizer)
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    assert not (tmp_path / "new").exists()


def test_an_export_replaces_one_with_other_files(tmp_path):
    model, tokenizer = tiny_causal_lm("llama"), tiny_tokenizer()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    export_model(model, tmp_path, tokenizer)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    assert not (tmp_path / ".unfinished").exists()
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(map(torch.equal, again.parameters(), model.parameters()))
