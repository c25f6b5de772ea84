import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tiny_tokenizers import CHATML, make_tokenizer

from dschat.checkpoints import verified_folder
from dschat.data.chat_template import encode_conversation, encode_prompt, ensure_chat_template
from dschat.data.datasets import DataOptions, build_dataset, data_problems

DATA = Path(__file__).parent / "samples"
KINDS = ("sft", "preference", "prompt")


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = make_tokenizer(bos="<s>", adds_bos=True)
    ensure_chat_template(tokenizer)
    return tokenizer


def write_pairs(file, numbers):
    """Rows that serve all three kinds; column n identifies them."""
    rows = [{"prompt": f"add {i} and 1", "chosen": f"it is {i + 1}", "rejected": "no", "n": i} for i in numbers]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def build(kind, tokenizer, tmp_path, *paths, max_tokens=64, **options):
    options = DataOptions(list(paths), str(tmp_path / "arrow"), max_tokens, **options)
    return build_dataset(kind, tokenizer, options)


def numbers(dataset):
    return [json.loads(row)["n"] for row in dataset["row"]]


def texts(tokenizer, dataset):
    return sorted(tokenizer.decode(ids) for ids in dataset["input_ids"])


def test_sft_rows_are_those_of_encode_conversation(tokenizer, tmp_path):
    splits = build("sft", tokenizer, tmp_path, str(DATA / "conversations.json"), eval_fraction=0.0)
    rows = json.loads((DATA / "conversations.json").read_text())
    assert len(splits.train) == 3 and len(splits.eval) == 0
    for built, row in zip(splits.train, rows, strict=True):
        ids, mask = encode_conversation(tokenizer, row["messages"])
        assert built == {"input_ids": ids, "loss_mask": mask, "length": len(ids)}


def test_preference_rows_share_their_prompt_and_end_with_eos(tokenizer, tmp_path):
    splits = build("preference", tokenizer, tmp_path, str(DATA / "preferences.jsonl"), eval_fraction=0.0)
    first = splits.train[0]
    prompt = encode_prompt(tokenizer, [{"role": "user", "content": "What is 2 plus 3?"}])
    n = first["prompt_length"]
    assert first["chosen_ids"][:n] == first["rejected_ids"][:n] == prompt
    assert tokenizer.decode(first["chosen_ids"][n:]) == " It is 5.</s>"
    assert tokenizer.decode(first["rejected_ids"][n:]) == " It is 6.</s>"
    assert splits.train["margin"][:] == [0.0, 0.5, 1.0]


def test_a_pair_serves_as_two_unpaired_rows_and_a_long_one_is_cut(tokenizer, tmp_path):
    splits = build(
        "unpaired", tokenizer, tmp_path, write_pairs(tmp_path / "pairs.jsonl", range(2)), phase=2, eval_fraction=0.0
    )
    assert len(splits.train) == 4 and splits.train["desirable"][:] == [True, False] * 2
    for row, (number, answer) in zip(splits.train, [(0, "it is 1"), (0, "no"), (1, "it is 2"), (1, "no")], strict=True):
        prompt = encode_prompt(tokenizer, [{"role": "user", "content": f"add {number} and 1"}])
        assert row["input_ids"][: row["prompt_length"]] == prompt and row["length"] == len(row["input_ids"])
        assert tokenizer.decode(row["input_ids"][len(prompt) :]) == f" {answer}</s>"
    whole = splits.train[0]
    response = whole["length"] - whole["prompt_length"]
    shorter = build("unpaired", tokenizer, tmp_path, str(tmp_path / "pairs.jsonl"), phase=2, eval_fraction=0.0,
                    max_tokens=whole["length"] - 2)  # fmt: skip
    cut = shorter.train[0]
    assert cut["length"] == whole["length"] - 2 and cut["prompt_length"] == whole["prompt_length"] - 2
    assert (
        cut["input_ids"][-response:] == whole["input_ids"][-response:] and cut["input_ids"][0] == tokenizer.bos_token_id
    )


