"""step2_dpo_finetuning beyond the common tests in test_steps.py: its losses, its reference, KTO's KL."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from programs import MAINS
from step_materials import (
    assert_loads_with_plain_transformers,
    assert_same_line,
    flags,
    metrics_of,
    tiny_llama,
    weights_of,
    write_materials,
    write_rows,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from dschat.arguments import PreferenceArguments
from dschat.data.collators import collate_preferences
from dschat.data.datasets import DataSplits
from dschat.data.encoding import FEATURES
from dschat.data.mismatched import next_different, with_mismatched
from dschat.preference.objective import configured_pair_loss

LOSSES = ["dpo", "ipo", "hinge", "robust", "simpo", "orpo", "kto"]
PAIRS = [
    {"prompt": f"What is {i} plus {i}?", "chosen": f"It is {2 * i}." + " Sure." * (i % 3), "rejected": "No." + " 1" * i}
    for i in range(7)
]


@pytest.fixture(scope="module")
def materials(tmp_path_factory, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("materials")
    write_materials(folder, tiny_tokenizer)
    write_rows(folder / "held_out.jsonl", PAIRS)
    return folder


@pytest.fixture
def run(programs, materials, tmp_path):
    """run(name, …) runs the step into tmp_path/name and returns what it printed."""

    def once(name: str, *, processes: int = 1, code: int = 0, **settings) -> str:
        argv = flags("dpo", materials, tmp_path / name, processes=processes, **settings)
        log = tmp_path / f"{name}-{len(list(tmp_path.glob('*.log')))}.log"
        return programs.run(MAINS["dpo"], argv, processes=processes, log=log, code=code)

    return once


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains_equally_on_one_and_two_processes(loss, run, tmp_path):
    settings = {"preference_loss": loss, "max_steps": 2, "learning_rate": 1e-4}
    run("one", zero=0, **settings)
    run("two", zero=3, processes=2, accumulation=2, **settings)
    one, two = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two")
    assert [line["phase"] for line in one] == ["eval", "train", "train", "eval"]
    for line, expected_line in zip(two, one, strict=True):
        assert_same_line(line, expected_line, loss)
    assert one[-1]["eval_loss"] < one[0]["eval_loss"] and one[-1]["rewards/margins"] > one[0]["rewards/margins"]
    assert_loads_with_plain_transformers("sft", tmp_path / "two")


# IPO: (0 − 1/(2·0.1))²
INITIAL_LOSS = {"dpo": math.log(2), "ipo": 25.0, "hinge": 1.0, "robust": math.log(2), "kto": 0.5}


@pytest.mark.parametrize(
    "processes, zero, settings",
    [
        (1, 0, {}),
        (2, 3, {"accumulation": 2}),
        (1, 2, {"dtype": "bf16"}),
        (2, 0, {"dtype": "bf16", "lora_dim": 2}),
        (2, 3, {"dtype": "bf16", "gradient_checkpointing": True, "preference_loss": "kto"}),
        (1, 0, {"preference_loss": "ipo", "length_normalized": True}),
        (1, 2, {"preference_loss": "hinge", "reference": "adapters_off", "lora_dim": 2, "only_optimize_lora": True}),
    ],
)
def test_before_the_first_update_policy_and_reference_agree_bit_for_bit(processes, zero, settings, run, tmp_path):
    run("run", processes=processes, zero=zero, max_steps=1, **settings)
    before, first = metrics_of(tmp_path / "run")[:2]
    for line in before, first:
        loss = line.get("eval_loss", line.get("loss"))
        assert loss == pytest.approx(INITIAL_LOSS[settings.get("preference_loss", "dpo")], rel=2e-7)
        assert line["rewards/margins"] == 0 and line["rewards/accuracies"] == 0.5 and line.get("kl", 0.0) == 0


def test_the_reference_is_scored_once_and_again_for_other_weights_rows_or_a_damaged_file(run, materials, tmp_path):
    common = {"data_output_path": tmp_path / "arrow", "max_steps": 1}

    def scored(name: str, **settings) -> bool:
        text = run(name, **common | settings)
        assert ("reference log-probs loaded from" in text) != ("reference log-probs of train rows" in text)
        return "reference log-probs of train rows" in text

    assert scored("first")
    (file,) = (tmp_path / "arrow").glob("reference-*/logprobs.safetensors")
    assert not scored("second")
    assert metrics_of(tmp_path / "first") == metrics_of(tmp_path / "second")
    assert not scored("other beta", beta=0.5, learning_rate=1e-2), "neither changes the reference's log-probs"
    content = file.read_bytes()
    file.write_bytes(content[:100])
    assert scored("damaged") and file.read_bytes() == content
    flipped = bytearray(content)
    flipped[-1] ^= 1  # one bit of the last float32: the file can still be read
    file.write_bytes(flipped)
    assert scored("flipped") and file.read_bytes() == content
    assert metrics_of(tmp_path / "flipped") == metrics_of(tmp_path / "first")
    other = tmp_path / "other"
    shutil.copytree(materials / "actor", other)
    model = AutoModelForCausalLM.from_pretrained(other)
    torch.nn.init.normal_(model.lm_head.weight, std=0.2)
    model.save_pretrained(other)
    assert scored("other reference", ref_model_name_or_path=other)
    assert metrics_of(tmp_path / "other reference")[0]["rewards/margins"] != 0
    assert scored("other rows", eval_data_path=materials / "held_out.jsonl")
    assert not list((tmp_path / "arrow").glob("*.unfinished"))


def test_disabling_the_adapters_gives_the_same_run_as_a_precomputed_reference(run, tmp_path):
    settings = {"lora_dim": 2, "only_optimize_lora": True, "lora_learning_rate": 1e-2}
    for loss in "dpo", "kto":
        run(f"{loss}-once", **settings, preference_loss=loss)
        output = run(f"{loss}-off", **settings, preference_loss=loss, reference="adapters_off")
        assert "reference log-probs" not in output
        assert metrics_of(tmp_path / f"{loss}-off") == metrics_of(tmp_path / f"{loss}-once")
        actual, expected = (weights_of(tmp_path / f"{loss}-{way}") for way in ("off", "once"))
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
    run("shared", **settings, reference="adapters_off", processes=2, zero=3)
    for actual, expected in zip(metrics_of(tmp_path / "shared"), metrics_of(tmp_path / "dpo-once"), strict=True):
        assert_same_line(actual, expected, "ZeRO 3")


def test_every_row_has_a_reference_in_later_epochs(run, tmp_path):
    run("run", num_train_epochs=2, max_steps=None, learning_rate=1e-7)
    train = [line for line in metrics_of(tmp_path / "run") if line["phase"] == "train"]
    assert len(train) == 12 and all(None not in line.values() for line in train)
    margins = [line["rewards/margins"] for line in train]
    assert max(map(abs, margins)) < 0.01, "a row with another row's reference would be far off"


def response_logprob(model, tokenizer, prompt: str, response: str) -> float:
    """By plain transformers: log p of the response and the EOS after it."""
    chat = [{"role": "user", "content": prompt}]
    start = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": response}], tokenize=False)
    prefix, ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (start, whole))
    assert ids[: len(prefix)] == prefix and ids[-1] == tokenizer.eos_token_id
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(logprobs[i - 1, ids[i]].item() for i in range(len(prefix), len(ids)))


@pytest.fixture
def log_ratio(materials, tmp_path):
    """log_ratio(prompt, response): of the exported model against the one it started from."""
    tokenizer = AutoTokenizer.from_pretrained(materials / "actor")
    reference = AutoModelForCausalLM.from_pretrained(materials / "actor").eval()

    def of(prompt: str, response: str) -> float:
        policy = AutoModelForCausalLM.from_pretrained(tmp_path / "run").eval()
        policy_logprob, ref_logprob = (
            response_logprob(model, tokenizer, prompt, response) for model in (policy, reference)
        )
        return policy_logprob - ref_logprob

    return of


def test_evaluation_is_the_dpo_loss_of_plain_transformers(run, materials, tmp_path, log_ratio):
    run("run", processes=2, zero=3, eval_data_path=materials / "held_out.jsonl", beta=0.3, max_seq_len=96)
    last = metrics_of(tmp_path / "run")[-1]
    z = [0.3 * (log_ratio(row["prompt"], row["chosen"]) - log_ratio(row["prompt"], row["rejected"])) for row in PAIRS]
    assert last["eval_loss"] == pytest.approx(sum(math.log(1 + math.exp(-x)) for x in z) / 7, rel=1e-4)
    assert last["rewards/margins"] == pytest.approx(sum(z) / 7, rel=1e-3) and last["pairs"] == 7
    assert last["rewards/accuracies"] == sum(x > 0 for x in z) / 7 and abs(sum(z) / 7) > 0.05


def test_evaluation_is_the_kto_loss_of_plain_transformers(run, materials, tmp_path, log_ratio):
    """The pairs as 14 rows; each prompt's two stand together, so the next other prompt's chosen one is the mismatch."""
    run(
        "run", processes=2, zero=2, preference_loss="kto", eval_data_path=materials / "held_out.jsonl", max_seq_len=96,
        undesirable_weight=0.5, beta=0.2,
    )  # fmt: skip
    last = metrics_of(tmp_path / "run")[-1]
    first_train = json.loads((materials / "pairs.jsonl").read_text().splitlines()[0])
    others = [row["chosen"] for row in PAIRS[1:]] + [first_train["chosen"]]
    ratios = [log_ratio(row["prompt"], other) for row, other in zip(PAIRS, others, strict=True)]
    kl = max(0.0, sum(ratios) / 7)  # each prompt counts twice, so the mean is that of one each
    assert last["kl"] == pytest.approx(kl, rel=1e-3, abs=1e-6) and last["rows"] == 14
    total = 0.0
    for row in PAIRS:
        good, bad = (log_ratio(row["prompt"], row[name]) for name in ("chosen", "rejected"))
        total += 1 - 1 / (1 + math.exp(-0.2 * (good - kl))) + 0.5 * (1 - 1 / (1 + math.exp(-0.2 * (kl - bad))))
    assert last["eval_loss"] == pytest.approx(total / 14, rel=1e-4)


def test_unpaired_rows_train_kto(run, tmp_path):
    rows = [
        {"prompt": f"What is {i} plus 1?", "completion": f"It is {i + i % 2}.", "label": bool(i % 2)} for i in range(40)
    ]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    run("run", preference_loss="kto", data_path=file, eval_data_path=file, max_steps=8)
    last = metrics_of(tmp_path / "run")[-1]
    assert last["rewards/chosen"] > last["rewards/rejected"] and last["rows"] == 40


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_training_needs_no_evaluation_rows(loss, run, tmp_path):
    run("run", preference_loss=loss, eval_fraction=0, max_steps=1)
    assert [line["phase"] for line in metrics_of(tmp_path / "run")] == ["train"]


@pytest.mark.parametrize(
    ("loss", "settings", "expected"),
    [
        # Log-ratios +3 over 2 tokens and −2 over 4: sums differ by 5, means by 1.5 + 0.5 = 2; 1/(2β) is 1
        ("ipo", {}, (2 - 1) ** 2),
        ("ipo", {"length_normalized": True}, (2 - 1) ** 2),
        ("ipo", {"length_normalized": False}, (5 - 1) ** 2),
        ("dpo", {}, math.log(1 + math.exp(-2.5))),
        ("dpo", {"length_normalized": True}, math.log(1 + math.exp(-1))),
        ("robust", {}, math.log(1 + math.exp(-2.5))),
        ("hinge", {}, 0.0),
        ("hinge", {"length_normalized": True}, 0.0),
        # Without a reference, of means −1 and −2: β·(−1 + 2) − γ = 0
        ("simpo", {"simpo_gamma": 0.5}, math.log(2)),
        ("simpo", {"simpo_gamma": 0.5, "length_normalized": False}, math.log(2)),
    ],
)
def test_only_ipo_averages_log_probs_by_default_and_length_normalized_overrides_it(loss, settings, expected):
    pair = {"chosen_ids": [5, 6, 7], "rejected_ids": [5, 6, 7, 8, 9], "prompt_length": 1, "ref_logprobs": [-5, -6]}
    batch = collate_preferences([pair], pad_token_id=0)
    logprobs = torch.where(batch["loss_mask"], torch.tensor([[-1.0], [-2.0]]), 0.0)  # sums −2 and −8
    arguments = PreferenceArguments(preference_loss=loss, beta=0.5, **settings)
    actual, metrics = configured_pair_loss(arguments)(lambda *_: logprobs, batch, 1.0)
    assert actual.item() == pytest.approx(expected, abs=1e-6)
    assert metrics["logps/chosen"].item() == (-1 if arguments.uses_mean_logprobs else -2)


def test_the_sft_term_raises_the_probability_of_chosen_responses(run, tmp_path):
    for name, coef in (("without", 0.0), ("with", 1.0)):
        run(name, sft_coef=coef, learning_rate=1e-2)
    without, with_ = (metrics_of(tmp_path / name)[-1] for name in ("without", "with"))
    assert with_["logps/chosen"] > without["logps/chosen"] + 1 and "sft_loss" not in without


def test_contradictory_flags_are_reported_together(run, materials):
    output = run("run", code=2, reference="adapters_off", ref_model_name_or_path=materials / "nothing")
    for part in ("3 mistakes", "remove one of them", "--only_optimize_lora", "there is no such folder"):
        assert output.count(part) == 1, output
    one_prompt = [{"prompt": "What?", "response": f"{i}.", "label": 1} for i in range(20)]
    output = run("run", code=2, preference_loss="kto", data_path=write_rows(materials / "one.jsonl", one_prompt))
    assert "all rows have the same prompt" in output and "Traceback" not in output


def test_a_reference_with_another_vocabulary_is_refused(run, materials, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(materials / "other_reward")
    tiny_llama(LlamaForCausalLM, tokenizer, seed=2).save_pretrained(tmp_path / "other_actor")
    tokenizer.save_pretrained(tmp_path / "other_actor")
    output = run("run", code=2, ref_model_name_or_path=tmp_path / "other_actor")
    assert "--ref_model_name_or_path" in output and "tokens differ between their vocabularies" in output
    assert "Traceback" not in output and "reference log-probs" not in output


def test_settings_without_effect_or_outside_the_usual_range_warn(run, materials):
    output = run(
        "run", max_steps=1, preference_loss="simpo", label_smoothing=0.1, ref_model_name_or_path=materials / "actor",
        desirable_weight=2,
    )  # fmt: skip
    for part in ("--label_smoothing 0.1 has no effect", "/actor has no effect",
                 "--desirable_weight 2.0 has no effect", "2 to 10 is usual"):  # fmt: skip
        assert output.count(part) == 1, output


# --- mismatched rows -------------------------------------------------------------------------------------------------


def test_the_mismatched_row_is_the_next_one_with_another_prompt():
    assert next_different([b"a", b"a", b"b", b"c", b"a"]) == [2, 2, 3, 4, 2]
    assert next_different([b"a", b"b"]) == [1, 0]
    with pytest.raises(ValueError, match="the same prompt"):
        next_different([b"a", b"a"])


def test_mismatched_ids_join_the_prompt_with_the_next_other_response_truncated_to_the_limit():
    ids = [[1, 2, 9], [1, 2, 8, 8], [3, 7, 7, 7], [4, 6]]
    columns = {"input_ids": ids, "prompt_length": [2, 2, 1, 1], "desirable": [True] * 4, "length": [3, 4, 4, 2]}
    rows = Dataset.from_dict(columns, features=FEATURES["unpaired"])
    splits = with_mismatched(DataSplits(train=rows.select([2, 0, 1]), eval=rows.select([3]), report=None), max_tokens=4)
    assert splits.train["mismatched_ids"][:] == [[3, 9], [1, 2, 6], [1, 2, 6]]
    assert splits.eval["mismatched_ids"][:] == [[4, 7, 7, 7]]
    cut = with_mismatched(DataSplits(train=rows.select([0, 2]), eval=rows.select([]), report=None), max_tokens=4)
    assert cut.train["mismatched_ids"][:] == [[1, 2, 7, 7], [3, 9]]
