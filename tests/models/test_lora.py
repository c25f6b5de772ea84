from __future__ import annotations

import pytest
import torch
import transformers
from architectures import tiny_architecture
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from tiny_models import left_and_right_padded, tiny_causal_lm, tiny_classifier, tiny_tokenizer

from dschat.models.causal_lm import TokenLogprobs
from dschat.models.lora import add_lora, lora_targets, optimizer_groups, without_adapters
from dschat.models.scalar_head import TokenScores
from dschat.models.weights import export_model


def trainable(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gpt-neox"])
def test_fresh_adapters_change_nothing_and_then_learn(name):
    model = TokenLogprobs(tiny_causal_lm(name))
    tokens, mask = left_and_right_padded()
    before = model(tokens, mask, mask)
    add_lora(model, dim=2, module_name="all", only_optimize_lora=True)
    after = model(tokens, mask, mask)
    torch.testing.assert_close(after, before)
    after.sum().backward()
    b_gradients = [p.grad for n, p in model.named_parameters() if ".lora_B." in n]
    assert len(b_gradients) >= 8 and all(g.any() for g in b_gradients)


def test_the_output_is_w_x_plus_alpha_over_dim_b_a_x():
    model = tiny_causal_lm("llama")
    weight = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    add_lora(model, dim=2, module_name="up_proj", only_optimize_lora=True, alpha=6.0)
    layer = model.model.layers[0].mlp.up_proj
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    x = torch.randn(3, 16)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.shape == (2, 16) and b.shape == (24, 2)
    torch.testing.assert_close(layer(x), x @ weight.T + 3.0 * x @ a.T @ b.T)


def test_alpha_is_twice_dim_unless_given():
    model = tiny_causal_lm("llama")
    add_lora(model, dim=3, module_name="q_proj", only_optimize_lora=True)
    assert model.model.layers[1].self_attn.q_proj.scaling == {"default": 2.0}


def test_targets_match_by_part_of_their_name_and_exclude_heads():
    model = tiny_causal_lm("llama")
    assert lora_targets(model, "layers.1.self_attn") == [
        f"model.layers.1.self_attn.{part}_proj" for part in ("q", "k", "v", "o")
    ]
    every = lora_targets(model, "all")
    assert len(every) == 14 and "lm_head" not in every
    assert not any("score" in name for name in lora_targets(tiny_classifier("llama"), "all"))
    # OPT's projections beside the embedding are linear layers too.
    assert "model.decoder.project_out" in lora_targets(tiny_causal_lm("opt-projected"), "project")
    with pytest.raises(ValueError, match="'lm_head'.*down_proj, gate_proj, k_proj.*or 'all'"):
        lora_targets(model, "lm_head")
    with pytest.raises(ValueError, match="--lora_dim 0"):
        add_lora(model, dim=0, module_name="all", only_optimize_lora=True)


def test_only_the_named_layers_get_adapters():
    model = tiny_causal_lm("llama")
    add_lora(model, dim=2, module_name="q_proj", only_optimize_lora=True)
    paths = [f"model.layers.{i}.self_attn.q_proj.lora_{ab}.default.weight" for i in (0, 1) for ab in "AB"]
    assert trainable(model) == set(paths)


def test_a_scalar_head_stays_trainable_beside_adapters():
    model = TokenScores(tiny_classifier("opt"))
    add_lora(model, dim=2, module_name="all", only_optimize_lora=True)
    assert {name for name in trainable(model) if "lora_" not in name} == {"model.score.weight"}


def test_all_weights_are_trained_without_only_optimize_lora_but_frozen_ones_stay_frozen():
    model = tiny_causal_lm("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    names = {name for name, _ in model.named_parameters()}
    add_lora(model, dim=2, module_name="q_proj", only_optimize_lora=False)
    base_names = {name.replace(".base_layer", "") for name in trainable(model) if "lora_" not in name}
    assert base_names == names - {"model.embed_tokens.weight"}


def test_adapters_depend_on_the_seed_alone_and_differ_between_layers():
    drawn = []
    for seed, draws in ((1, 0), (1, 4), (2, 0)):
        model = tiny_causal_lm("llama")
        torch.manual_seed(seed)
        torch.rand(draws)
        add_lora(model, dim=2, module_name="q_proj", only_optimize_lora=True)
        drawn.append([p.detach() for n, p in model.named_parameters() if ".lora_A." in n])
    assert drawn[0][0].equal(drawn[1][0]) and not drawn[0][0].equal(drawn[2][0])
    assert not drawn[0][0].equal(drawn[0][1])
    assert drawn[0][0].abs().max() <= 0.25 and drawn[0][0].min() < 0 < drawn[0][0].max()  # 1/√16


def test_groups_hold_each_trainable_parameter_once_and_decay_matrices_only():
    model = TokenLogprobs(tiny_causal_lm("opt"))
    add_lora(model, dim=2, module_name="fc1", only_optimize_lora=False)
    groups = {
        g["name"]: g for g in optimizer_groups(model, learning_rate=1.0, lora_learning_rate=3.0, weight_decay=0.1)
    }
    assert [(g["lr"], g["weight_decay"]) for g in groups.values()] == [(1.0, 0.1), (1.0, 0.0), (3.0, 0.1)]
    ids = [id(p) for g in groups.values() for p in g["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())
    names = {id(p): n for n, p in model.named_parameters()}
    assert all("lora_" in names[id(p)] for p in groups["lora"]["params"]) and len(groups["lora"]["params"]) == 4
    assert all(names[id(p)].endswith("bias") or "norm" in names[id(p)] for p in groups["biases_and_norms"]["params"])
    assert all(p.dim() == 2 for p in groups["weights"]["params"])


def test_groups_without_members_are_left_out():
    model = tiny_causal_lm("llama")
    add_lora(model, dim=2, module_name="q_proj", only_optimize_lora=True)
    (only,) = optimizer_groups(model, learning_rate=2.0)
    assert only["name"] == "lora" and only["lr"] == 2.0
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        optimizer_groups(model, learning_rate=2.0)


def test_without_adapters_equals_the_base_model_and_restores_the_adapters_bit_for_bit():
    model = TokenLogprobs(tiny_causal_lm("llama"))
    tokens, mask = left_and_right_padded()
    plain = model(tokens, mask, mask)
    add_lora(model, dim=2, module_name="all", only_optimize_lora=True, alpha=3.0)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)
    adapted = model(tokens, mask, mask)
    with without_adapters(model):
        assert torch.equal(model(tokens, mask, mask), plain)
    assert not torch.allclose(adapted, plain) and torch.equal(model(tokens, mask, mask), adapted)
    with pytest.raises(KeyError), without_adapters(model):
        raise KeyError
    assert torch.equal(model(tokens, mask, mask), adapted), "also after an error"


# Fused experts, a router that is a linear layer, weights that are read without a call, blocks that share weights.
@pytest.mark.parametrize(
    "kind",
    [
        "deepseek_v3",
        "longcat_flash",
        "qwen3_next",
        "llama4_text",
        "jamba",
        "mamba",
        "falcon_h1",
        "zamba",
        "zamba2",
        "falcon",
    ],
)  # fmt: skip
def test_the_export_of_an_adapted_model_is_what_was_trained(kind, tmp_path):
    model = tiny_architecture(kind)
    tokens = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    before = model(tokens).logits
    add_lora(model, dim=2, module_name="all", only_optimize_lora=True)
    assert not any(isinstance(layer, ParamWrapper) for layer in model.modules())
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    trained = model(tokens).logits
    assert (trained - before).abs().max() > 0.1
    export_model(model, tmp_path, tiny_tokenizer(97))
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(exported(tokens).logits, trained, atol=1e-4, rtol=1e-4)


def test_blocks_that_share_their_weights_share_one_adapter_and_its_gradient():
    model = tiny_architecture("zamba2")
    add_lora(model, dim=2, module_name="shared_transformer.self_attn.q_proj", only_optimize_lora=True)
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    assert len(layers) == 2 and layers[0].lora_A is layers[1].lora_A and layers[0].lora_B is layers[1].lora_B
    assert len(trainable(model)) == 2


def test_a_layer_whose_weight_is_read_without_a_call_is_refused_by_name(caplog):
    model = tiny_architecture("jamba")
    assert not any(name.endswith("dt_proj") for name in lora_targets(model, "all"))
    assert "dt_proj" in caplog.text
    with pytest.raises(ValueError, match="'dt_proj'.*read without calling"):
        lora_targets(model, "dt_proj")


def test_target_modules_are_whole_names_and_unknown_ones_are_named():
    model = tiny_causal_lm("llama")
    targets = lora_targets(model, ["q_proj", "mlp.down_proj"])
    assert {name.rsplit(".", 1)[-1] for name in targets} == {"q_proj", "down_proj"}
    assert lora_targets(model, ["0.self_attn.v_proj"]) == ["model.layers.0.self_attn.v_proj"]
    with pytest.raises(ValueError, match="--lora_target_modules proj: .* has no such linear layer .* q_proj"):
        lora_targets(model, ["q_proj", "proj"])