def test_prompt_rows_keep_messages_and_other_columns(tokenizer, tmp_path):
    splits = build("prompt", tokenizer, tmp_path, str(DATA / "prompts.csv"), eval_fraction=0.0)
    second = splits.train[1]
    messages = [{"role": "user", "content": "Two lines,\nplease add 17 and 4."}]
    assert json.loads(second["prompt_text"]) == messages and json.loads(second["row"]) == {"answer": "21"}
    assert second["input_ids"] == encode_prompt(tokenizer, messages)
    assert np.diff(splits.train["row_index"][:]).tolist() == [1, 1]
    assert 0 <= splits.train["row_index"][0] < 2**48
    assert splits.train["length"][:] == [len(ids) for ids in splits.train["input_ids"]]


def test_phases_and_evaluation_rows_are_disjoint_and_lose_no_row(tokenizer, tmp_path):
    path = write_pairs(tmp_path / "a.jsonl", range(60))
    seen = []
    for phase in (1, 2, 3):
        splits = build("prompt", tokenizer, tmp_path, path, data_split="2,4,4", phase=phase, eval_fraction=0.2)
        assert len(splits.train) and len(splits.eval)
        seen += numbers(splits.train) + numbers(splits.eval)
        assert splits.report.sources[0].other_phases == 60 - len(splits.train) - len(splits.eval)
    assert sorted(seen) == list(range(60))


def test_each_kind_uses_the_rows_of_its_own_phase(tokenizer, tmp_path):
    path = write_pairs(tmp_path / "a.jsonl", range(60))
    built = {kind: build(kind, tokenizer, tmp_path, path, data_split="2,4,4", eval_fraction=0.0) for kind in KINDS}
    prompts = [
        [tokenizer.decode(ids).split("\n\nAssistant")[0] for ids in built[kind].train[column]]
        for kind, column in zip(KINDS, ("input_ids", "chosen_ids", "input_ids"), strict=True)
    ]
    assert len(set(sum(prompts, []))) == sum(len(part) for part in prompts) == 60


def test_split_of_a_source_does_not_depend_on_the_others(tokenizer, tmp_path):
    a, b = write_pairs(tmp_path / "a.jsonl", range(40)), write_pairs(tmp_path / "b.jsonl", range(100, 130))
    alone = build("prompt", tokenizer, tmp_path, a, data_split="2,4,4")
    beside = build("prompt", tokenizer, tmp_path, b, a, data_split="2,4,4")
    assert [n for n in numbers(beside.train) if n < 100] == numbers(alone.train)
    assert [n for n in numbers(beside.eval) if n < 100] == numbers(alone.eval)


def test_weights_set_the_shares_of_the_epoch(tokenizer, tmp_path):
    a, b = write_pairs(tmp_path / "a.jsonl", range(10)), write_pairs(tmp_path / "b.jsonl", range(100, 190))
    splits = build("prompt", tokenizer, tmp_path, f"{a}:0.7", f"{b}:0.3", eval_fraction=0.0)
    drawn = numbers(splits.train)
    assert len(drawn) == 100 and sorted(n for n in drawn if n < 100) == sorted(list(range(10)) * 7)
    assert "mixed epoch: 70 of" in splits.report.summary()


def test_own_evaluation_rows_are_used_and_nothing_is_held_out(tokenizer, tmp_path):
    write_pairs(tmp_path / "d" / "train.jsonl", range(20))
    write_pairs(tmp_path / "d" / "test.jsonl", range(50, 53))
    splits = build("prompt", tokenizer, tmp_path, str(tmp_path / "d"), eval_fraction=0.5)
    assert numbers(splits.train) == list(range(20)) and numbers(splits.eval) == [50, 51, 52]
    other = write_pairs(tmp_path / "e.jsonl", range(70, 75))
    splits = build("prompt", tokenizer, tmp_path, str(tmp_path / "d"), eval_data_path=[other], eval_fraction=0.5)
    assert numbers(splits.train) == list(range(20)) and numbers(splits.eval) == list(range(70, 75))


