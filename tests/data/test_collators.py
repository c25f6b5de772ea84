import json
import subprocess
import sys

import torch

from dschat.data.collators import collate_preferences, collate_prompts, collate_sft, collate_unpaired

PAD = 9  # also a real token in the rows below: masks must not come from ids


def test_sft_rows_are_padded_on_the_right_with_masks_from_lengths():
    rows = [
        {"input_ids": [1, PAD, 3], "loss_mask": [False, True, True]},
        {"input_ids": [4, 5, 6, 7, PAD], "loss_mask": [False, False, False, True, True]},
    ]
    batch = collate_sft(rows, pad_token_id=PAD, pad_to_multiple_of=1)
    t, f = True, False
    assert batch["input_ids"].tolist() == [[1, PAD, 3, PAD, PAD], [4, 5, 6, 7, PAD]]
    assert batch["attention_mask"].tolist() == [[t, t, t, f, f], [t, t, t, t, t]]
    assert batch["loss_mask"].tolist() == [[f, t, t, f, f], [f, f, f, t, t]]
    assert batch["input_ids"].dtype == torch.long
    assert batch["attention_mask"].dtype == batch["loss_mask"].dtype == torch.bool


def test_width_is_rounded_up_and_nothing_else_changes():
    rows = [{"input_ids": list(range(9)), "loss_mask": [True] * 9}]
    tight = collate_sft(rows, pad_token_id=PAD, pad_to_multiple_of=1)
    wide = collate_sft(rows, pad_token_id=PAD)
    assert wide["input_ids"].shape == (1, 16)
    for name in tight:
        assert torch.equal(wide[name][:, :9], tight[name])
    assert not wide["attention_mask"][:, 9:].any() and not wide["loss_mask"][:, 9:].any()


def test_preferences_are_chosen_then_rejected_in_one_batch():
    rows = [
        {"chosen_ids": [1, 2, 3, 4], "rejected_ids": [1, 2, PAD], "prompt_length": 2, "margin": 0.5},
        {"chosen_ids": [5, 6], "rejected_ids": [5, 7, 8], "prompt_length": 1, "margin": None},
    ]
    batch = collate_preferences(rows, pad_token_id=PAD, pad_to_multiple_of=1)
    t, f = True, False
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, PAD, PAD], [1, 2, PAD, PAD], [5, 7, 8, PAD]]
    assert batch["attention_mask"].tolist() == [[t, t, t, t], [t, t, f, f], [t, t, t, f], [t, t, t, f]]
    assert batch["loss_mask"].tolist() == [[f, f, t, t], [f, t, f, f], [f, f, t, f], [f, t, t, f]]
    assert batch["margin"].tolist() == [0.5, 0.0] and batch["margin"].dtype == torch.float32
    assert batch["pair_mask"].tolist() == [True, True]


def test_unpaired_batches_include_the_mismatched_responses():
    rows = [
        {"input_ids": [1, 2, 3], "mismatched_ids": [1, 2, PAD, 4], "prompt_length": 2, "desirable": True},
        {"input_ids": [5, PAD], "mismatched_ids": [5, 6], "prompt_length": 1, "desirable": False,
         "ref_logprobs": [-1.5, -2.5]},
    ]  # fmt: skip
    batch = collate_unpaired(rows, pad_token_id=PAD, pad_to_multiple_of=1)
    t, f = True, False
    assert batch["input_ids"].tolist() == [[1, 2, 3], [5, PAD, PAD]]
    assert batch["loss_mask"].tolist() == [[f, f, t], [f, t, f]]
    assert batch["mismatched_ids"].tolist() == [[1, 2, PAD, 4], [5, 6, PAD, PAD]]
    assert batch["mismatched_attention_mask"].tolist() == [[t, t, t, t], [t, t, f, f]]
    assert batch["mismatched_loss_mask"].tolist() == [[f, f, t, t], [f, t, f, f]]
    assert batch["desirable"].tolist() == [t, f] and batch["row_mask"].tolist() == [t, t]
    assert batch["ref_logprobs"].tolist() == [[0.0, 0.0], [-1.5, -2.5]]
    empty = collate_unpaired([], pad_token_id=PAD, pad_to_multiple_of=1)
    assert empty["row_mask"].tolist() == [f] and not empty["loss_mask"].any() and empty["attention_mask"].all()


def test_an_empty_list_gives_a_dummy_row_that_the_masks_exclude():
    sft = collate_sft([], pad_token_id=PAD, pad_to_multiple_of=1)
    assert sft["input_ids"].tolist() == [[PAD]] and sft["attention_mask"].tolist() == [[True]]
    assert not sft["loss_mask"].any()
    pairs = collate_preferences([], pad_token_id=PAD, pad_to_multiple_of=1)
    assert pairs["input_ids"].shape == (2, 1) and pairs["attention_mask"].all()
    assert pairs["pair_mask"].tolist() == [False] and not pairs["loss_mask"].any()
    assert pairs["margin"].tolist() == [0.0]


def test_prompts_keep_ids_row_numbers_and_the_other_columns():
    messages = [{"role": "user", "content": "2 plus 3?"}]
    row = {
        "input_ids": [1, 2], "row_index": 2**40, "row": '{"answer": 5}', "prompt_text": json.dumps(messages),
        "is_chat": True,
    }  # fmt: skip
    assert collate_prompts([row]) == {
        "prompts": [[1, 2]],
        "row_index": [2**40],
        "messages": [messages],
        "is_chat": [True],
        "rows": [{"answer": 5}],
    }
    assert collate_prompts([]) == {"prompts": [], "row_index": [], "messages": [], "is_chat": [], "rows": []}


def test_collators_import_no_other_module_of_dschat_and_nothing_of_hugging_face():
    program = (
        "import sys, dschat.data.collators as c; "
        "allowed = {'dschat', 'dschat.lazy_imports', 'dschat.data', c.__name__}; "
        "own = {m for m in sys.modules if m.startswith('dschat')} - allowed; "
        "heavy = {'transformers', 'datasets', 'deepspeed'} & set(sys.modules); print(sorted(own | heavy))"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "[]"
