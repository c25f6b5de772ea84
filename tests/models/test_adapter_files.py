"""Adapters written as a PEFT folder are loaded by PEFT itself."""

import pytest
import torch
from peft import PeftModel
from tiny_models import tiny_causal_lm

from dschat.models.adapter_files import adapter_config, save_adapters
from dschat.models.causal_lm import TokenLogprobs
from dschat.models.lora import add_lora

IDS = torch.tensor([[3, 4, 5, 6, 7]])


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_peft_loads_them_and_computes_the_same_logits(family, tmp_path):
    model = tiny_causal_lm(family).eval()
    base = tiny_causal_lm(family).eval()
    add_lora(model, dim=3, module_name="", only_optimize_lora=True, alpha=5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.normal_(std=0.3)
    save_adapters(TokenLogprobs(model), tmp_path)
    loaded = PeftModel.from_pretrained(base, tmp_path).eval()
    with torch.no_grad():
        expected, actual, plain = model(IDS).logits, loaded(IDS).logits, tiny_causal_lm(family).eval()(IDS).logits
    assert (expected - plain).abs().max() > 0.1, "the adapters change nothing"
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    config = adapter_config(model, base_model="a/model")
    assert (config.r, config.lora_alpha, config.base_model_name_or_path) == (3, 5, "a/model")


def test_a_model_without_adapters_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no adapters: train with --lora_dim"):
        save_adapters(tiny_causal_lm("llama"), tmp_path)