def test_a_small_source_still_gives_one_row_for_evaluation(tokenizer, tmp_path):
    path = write_pairs(tmp_path / "a.jsonl", range(3))
    splits = build("prompt", tokenizer, tmp_path, path, eval_fraction=1e-9)
    assert numbers(splits.train) == [0, 1] and numbers(splits.eval) == [2]


def test_a_second_call_loads_the_data_that_the_first_wrote(tokenizer, tmp_path):
    path = write_pairs(tmp_path / "a.jsonl", range(20))
    first = build("sft", tokenizer, tmp_path, path)
    (folder,) = (tmp_path / "arrow").iterdir()
    expected = ["eval.arrow", "manifest.json", "report.json", "train.arrow"]
    assert sorted(file.name for file in folder.iterdir()) == expected
    times = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    second = build("sft", tokenizer, tmp_path, path, max_bad_rows=3)
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == times
    assert list((tmp_path / "arrow").iterdir()) == [folder]
    assert second.train[:] == first.train[:] and second.report.summary() == first.report.summary()
    assert second.train.cache_files[0]["filename"] == str(folder / "train.arrow")  # memory-mapped, not copied


@pytest.mark.parametrize("change", ["file", "max_tokens", "seed", "tokenizer", "train_on_prompt"])
def test_every_change_of_the_rows_builds_the_data_again(tokenizer, tmp_path, change):
    path = write_pairs(tmp_path / "a.jsonl", range(20))
    options, other = {}, tokenizer
    before = build("sft", tokenizer, tmp_path, path)
    if change == "file":
        write_pairs(tmp_path / "a.jsonl", range(50, 70))
        os.utime(path, ns=(1, 1))
    elif change == "tokenizer":
        other = make_tokenizer(template=CHATML)
    else:
        options = {change: {"max_tokens": 12, "seed": 5, "train_on_prompt": True}[change]}
    after = build("sft", other, tmp_path, path, **options)
    assert after.train[:] != before.train[:]
    assert len(list((tmp_path / "arrow").iterdir())) == 2


def _flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


DAMAGES = {
    "a flipped bit": _flip_a_bit,
    "a cut file": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "an empty file": lambda file: file.write_bytes(b""),
    "a missing file": lambda file: file.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("packing", [False, True])
def test_damaged_folder_is_not_used_silently(tokenizer, tmp_path, capsys, damage, packing):
    """It is built again: a flipped bit would train another model, and a truncated file would end every later run."""
    path = write_pairs(tmp_path / "a.jsonl", range(20))
    build = partial(build_dataset, "sft", tokenizer, DataOptions([path], str(tmp_path / "arrow"), 64, packing=packing))
    rows = build().train[:]
    folders = sorted((tmp_path / "arrow").iterdir())
    names = {"eval.arrow", "manifest.json", "report.json", "train.arrow", "rows.arrow"}
    for folder in folders:
        for file in sorted(folder.iterdir()):
            assert file.name in names
            content = file.read_bytes()
            DAMAGES[damage](file)
            rebuilt = build()
            assert rebuilt.train[:] == rows and file.read_bytes() == content
            stderr = capsys.readouterr().err
            assert f"warning: {folder} is damaged and will be rebuilt" in stderr
            assert file.name in stderr or file.name == "manifest.json"  # a changed checksum is reported for its file
    build()
    assert "damaged" not in capsys.readouterr().err
    assert sorted((tmp_path / "arrow").iterdir()) == folders, "no other folder is left"


def test_without_verify_no_checksums_are_computed(tokenizer, tmp_path, monkeypatch):
    path = write_pairs(tmp_path / "a.jsonl", range(20))
    options = DataOptions([path], str(tmp_path / "arrow"), 64)
    build_dataset("sft", tokenizer, options)
    hashed = []
    monkeypatch.setattr(verified_folder, "digest", lambda file: hashed.append(file) or "")
    build_dataset("sft", tokenizer, options, verify=False)
    assert hashed == []


def test_bad_rows_are_set_aside_with_file_and_line(tokenizer, tmp_path):
    for _ in range(2):  # built, then loaded: the report is the same
        splits = build("sft", tokenizer, tmp_path, str(DATA / "damaged.jsonl"), eval_fraction=0.0)
        assert len(splits.train) == 2
        assert [bad.removeprefix(f"{DATA}/").split(": ")[0] for bad in splits.report.bad] == [
            f"damaged.jsonl:{line}" for line in (2, 4, 5, 6, 7)
        ]
        assert "response is empty" in splits.report.summary()


def test_too_many_bad_rows_are_an_error_that_lists_the_first_five_and_leave_no_files(tokenizer, tmp_path):
    lines = ['{"prompt": "a", "response": "b"}'] + ['{"prompt": "a", "response": " "}'] * 7
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="--max_bad_rows 6") as caught:
        build("sft", tokenizer, tmp_path, str(tmp_path / "a.jsonl"), max_bad_rows=6, eval_fraction=0.0)
    assert [f"a.jsonl:{n}:" in str(caught.value) for n in range(1, 9)] == [False] + [True] * 5 + [False] * 2
    assert list((tmp_path / "arrow").iterdir()) == []
    build("sft", tokenizer, tmp_path, str(tmp_path / "a.jsonl"), max_bad_rows=7, eval_fraction=0.0)
    with pytest.raises(ValueError, match="--max_bad_rows 6"):  # the limit applies to prepared data too
        build("sft", tokenizer, tmp_path, str(tmp_path / "a.jsonl"), max_bad_rows=6, eval_fraction=0.0)


