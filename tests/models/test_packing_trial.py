"""The trial that decides how a model is run: what it finds, what it says, and what it leaves alone."""

import pytest
import torch
import transformers as hf
from architectures import tiny_architecture
from packed_models import FULL, PADDED, enabled, network_of
from tiny_models import CONFIGS, HIDDEN, VOCABULARY

from dschat.models.backbone import Packing
from dschat.models.causal_lm import TokenLogprobs
from dschat.models.packed.layout import PackedLayout
from dschat.models.scalar_head import TokenScores

# Why a batch stays padded: attention code of their own; recurrent states; later tokens or other positions.
OWN_ATTENTION = [
    "bloom", "codegen", "deepseek_v32", "doge", "falcon", "gpt_neo", "gptj", "mpt", "rembert", "xglm",
]  # fmt: skip
DIFFERING = [
    "bamba", "bert", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2",
    "minimax", "nemotron_h", "qwen3_next", "recurrent_gemma", "roberta", "whisper", "xlnet", "zamba", "zamba2",
]  # fmt: skip


@pytest.mark.parametrize("kind", [*OWN_ATTENTION, *DIFFERING])
def test_models_that_cannot_be_packed_stay_padded_with_one_warning_that_says_why(kind, caplog):
    network = TokenLogprobs(tiny_architecture(kind))  # the wrapper is in training mode, the model is not
    (warning,) = enabled(network, caplog)
    reason = "its attention cannot be packed (" if kind in OWN_ATTENTION else "hidden states would differ by "
    assert warning.startswith(f"{type(network.model).__name__}: batches are padded, since {reason}")
    assert network.packing == PADDED and network.training and not network.model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*CONFIGS, "mistral with a window"])
def test_the_trial_finds_the_same_in_any_precision_and_leaves_the_model_as_it_was(name, dtype, caplog):
    network = network_of(name).to(dtype).train()
    config = network.model.config.to_dict()
    weights = {n: p.clone() for n, p in network.named_parameters()}
    implementation = network.model.config._attn_implementation
    assert enabled(network, caplog) == [] and network.packing == FULL
    assert network.training and network.model.config.to_dict() == config
    assert network.model.config._attn_implementation == implementation
    assert all(p.equal(weights[n]) and p.grad is None for n, p in network.named_parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in network.modules())


def test_the_user_may_keep_padding_or_every_copy_of_a_prompt(caplog):
    for allowed, expected in {
        (False, True): PADDED, (False, False): PADDED, (True, False): Packing(remove_padding=True), (True, True): FULL,
    }.items():  # fmt: skip
        network = network_of("llama")
        assert enabled(network, caplog, remove_padding=allowed[0], share_prompts=allowed[1]) == []
        assert network.packing == expected
    network = network_of("mamba")
    assert enabled(network, caplog, remove_padding=False) == [], "nothing was asked for, so nothing is missing"


def test_a_model_that_supports_packing_but_not_continuations_shares_no_prompts_and_says_so(caplog):
    network = network_of("llama")
    body, original = network.model.model, network.model.model.forward

    def forward(*args, position_ids, **kwargs):
        steps = position_ids[:, 1:] - position_ids[:, :-1]
        if not ((steps == 1) | (position_ids[:, 1:] == 0)).all():
            raise ValueError("positions must start at 0")
        return original(*args, position_ids=position_ids, **kwargs)

    body.forward = forward
    (warning,) = enabled(network, caplog)
    assert warning.startswith("LlamaForCausalLM: prompts are not shared, since") and "must start at 0" in warning
    assert network.packing == Packing(remove_padding=True)


def test_a_model_that_ignores_its_window_when_packed_is_detected_though_the_window_is_long(caplog, monkeypatch):
    """The window of 40 is longer than the rows of the trial."""
    config = hf.MistralConfig(**vars(CONFIGS["mistral"]()) | {"sliding_window": 40})
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config)
    assert enabled(TokenLogprobs(model), caplog) == []
    masks = PackedLayout.masks
    monkeypatch.setattr(PackedLayout, "masks", lambda self, visible: masks(self, None))
    network = TokenLogprobs(model)
    assert len(enabled(network, caplog)) == 1 and network.packing == PADDED


def test_an_encoder_that_scores_whole_sequences_stays_padded(caplog):
    config = hf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_labels=1, initializer_range=0.5,
    )  # fmt: skip
    network = TokenScores(hf.AutoModelForSequenceClassification.from_config(config))
    assert len(enabled(network, caplog)) == 1 and network.packing == PADDED
