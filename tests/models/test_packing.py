"""Packed rows: nothing is lost, and each conversation is trained as if it were alone."""

import types

import numpy as np
import pytest
import torch
import transformers as hf
from datasets import Dataset
from tiny_models import CONFIGS, HIDDEN, VOCABULARY, tiny_causal_lm
from tiny_tokenizers import make_tokenizer

from dschat.data.chat_template import ensure_chat_template
from dschat.data.collators import collate_sft
from dschat.data.datasets import DataOptions, build_dataset
from dschat.data.packing import pack, packed
from dschat.losses.sft import sft_loss
from dschat.models.causal_lm import TokenLogprobs
from dschat.models.packed_attention import choose_packing

SMALL = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "initializer_range": 0.5}
WITH_OWN_MASKS = {  # windows shorter than conversations; positions and masks of their own
    "mistral with a window": lambda: hf.MistralConfig(**vars(CONFIGS["mistral"]()) | {"sliding_window": 4}),
    "falcon": lambda: hf.FalconConfig(**SMALL, num_hidden_layers=2, num_attention_heads=2),
    "mpt": lambda: hf.MptConfig(vocab_size=VOCABULARY, d_model=HIDDEN, n_layers=2, n_heads=2, initializer_range=0.5),
}
REFUSED = {
    "bloom": lambda: hf.BloomConfig(**SMALL, n_layer=2, n_head=2),
    "falcon with ALiBi": lambda: hf.FalconConfig(**SMALL, num_hidden_layers=2, num_attention_heads=2, alibi=True),
    "mamba": lambda: hf.MambaConfig(**SMALL, num_hidden_layers=2),
}


def network_of(name):
    if name in CONFIGS:
        return TokenLogprobs(tiny_causal_lm(name))
    torch.manual_seed(0)
    return TokenLogprobs(hf.AutoModelForCausalLM.from_config((WITH_OWN_MASKS | REFUSED)[name]()))


def engine_of(network):
    """Stub with the parts of an engine that choose_packing uses: module, device, forward."""

    class Engine(types.SimpleNamespace):
        def __call__(self, *args, **kwargs):
            return self.module(*args, **kwargs)

    return Engine(module=network, device=torch.device("cpu"), eval=network.eval)


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


@pytest.mark.parametrize("name", [*CONFIGS, *WITH_OWN_MASKS])
def test_a_step_over_packed_rows_has_the_loss_and_gradient_of_its_conversations_alone(name, tmp_path):
    network = network_of(name)
    choose_packing(engine_of(network))
    rows = conversations()
    packed_rows = list(packed(Dataset.from_list(rows), capacity=24, seed=0, identity="", folder=str(tmp_path)))
    assert len(packed_rows) < len(rows) and max(len(row["conversation_lengths"]) for row in packed_rows) > 1
    tokens = sum(sum(row["loss_mask"]) for row in rows)
    results = []
    for batches in ([[row] for row in rows], [packed_rows[:2], packed_rows[2:]]):
        network.zero_grad(set_to_none=True)
        total = 0.0
        for batch in (collate_sft(b, pad_token_id=0) for b in batches if b):
            logprobs = network(
                batch["input_ids"], batch["attention_mask"], batch["loss_mask"],
                packed_positions=batch.get("packed_positions"),
            )  # fmt: skip
            loss, _ = sft_loss(logprobs, batch["loss_mask"], normalizer=tokens)
            loss.backward()
            total += loss.item()
        results.append((total, {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}))
    (alone, gradients), (together, others) = results
    assert together == pytest.approx(alone, rel=1e-5)
    assert gradients.keys() == others.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(others[parameter], gradient, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_mixes_conversations_is_refused_before_training(name):
    with pytest.raises(ValueError, match="--packing: .* attends across .*remove --packing"):
        choose_packing(engine_of(network_of(name)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choose_packing_selects_positions_or_mask_for_each_architecture_and_precision(dtype):
    by_mask = {}
    for name in ("llama", "gpt2", "opt", "mpt"):
        network = network_of(name).to(dtype)
        choose_packing(engine_of(network))
        by_mask[name] = network.uses_packing_mask
    assert by_mask == {"llama": False, "gpt2": False, "opt": True, "mpt": True}


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