def test_all_faulty_sources_are_reported_together(tokenizer, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "other.jsonl").write_text('{"q": "a"}\n' * 3)
    paths = [str(tmp_path / name) for name in ("none.jsonl", "empty.jsonl", "blank.jsonl", "other.jsonl")]
    with pytest.raises(ValueError) as caught:
        build("prompt", tokenizer, tmp_path, *paths)
    reported = data_problems("prompt", DataOptions(paths, str(tmp_path), 64))
    for problems in (str(caught.value).splitlines(), reported):
        assert len(problems) == 4
        expected = ("no such file", "is empty", "has no rows", "a prompt row needs prompt, or messages; it has q")
        for problem, part in zip(problems, expected, strict=True):
            assert part in problem
    good = DataOptions([str(DATA / "prompts.csv")], str(tmp_path), 64)
    assert data_problems("prompt", good) == []


def test_a_phase_without_rows_is_an_error_that_names_data_split(tokenizer, tmp_path):
    path = write_pairs(tmp_path / "a.jsonl", range(1))
    empty = [phase for phase in (1, 2, 3) if phase_fails(tokenizer, tmp_path, path, phase)]
    assert len(empty) == 2
    with pytest.raises(ValueError, match="--data_split 1,0,1: step 2 gets no rows"):
        build("prompt", tokenizer, tmp_path, path, data_split="1,0,1", phase=2)


def phase_fails(tokenizer, tmp_path, path, phase):
    try:
        build("prompt", tokenizer, tmp_path, path, data_split="1,1,1", phase=phase, eval_fraction=0.0)
    except ValueError as error:
        assert f"--data_split leaves nothing for step {phase}" in str(error)
        return True
    return False


def test_invalid_options_are_reported_together(tokenizer, tmp_path):
    with pytest.raises(ValueError) as caught:
        build("sft", tokenizer, tmp_path, "a", data_split="1", eval_fraction=1.0, max_bad_rows=-1, phase=4)
    for flag in ("--data_split 1", "--eval_fraction 1.0", "--max_bad_rows -1", "phase 4"):
        assert flag in str(caught.value).replace("'", "")
    with pytest.raises(ValueError, match="overlong 'cut'"):
        build("sft", tokenizer, tmp_path, "a", overlong="cut")
    with pytest.raises(ValueError, match="--max_prompt_seq_len 0 leaves no room"):
        build("prompt", tokenizer, tmp_path, "a", max_tokens=0)


