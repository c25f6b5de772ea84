import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict

from dschat.data.sources.data_path import load_source, parse_data_path

DATA = Path(__file__).parent / "samples"
ROWS = [{"prompt": f"q{i}", "n": i} for i in range(5)]


def rows_of(path, split="train"):
    return [row.fields for row in load_source(str(path)).rows(split)]


def write_lines(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_every_format_gives_the_same_rows(tmp_path):
    write_lines(tmp_path / "a.jsonl", ROWS)
    write_lines(tmp_path / "lines.json", ROWS)
    (tmp_path / "b.json").write_text(json.dumps(ROWS, indent=1))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "c.parquet")
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    for name in ("a.jsonl", "lines.json", "b.json", "c.parquet", "saved"):
        assert rows_of(tmp_path / name) == ROWS, name


def test_csv_keeps_line_breaks_inside_quotes_and_counts_lines():
    rows = list(load_source(str(DATA / "prompts.csv")).rows("train"))
    assert [row.fields["answer"] for row in rows] == ["5", "21", "2"]
    assert rows[1].fields["prompt"] == "Two lines,\nplease add 17 and 4."
    assert [row.where.rpartition(":")[2] for row in rows] == ["2", "4", "5"]  # the line on which a row ends


def test_a_byte_order_mark_is_not_part_of_the_data(tmp_path):
    contents = {"a.csv": "prompt\nhi\n", "b.jsonl": '{"prompt": "hi"}\n', "c.json": '[{"prompt": "hi"}]'}
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert rows_of(tmp_path / name) == [{"prompt": "hi"}]


def test_unreadable_rows_are_reported_with_file_and_line_and_the_others_are_kept():
    rows = list(load_source(str(DATA / "damaged.jsonl")).rows("train"))
    faults = {row.where.removeprefix(f"{DATA}/"): row.error for row in rows if row.fields is None}
    assert list(faults) == ["damaged.jsonl:2", "damaged.jsonl:4", "damaged.jsonl:5", "damaged.jsonl:7"]
    reasons = ["not valid JSON", "not valid UTF-8 (byte 13", "not a JSON object but list", "not valid Unicode"]
    for fault, reason in zip(faults.values(), reasons, strict=True):
        assert fault.startswith(reason)
    assert [row.fields["response"] for row in rows if row.fields is not None] == ["b", "", "d"]


def test_damaged_csv_rows_are_reported(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"prompt,n\nok,1\n\xff,2\ntoo,3,many\nlast,4\n")
    rows = list(load_source(str(tmp_path / "a.csv")).rows("train"))
    assert [(row.where[-1], row.error) for row in rows] == [
        ("2", ""),
        ("3", "not valid UTF-8"),
        ("4", "more fields than the header has"),
        ("5", ""),
    ]


def test_items_of_an_array_carry_their_line(tmp_path):
    (tmp_path / "a.json").write_text('[\n {"n": 1},\n\n 7,\n {"n": 2, "text": "x\\ny"}\n]\n')
    rows = list(load_source(str(tmp_path / "a.json")).rows("train"))
    assert [row.where.rpartition(":")[2] for row in rows] == ["2", "4", "5"]
    assert rows[1].error == "not a JSON object but int"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"n": 1},\n {"n": }]', "a.json:2: not a valid JSON array"),
        ("a.json", b'[{"n": 1} {"n": 2}]', "a.json:1: not a valid JSON array"),
        ("a.json", b'[{"n": 1},', "has no end"),
        ("a.json", b'[{"n": "\xff"}]', "not valid UTF-8 at byte 9"),
        ("a.parquet", b"PAR1 no table", "not a readable parquet file"),
        ("a.jsonl", b"", "is empty"),
        ("a.txt", b"hi", "suffix '.txt' is not supported"),
    ],
)
def test_files_that_cannot_be_read_at_all_are_errors(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path / name)


@pytest.mark.parametrize("path", ["./nowhere.jsonl", "/no/such/folder", "nowhere.csv"])
def test_missing_paths_are_not_looked_up_on_the_hub(path):
    with pytest.raises(ValueError, match="no such file or folder; check the spelling"):
        load_source(path)


def test_the_error_for_an_unknown_name_mentions_files_and_the_hub():
    with pytest.raises(ValueError, match="no such file or folder, and as a name on the hub .*local file"):
        load_source("someone/some-data")


def test_file_and_folder_names_determine_the_split(tmp_path):
    write_lines(tmp_path / "train-0.jsonl", ROWS[:1])
    write_lines(tmp_path / "train-1.jsonl", ROWS[1:2])
    write_lines(tmp_path / "test" / "part.jsonl", ROWS[2:3])
    write_lines(tmp_path / "other.jsonl", ROWS[3:4])
    write_lines(tmp_path / ".hidden" / "part.jsonl", ROWS[4:])
    (tmp_path / "README.md").write_text("no data")
    assert rows_of(tmp_path) == [ROWS[3], ROWS[0], ROWS[1]]
    assert rows_of(tmp_path, "eval") == [ROWS[2]]
    write_lines(tmp_path / "validation.jsonl", ROWS[4:])  # preferred, so that the test rows stay unseen
    assert rows_of(tmp_path, "eval") == [ROWS[4]]


def test_a_single_file_is_train_whatever_its_name(tmp_path):
    assert list(load_source(str(write_lines(tmp_path / "test.jsonl", ROWS))).splits) == ["train"]


def test_splits_of_saved_data_sets(tmp_path):
    table = Dataset.from_list(ROWS)
    DatasetDict(train=table.select([0]), test=table.select([1, 2])).save_to_disk(tmp_path / "two")
    assert rows_of(tmp_path / "two") == ROWS[:1] and rows_of(tmp_path / "two", "eval") == ROWS[1:3]
    assert next(iter(load_source(str(tmp_path / "two")).rows("eval"))).where == f"{tmp_path}/two[eval]:row 0"
    DatasetDict(train_a=table, train_b=table).save_to_disk(tmp_path / "several")
    with pytest.raises(ValueError, match="several train splits .train_a, train_b."):
        load_source(str(tmp_path / "several"))


def test_a_folder_with_evaluation_rows_alone_serves_only_as_evaluation_data(tmp_path):
    write_lines(tmp_path / "test.jsonl", ROWS)
    with pytest.raises(ValueError, match="only evaluation data.*--eval_data_path"):
        load_source(str(tmp_path))
    assert list(load_source(str(tmp_path), for_eval=True).splits) == ["eval"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no data file in this folder"):
        load_source(str(tmp_path / "empty"))


def test_weights_are_split_from_paths(tmp_path):
    assert parse_data_path(["a.jsonl:0.7", "b:3"]) == (["a.jsonl", "b"], [0.7, 3.0])
    assert parse_data_path(["a", "b"]) == (["a", "b"], None)
    file = write_lines(tmp_path / "x:1", ROWS)  # the colon belongs to the file's name
    assert parse_data_path([str(file)]) == ([str(file)], None)
    assert parse_data_path([f"{file}:2"]) == ([str(file)], [2.0])


@pytest.mark.parametrize(
    ("entries", "message"),
    [([], "empty"), (["a:0"], "must be positive"), (["a:-1"], "must be positive"), (["a:1", "b"], "or none")],
)
def test_invalid_weights_are_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        parse_data_path(entries)


@pytest.mark.parametrize("entry", ["", "  ", ":0.5"])
def test_an_entry_without_a_path_is_refused_rather_than_read_as_the_current_folder(entry):
    with pytest.raises(ValueError, match="has an empty path"):
        parse_data_path([entry])
