"""Packed rows: nothing is lost, and each conversation is trained as if it were alone, packed or padded."""

import logging

import numpy as np
import pytest
import torch
import transformers as hf
from architectures import tiny_architecture
from datasets import Dataset
from tiny_models import CONFIGS, HIDDEN, VOCABULARY, tiny_causal_lm, tiny_classifier, tiny_tokenizer
from tiny_tokenizers import make_tokenizer

from dschat.data.chat_template import ensure_chat_template
from dschat.data.collators import collate_sft
from dschat.data.datasets import DataOptions, build_dataset
from dschat.data.packing import pack, packed
from dschat.losses.sft import sft_loss
from dschat.models.backbone import Packing
from dschat.models.causal_lm import TokenLogprobs, load_causal_lm
from dschat.models.packing_trial import enable_packing
from dschat.models.scalar_head import TokenScores

FULL, PADDED = Packing(remove_padding=True, share_prompts=True), Packing()
# By model type: windows and chunks shorter than the tests' rows, soft-capped logits, attention sinks, latent attention,
# differential attention, experts, rotations of every kind.
PACKED = [
    "cohere2", "dbrx", "deepseek_v2", "deepseek_v3", "diffllama", "gemma", "gemma2", "gemma3_text", "gemma3n_text",
    "gemma4_text", "glm4_moe_lite", "gpt2", "gpt_neox", "gpt_oss", "jetmoe", "llama", "llama4_text", "longcat_flash",
    "minicpm3", "mistral", "moshi", "olmo3", "opt", "phimoe", "qwen2", "qwen3", "qwen3_moe", "youtu",
]  # fmt: skip
# Why a batch stays padded: attention code of their own; recurrent states; later tokens or other positions.
OWN_ATTENTION = [
    "bloom", "codegen", "deepseek_v32", "doge", "falcon", "gpt_neo", "gptj", "mpt", "rembert", "xglm",
]  # fmt: skip
DIFFERING = [
    "bamba", "bert", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2",
    "minimax", "nemotron_h", "qwen3_next", "recurrent_gemma", "roberta", "whisper", "xlnet", "zamba", "zamba2",
]  # fmt: skip
RELATIVE = {"gemma4_text": 1e-4}  # sums of many terms that cancel: 3e-5 by rounding
MODELS = {
    **CONFIGS,
    "mistral with a window": lambda: hf.MistralConfig(**vars(CONFIGS["mistral"]()) | {"sliding_window": 4}),
    "falcon with ALiBi": lambda: hf.FalconConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, initializer_range=0.5, num_hidden_layers=2, num_attention_heads=2,
        alibi=True,
    ),
    "mpt": lambda: hf.MptConfig(vocab_size=VOCABULARY, d_model=HIDDEN, n_layers=2, n_heads=2, initializer_range=0.5),
    "mamba": lambda: hf.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, initializer_range=0.5, num_hidden_layers=2
    ),
}  # fmt: skip


def network_of(name: str) -> TokenLogprobs:
    if name in CONFIGS:
        return TokenLogprobs(tiny_causal_lm(name))
    torch.manual_seed(0)
    return TokenLogprobs(hf.AutoModelForCausalLM.from_config(MODELS[name]()))


def enabled(network, caplog, *, remove_padding: bool = True, share_prompts: bool = True) -> list[str]:
    """Warnings of enable_packing."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="dschat"):
        enable_packing(network, remove_padding=remove_padding, share_prompts=share_prompts)
    return [record.getMessage() for record in caplog.records if record.name.startswith("dschat")]


def rows_with_equal_prompts(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, attention and loss mask [7, 22]: two prompts with three responses each, and a row of its own.

    Padded on the left, right, both sides or not at all; responses of 1 to 12 tokens, one with a gap in its loss.
    """
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(vocabulary, (length,), generator=generator) for length in (9, 3, 8)]
    shape = [(0, 0, 12), (1, 2, 1), (0, 1, 4), (2, 3, 5), (1, 0, 12), (0, 9, 4), (1, 4, 7)]  # prompt, left, response
    ids, mask = torch.full((len(shape), 22), 1), torch.zeros(len(shape), 22, dtype=torch.bool)
    loss_mask = mask.clone()
    for row, (prompt, left, response) in enumerate(shape):
        tokens = torch.cat([prompts[prompt], torch.randint(vocabulary, (response,), generator=generator)])
        ids[row, left : left + len(tokens)], mask[row, left : left + len(tokens)] = tokens, True
        loss_mask[row, left + len(prompts[prompt]) : left + len(tokens)] = True
    loss_mask[4, 6:8] = False
    return ids, mask, loss_mask


def outputs_and_gradients(network, call):
    """The outputs [·] of call(), and the gradient of their sum with fixed random weights, by parameter."""
    network.zero_grad(set_to_none=True)
    outputs = torch.cat([output.flatten() for output in call()])
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(6))
    (outputs * weights).sum().backward()
    return outputs.detach(), {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}