@pytest.mark.parametrize("entry", ["{0}", "{0}:1.0", "openai/gsm8k={0}", "{0}/sub/.."])
def test_outputs_inside_a_data_folder_are_refused_before_anything_is_written(tokenizer, tmp_path, entry):
    """Otherwise metrics.jsonl and samples.jsonl would become rows, and every resume would have other data."""
    data = tmp_path / "rows"
    write_pairs(data / "train.jsonl", range(20))
    (data / "sub").mkdir()
    inside, beside = str(data / "run"), str(tmp_path / "run")
    for run_path, output_path in ((inside, beside), (beside, inside), (inside, inside), (str(data), beside)):
        options = DataOptions([entry.format(data)], output_path, 64, run_path=run_path)
        for refuse in (lambda o: build_dataset("prompt", tokenizer, o), _raise_problems):
            with pytest.raises(ValueError, match="lies inside --data_path"):
                refuse(options)
        assert not (data / "run").exists()
    single = DataOptions([str(data / "train.jsonl")], inside, 64, run_path=inside, eval_fraction=0.0)
    assert len(build_dataset("prompt", tokenizer, single).train) == 20, "a single file does not include its neighbours"


def _raise_problems(options):
    raise ValueError("\n".join(data_problems("prompt", options)))


def one_row(tmp_path, **fields):
    (tmp_path / "one.jsonl").write_text(json.dumps(fields) + "\n")
    return str(tmp_path / "one.jsonl")


def test_long_prompts_are_cut_from_the_left_and_keep_bos_or_are_dropped(tokenizer, tmp_path):
    path = one_row(tmp_path, prompt="add " * 30 + "17 and 4")
    whole = build("prompt", tokenizer, tmp_path, path, max_tokens=200, eval_fraction=0.0).train[0]["input_ids"]
    cut = build("prompt", tokenizer, tmp_path, path, max_tokens=10, eval_fraction=0.0)
    assert cut.train[0]["input_ids"] == [tokenizer.bos_token_id, *whole[-9:]]
    assert cut.report.sources[0].cut == 1 and cut.report.sources[0].longest == 10
    with pytest.raises(ValueError, match=r"1 dropped \(too long\).*raise the length limit"):
        build("prompt", tokenizer, tmp_path, path, max_tokens=10, overlong="drop", eval_fraction=0.0)


def test_sft_cuts_the_prompt_so_that_the_response_stays(tokenizer, tmp_path):
    path = one_row(tmp_path, prompt="add " * 30, response="it is 21")
    whole = build("sft", tokenizer, tmp_path, path, max_tokens=200, eval_fraction=0.0).train[0]
    cut = build("sft", tokenizer, tmp_path, path, max_tokens=14, eval_fraction=0.0).train[0]
    assert cut["input_ids"][1:] == whole["input_ids"][-13:] and cut["loss_mask"] == whole["loss_mask"][-14:]
    assert sum(cut["loss_mask"]) == sum(whole["loss_mask"]) and cut["input_ids"][-1] == tokenizer.eos_token_id


def test_sft_cuts_a_response_that_is_too_long_itself_on_the_right(tokenizer, tmp_path):
    path = one_row(tmp_path, prompt="add " * 30, response="it is 21 " * 20)
    whole = build("sft", tokenizer, tmp_path, path, max_tokens=500, eval_fraction=0.0).train[0]
    start = whole["loss_mask"].index(True)
    cut = build("sft", tokenizer, tmp_path, path, max_tokens=20, eval_fraction=0.0).train[0]
    assert cut["input_ids"] == [
        tokenizer.bos_token_id,
        *whole["input_ids"][start - 9 : start],
        *whole["input_ids"][start : start + 10],
    ]
    assert cut["loss_mask"] == [False] * 10 + [True] * 10
    assert tokenizer.eos_token_id not in cut["input_ids"]
    trained = build("sft", tokenizer, tmp_path, path, max_tokens=20, eval_fraction=0.0, train_on_prompt=True).train[0]
    assert trained["input_ids"] == cut["input_ids"] and trained["loss_mask"] == [False] + [True] * 19


