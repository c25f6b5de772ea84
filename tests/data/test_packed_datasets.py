"""Conversations packed into rows: nothing is lost, and rows are nearly full."""

import numpy as np
from datasets import Dataset
from packed_models import conversations
from tiny_tokenizers import make_tokenizer

from dschat.data.chat_template import ensure_chat_template
from dschat.data.collators import collate_sft
from dschat.data.datasets import DataOptions, build_dataset
from dschat.data.packing import pack, packed


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