def assert_close_gradients(actual, expected, *, relative: float) -> None:
    """Each within `relative` of the parameter's largest gradient; parameters that cancel, of the model's median one."""
    assert actual.keys() == expected.keys()
    sizes = {name: float(gradient.abs().max()) for name, gradient in expected.items()}
    typical = float(np.median([size for size in sizes.values() if size]))
    for name, gradient in expected.items():
        error = float((actual[name] - gradient).abs().max())
        assert error <= relative * max(sizes[name], typical), (name, error, sizes[name], typical)


def conversations(count=7, seed=0):
    """Rows of 2 to 14 tokens, every second or third token trained, never the first."""
    generator = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        ids = generator.integers(VOCABULARY, size=generator.integers(2, 15)).tolist()
        mask = [False, *(j % (2 + i % 2) == 0 for j in range(1, len(ids)))]
        mask[-1] = True
        rows.append({"input_ids": ids, "loss_mask": mask, "length": len(ids)})
    return rows


def test_items_are_packed_by_best_fit_decreasing():
    """7 | 6 | 5 and 5 | 3 into the fullest row with room: beside 7, full | 3 beside 6 | 1 beside 6 and 3."""
    lengths = [3, 7, 5, 1, 6, 5, 3]
    assert [[lengths[i] for i in row] for row in pack(lengths, capacity=10)] == [[7, 3], [6, 3, 1], [5, 5]]
    assert pack([], capacity=10) == []


def test_packing_keeps_every_item_within_capacity_in_few_rows():
    lengths = np.random.default_rng(0).integers(1, 101, size=2000).tolist()
    rows = pack(lengths, capacity=100)
    assert sorted(item for row in rows for item in row) == list(range(2000))
    assert max(sum(lengths[item] for item in row) for row in rows) <= 100
    fewest = -(-sum(lengths) // 100)
    assert len(rows) <= 1.03 * fewest


def test_packed_rows_hold_every_conversation_whole_and_are_reused(tmp_path):
    rows = conversations(50)
    packed_rows = packed(Dataset.from_list(rows), capacity=20, seed=1, identity="x", folder=str(tmp_path))
    unpacked = []
    for row in packed_rows:
        assert row["length"] == len(row["input_ids"]) == len(row["loss_mask"]) == sum(row["conversation_lengths"]) <= 20
        start = 0
        for length in row["conversation_lengths"]:
            unpacked.append((row["input_ids"][start : start + length], row["loss_mask"][start : start + length]))
            start += length
    assert sorted(unpacked) == sorted((row["input_ids"], row["loss_mask"]) for row in rows)
    (file,) = tmp_path.iterdir()
    before = file.stat().st_mtime_ns
    again = packed(Dataset.from_list(rows), capacity=20, seed=1, identity="x", folder=str(tmp_path))
    assert file.stat().st_mtime_ns == before and again[:] == packed_rows[:]
    packed(Dataset.from_list(rows), capacity=20, seed=2, identity="x", folder=str(tmp_path))
    packed(Dataset.from_list(rows), capacity=20, seed=1, identity="y", folder=str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 3


def test_positions_restart_with_each_conversation_and_are_0_on_padding():
    rows = [
        {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [False] * 5, "conversation_lengths": [2, 3]},
        {"input_ids": [6, 7], "loss_mask": [False] * 2, "conversation_lengths": [2]},
    ]
    batch = collate_sft(rows, pad_token_id=0, pad_to_multiple_of=1)
    assert batch["packed_positions"].tolist() == [[0, 1, 0, 1, 2], [0, 1, 0, 0, 0]]
    assert "packed_positions" not in collate_sft([{"input_ids": [1], "loss_mask": [False]}], pad_token_id=0)


def tokens_embedded(network) -> list[int]:
    """Tokens of each forward pass from now on."""
    passes: list[int] = []
    network.model.get_input_embeddings().register_forward_pre_hook(lambda _, args: passes.append(args[0].numel()))
    return passes


def run_padded_and_packed(network, call):
    """Outputs and gradients of both; the network is packed afterwards."""
    packing, network.backbone.packing = network.packing, PADDED
    padded = outputs_and_gradients(network, call)
    network.backbone.packing = packing
    return padded, outputs_and_gradients(network, call)


@pytest.mark.parametrize("kind", PACKED)
def test_packed_rows_with_shared_prompts_have_the_logprobs_and_gradients_of_padded_ones(kind, caplog):
    """Of 7 · 22 columns 89 hold real tokens, 65 if the prompts of 9 and 3 tokens are computed once instead of thrice.

    The tolerance of a gradient is 1e-5 of the parameter's largest (or of a typical one, where all of them cancel).
    """
    network = TokenLogprobs(tiny_architecture(kind))
    assert enabled(network, caplog) == [] and network.packing == FULL
    ids, mask, loss_mask = rows_with_equal_prompts(97)
    passes = tokens_embedded(network)
    (expected, gradients), (actual, others) = run_padded_and_packed(
        network, lambda: network(ids, mask, loss_mask, 0.7, True)
    )
    assert passes == [7 * 22, 65]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)
    assert_close_gradients(others, gradients, relative=RELATIVE.get(kind, 1e-5))
    network.backbone.packing = Packing(remove_padding=True)
    torch.testing.assert_close(
        network(ids, mask, loss_mask, 0.7).flatten(), expected[: ids.numel()], rtol=1e-5, atol=2e-5
    )
    assert passes[2:] == [89]


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
    from dschat.models import packed_attention

    config = hf.MistralConfig(**vars(CONFIGS["mistral"]()) | {"sliding_window": 40})
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config)
    assert enabled(TokenLogprobs(model), caplog) == []
    masks = packed_attention.PackedLayout.masks
    monkeypatch.setattr(packed_attention.PackedLayout, "masks", lambda self, visible: masks(self, None))
    network = TokenLogprobs(model)
    assert len(enabled(network, caplog)) == 1 and network.packing == PADDED


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mistral with a window"])
def test_recomputed_layers_attend_inside_the_same_sequences(name, caplog, tmp_path):
    network_of(name).model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    ids, mask, loss_mask = rows_with_equal_prompts(VOCABULARY)
    results = []
    for checkpointing in (False, True):
        model = load_causal_lm(tmp_path, dtype=torch.float32, gradient_checkpointing=checkpointing)
        network = TokenLogprobs(model).train()
        assert enabled(network, caplog) == []
        results.append(outputs_and_gradients(network, lambda network=network: [network(ids, mask, loss_mask)]))
    (expected, gradients), (actual, others) = results
    assert torch.equal(actual, expected)
    assert_close_gradients(others, gradients, relative=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma2", "qwen3", "mistral"])
def test_scores_and_their_gradients_are_those_of_padded_rows(name, caplog):
    network = TokenScores(tiny_classifier(name))
    assert enabled(network, caplog) == [] and network.packing == FULL
    ids, mask, loss_mask = rows_with_equal_prompts(VOCABULARY)
    prompts = torch.tensor([9, 3, 9, 8, 3, 9, 3])
    passes = tokens_embedded(network)
    (expected, gradients), (actual, others) = run_padded_and_packed(
        network, lambda: [network(ids, mask, prompt_lengths=prompts)[mask], network.sequence_scores(ids, mask, prompts)]
    )
    assert passes == [7 * 22, 7 * 22, 65, 65]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)
    assert_close_gradients(others, gradients, relative=1e-5)