def test_a_conversation_cut_inside_an_earlier_answer_trains_what_is_left_of_it(tokenizer, tmp_path):
    turns = [("user", "add 1 and 2"), ("assistant", "it is 3 of course " * 5), ("user", "sum"), ("assistant", "21")]
    path = one_row(tmp_path, messages=[{"role": role, "content": content} for role, content in turns])
    whole = build("sft", tokenizer, tmp_path, path, max_tokens=500, eval_fraction=0.0).train[0]
    limit = len(whole["input_ids"]) - whole["loss_mask"].index(True) - 5
    cut = build("sft", tokenizer, tmp_path, path, max_tokens=limit, eval_fraction=0.0).train[0]
    assert cut["input_ids"][1:] == whole["input_ids"][-limit + 1 :]
    assert cut["loss_mask"] == [False, *whole["loss_mask"][-limit + 1 :]]  # nothing predicts the first token


def test_text_is_trained_whole_and_cut_on_the_right(tokenizer, tmp_path):
    path = one_row(tmp_path, text="it is 21 " * 20)
    whole = build("sft", tokenizer, tmp_path, path, max_tokens=500, eval_fraction=0.0).train[0]
    cut = build("sft", tokenizer, tmp_path, path, max_tokens=20, eval_fraction=0.0).train[0]
    assert tokenizer.decode(whole["input_ids"]) == "<s>" + "it is 21 " * 20 + "</s>"
    assert cut["input_ids"] == whole["input_ids"][:20] and cut["loss_mask"] == [False] + [True] * 19


def test_preferences_cut_prompts_left_and_responses_right(tokenizer, tmp_path):
    path = one_row(tmp_path, prompt="add " * 30, chosen="it is 21", rejected="no " * 3)
    whole = build("preference", tokenizer, tmp_path, path, max_tokens=200, eval_fraction=0.0).train[0]
    n = whole["prompt_length"]
    longest = max(len(whole["chosen_ids"]), len(whole["rejected_ids"])) - n
    cut = build("preference", tokenizer, tmp_path, path, max_tokens=longest + 5, eval_fraction=0.0).train[0]
    assert cut["prompt_length"] == 5
    assert cut["chosen_ids"][:5] == [tokenizer.bos_token_id, *whole["chosen_ids"][n - 4 : n]]
    assert cut["chosen_ids"][5:] == whole["chosen_ids"][n:] and cut["rejected_ids"][5:] == whole["rejected_ids"][n:]


def test_pairs_that_are_equal_or_become_equal_by_cutting_are_dropped_and_counted(tokenizer, tmp_path):
    rows = [
        {"prompt": "add 1 and 2", "chosen": "same", "rejected": "same"},
        {"prompt": "add 1 and 2", "chosen": "it is 21 " * 20 + "yes", "rejected": "it is 21 " * 20 + "no"},
        {"prompt": "sum", "chosen": "it", "rejected": "no"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits = build("preference", tokenizer, tmp_path, str(tmp_path / "a.jsonl"), max_tokens=40, eval_fraction=0.0)
    assert len(splits.train) == 1
    assert splits.report.sources[0].dropped == {
        "chosen and rejected are equal": 1,
        "chosen and rejected are equal after cutting": 1,
    }


def test_messages_that_the_template_refuses_are_bad_rows(tmp_path):
    one_turn = "{% if messages|length > 2 %}{{ raise_exception('one turn only') }}{% endif %}"
    strict = make_tokenizer(template=one_turn + CHATML)
    rows = [
        {"prompt": "a", "response": "b"},
        {"messages": [{"role": r, "content": "x"} for r in ("user", "assistant", "user", "assistant")]},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits = build("sft", strict, tmp_path, str(tmp_path / "a.jsonl"), eval_fraction=0.0)
    assert len(splits.train) == 1
    (bad,) = splits.report.bad
    assert bad.endswith("a.jsonl:2: the chat template rejects these messages: one turn only")