def test_an_encoder_that_scores_whole_sequences_stays_padded(caplog):
    config = hf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_labels=1, initializer_range=0.5,
    )  # fmt: skip
    network = TokenScores(hf.AutoModelForSequenceClassification.from_config(config))
    assert len(enabled(network, caplog)) == 1 and network.packing == PADDED


@pytest.mark.parametrize("name", MODELS)
def test_a_step_over_packed_rows_has_the_loss_and_gradient_of_its_conversations_alone(name, caplog, tmp_path):
    """Where the model runs rows without padding, and where each conversation becomes a padded row."""
    network = network_of(name)
    enabled(network, caplog)
    rows = conversations()
    packed_rows = list(packed(Dataset.from_list(rows), capacity=24, seed=0, identity="", folder=str(tmp_path)))
    assert len(packed_rows) < len(rows) and max(len(row["conversation_lengths"]) for row in packed_rows) > 1
    tokens = sum(sum(row["loss_mask"]) for row in rows)

    def losses(batches):
        for batch in (collate_sft(b, pad_token_id=0) for b in batches if b):
            logprobs = network(
                batch["input_ids"], batch["attention_mask"], batch["loss_mask"],
                packed_positions=batch.get("packed_positions"),
            )  # fmt: skip
            yield sft_loss(logprobs, batch["loss_mask"], normalizer=tokens)[0][None]

    results = {}
    for packing in {network.packing, PADDED}:
        network.backbone.packing = PADDED
        alone, gradients = outputs_and_gradients(network, lambda: [sum(losses([[row] for row in rows]))])
        network.backbone.packing = packing
        together, others = outputs_and_gradients(network, lambda: [sum(losses([packed_rows[:2], packed_rows[2:]]))])
        assert float(together) == pytest.approx(float(alone), rel=1e-5)
        assert_close_gradients(others, gradients, relative=2e-5)
        results[packing] = together
    assert (FULL in results) == (name not in ("falcon with ALiBi", "mpt", "mamba"))


def test_packing_is_a_data_option_and_in_the_report(tmp_path):
    tokenizer = make_tokenizer()
    ensure_chat_template(tokenizer)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "add {i}", "response": "{"5" * (i % 9 + 1)}"}}\n' for i in range(60)))
    plain, full = (
        build_dataset(
            "sft", tokenizer, DataOptions([str(file)], str(tmp_path), 128, packing=packing, eval_fraction=0.2)
        )
        for packing in (False, True)
    )
    for split in ("train", "eval"):
        before, after = getattr(plain, split), getattr(full, split)
        assert sum(len(lengths) for lengths in after["conversation_lengths"]) == len(before) > len(after)
        assert sum(after["length"]) == sum(before["length"])
    line = f"packed: {len(plain.train)} conversations to train on into {len(full.train)} rows"
    assert line in full.report.summary() and "packed" not in plain.report.summary()
