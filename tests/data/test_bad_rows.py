"""Unusable rows and data files: one line names file and line, before anything is tokenised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from bad_input import INVALID_JSON, NESTING_DEPTH, one_line
from datasets import Dataset, DatasetDict

from dschat.data.datasets import DataOptions, data_problems
from dschat.data.sources.files import file_rows

ONE_LINE = [content for content in INVALID_JSON if b"\n" not in content and content.strip()]


@pytest.mark.parametrize("content", ONE_LINE, ids=lambda content: repr(content[:20]))
def test_a_bad_row_is_reported_with_file_and_line_and_the_next_is_parsed(content, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"n": 1}\n' + content.replace(b"\n", b" ") + b'\n{"n": NaN}\n')
    rows = list(file_rows(file))
    assert [row.fields is None for row in rows] == [False, True, False]
    assert rows[1].where == f"{file}:2" and rows[1].error and "\n" not in rows[1].error


ARRAYS = {  # content of an array → part of the message, whether the whole file is refused or only the row
    b'[{"n": 1},\n' + b"[" * NESTING_DEPTH: ("nested deeper", True),
    b'[{"n": 1},\n{"n": ' + b"9" * 5000 + b"}]": ("beyond float64", True),
    b'[{"n": 1},\n{"n": ' + b"[" * 150 + b"]" * 150 + b"}]": ("nested deeper", False),
    b'[{"n": 1},\n{"n": "\\ud800"}]': ("lone", False),
    b'[{"n": 1},\n3]': ("not a JSON object", False),
}


@pytest.mark.parametrize("content", ARRAYS, ids=lambda content: repr(content[10:40]))
def test_a_bad_item_of_an_array_is_reported_with_file_and_line(content, tmp_path):
    part, file_is_refused = ARRAYS[content]
    file = tmp_path / "rows.json"
    file.write_bytes(content)
    if file_is_refused:
        with pytest.raises(ValueError) as caught:
            list(file_rows(file))
        assert f"{file}:2: " in one_line(caught) and part in str(caught.value)
    else:
        _, row = file_rows(file)
        assert row.where == f"{file}:2" and part in row.error


def test_tables_with_invalid_utf8_are_refused(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_bytes("prömpt,response\na,b\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"rows\.csv:1: the names of the columns are not valid UTF-8"):
        list(file_rows(file))
    text = pyarrow.array([b"\xff\xfe"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": text}), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"rows\.parquet: not a readable parquet file"):
        list(file_rows(tmp_path / "rows.parquet"))


PAIR = {"prompt": "a", "response": "b", "chosen": "c", "rejected": "d", "label": True}
HEADER = "prompt,response,chosen,rejected,label\n"


def problems(entry: str | Path, kind: str = "sft", **options: Any) -> list[str]:
    needed = {"data_path": [str(entry)], "output_path": "x", "max_tokens": 8}
    return data_problems(kind, DataOptions(**needed | options))


FILES = {  # name and content of a file → part of the message
    "latin.csv": ((HEADER + "grün,ö,ö,ö,1\n" * 20).encode("latin-1"), "latin.csv:2: not valid UTF-8"),
    "wide.csv": ((HEADER + "a,b,c,d,1\n" * 20).encode("utf-16"), "not valid UTF-8"),
    "header.csv": (HEADER.encode(), "has no rows"),
    "blank.csv": (b"\n\n\n", "has no rows"),
    "more.csv": ((HEADER + "a,b,c,d,1,6\n" * 20).encode(), "more.csv:2: more fields than the header has"),
    "quote.csv": ((HEADER + '"a,b\n' * 20).encode(), "not valid CSV"),
    "open.csv": ((HEADER + '"a,b,c\n').encode(), "not valid CSV"),
    "twice.csv": (b"prompt,prompt,response\na,b,c\n", "twice.csv:1: the column 'prompt' occurs twice"),
    "semicolons.csv": ((HEADER + "a,b,c,d,1\n" * 20).replace(",", ";").encode(), "no usable column"),
    "deep.json": (b"[" + b"[" * NESTING_DEPTH, "nested deeper than"),
    "empty.json": (b"[]", "has no rows"),
    "columns.json": (b'{"prompt": ["a", "b"], "response": ["c", "d"]}', "no row can be used"),
    "wide.json": ('[{"prompt": "a", "response": "b"}]'.encode("utf-16"), "no row can be used"),
    "zeros.jsonl": (b"\0" * 99, "no row can be used"),
    "blank.jsonl": (b"\n \n", "has no rows"),
    "empty.jsonl": (b"", "is empty"),
    "text.txt": (b"a", "the suffix '.txt' is not supported"),
    "no.parquet": (b"text" * 99, "not a readable parquet file"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("flag", ["--data_path", "--eval_data_path"])
def test_a_file_without_a_usable_row_is_refused_before_anything_is_tokenised(flag, name, tmp_path):
    content, part = FILES[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "good.jsonl").write_text(json.dumps(PAIR))
    if flag == "--data_path":
        (line,) = problems(tmp_path / name)
    else:
        (line,) = problems(tmp_path / "good.jsonl", eval_data_path=[str(tmp_path / name)])
    assert str(tmp_path / name) in line and part in line, line
    assert not line.startswith("--") or line.startswith(f"{flag} {tmp_path / name}")


ROWS = {  # changes to a good row → kind of record, part of the reason
    '{"label": "yes"}': ("unpaired", "label 'yes' is neither true"), '{"label": 2}': ("unpaired", "label 2"),
    '{"label": 0.5}': ("unpaired", "label 0.5"), '{"label": [1]}': ("unpaired", "label [1]"),
    '{"label": {}}': ("unpaired", "label {}"), '{"label": NaN}': ("unpaired", "label nan"),
    '{"label": -1}': ("unpaired", "label -1"), '{"label": " "}': ("unpaired", "label ' '"),
    '{"margin": 1e999}': ("preference", "margin inf"), '{"margin": NaN}': ("preference", "margin nan"),
    '{"margin": 1e300}': ("preference", "out of the range of float32"), '{"margin": "big"}': ("preference", "'big'"),
    '{"margin": true}': ("preference", "margin True"), '{"margin": [1]}': ("preference", "margin [1]"),
    '{"chosen_ended": "perhaps"}': ("preference", "chosen_ended 'perhaps'"), '{"chosen": 3}': ("preference", "not int"),
    '{"rejected": ""}': ("preference", "rejected is empty"), '{"prompt": [1]}': ("prompt", "prompt[0] must be"),
    '{"prompt": [["user", "a"]]}': ("prompt", "prompt[0] must be"), '{"prompt": 3}': ("prompt", "not int"),
    '{"prompt": [{"role": "wizard", "content": "a"}]}': ("prompt", "role 'wizard'"),
    '{"prompt": [{"role": ["user"], "content": "a"}]}': ("prompt", "role ['user']"),
    '{"prompt": [{"role": "user", "content": ["a"]}]}': ("prompt", "content of type list"),
    '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": "zap"}]}':
        ("prompt", "tool_calls 'zap'; they must be a list"),
    '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [3]}]}':
        ("prompt", "tool_calls [3]; they must be a list"),
    '{"tools": "zap"}': ("prompt", "tools is not valid JSON"), '{"tools": 3}': ("prompt", "tools must be a list"),
    '{"system": 3}': ("prompt", "system must be text"), '{"response": ""}': ("sft", "response is empty"),
    '{"response": "\\ud800"}': ("sft", "lone"), '{"response": [3]}': ("sft", "response[0] must be"),
}  # fmt: skip


@pytest.mark.parametrize("change", ROWS)
def test_a_row_that_cannot_be_used_gives_file_line_and_reason(change, tmp_path):
    kind, part = ROWS[change]
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(PAIR)[:-1]}, {change[1:]}\n" * 12)
    (line,) = problems(file, kind)
    assert line.startswith("More than --max_bad_rows 10 rows") and f"{file}:1: " in line and part in line, line


ENTRIES = [
    *((f"rows.jsonl:{weight}", f"the weight {weight} must be positive")
      for weight in ("0", "-1", "1e999", "1e-400", "1..2")),
    ("", "has an empty path"), (" ", "has an empty path"), ("missing.jsonl", "no such file"), ("a/b/c", "no such file"),
    ("openai/gsm8k=", "no file or folder is named"), ("openai/gsm8k=/no/such", "there is no file or folder"),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "part"), ENTRIES)
def test_an_entry_without_data_is_refused(entry, part):
    (line,) = problems(entry)
    assert line.startswith("--data_path") and part in line, line


@pytest.mark.parametrize("shares", ["", "a,b,c", "1,2", "1,2,3,4", "-1,1,1", "0,0,0", "nan,1,1", "inf,1,1", "1e999,1,1",
                                    "1e308,1e308,1e308", "0,1,1", "1;2;3"])  # fmt: skip
def test_invalid_data_splits_are_refused(shares, tmp_path):
    (line,) = problems(tmp_path, data_split=shares)
    assert line.startswith("--data_split")


@pytest.mark.parametrize("field", ["prompt", "response", "messages", "system", "tools", "text"])
def test_a_column_that_no_row_has_is_reported(field, tmp_path):
    (tmp_path / "rows.jsonl").write_text((json.dumps(PAIR) + "\n") * 3 + json.dumps(PAIR | {"late": "a"}))
    (line,) = problems(tmp_path / "rows.jsonl", columns={field: "none"})
    assert line.startswith(f"--{field}_column none: in no row of the data")
    assert problems(tmp_path / "rows.jsonl", columns={field: "late"}) == []


def damaged_table(folder: Path, name: str, content: bytes | None) -> Path:
    """A save_to_disk folder in which one file has this content, or is missing."""
    DatasetDict(train=Dataset.from_list([PAIR] * 3)).save_to_disk(folder)
    for file in folder.glob(name):
        file.unlink() if content is None else file.write_bytes(content)
    return folder


SAVED = [
    *((name, content) for name in ("dataset_dict.json", "train/state.json", "train/dataset_info.json")
      for content in (b"", b"{", b"[]", b"3", b"[" * NESTING_DEPTH, b'{"a": "\xff"}')),
    ("train/state.json", None), ("train/dataset_info.json", None), ("train/*.arrow", None), ("train/*.arrow", b""),
    ("train/*.arrow", b"text" * 99), ("dataset_dict.json", b"{}"), ("dataset_dict.json", b'{"splits": 3}'),
    ("dataset_dict.json", b'{"splits": []}'), ("dataset_dict.json", b'{"splits": ["../../etc"]}'),
    ("train/state.json", b'{"_data_files": []}'), ("train/state.json", b'{"_data_files": 3}'),
    ("train/dataset_info.json", b'{"features": {"a": {"_type": "None"}}}'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content"), SAVED, ids=lambda value: repr(value)[:30])
def test_a_broken_save_to_disk_folder_is_refused(name, content, tmp_path):
    (line,) = problems(damaged_table(tmp_path / "table", name, content))
    assert line.startswith(f"--data_path {tmp_path / 'table'}: not a readable `save_to_disk` folder"), line
    assert len(line) < 600 and "\n" not in line


def test_a_state_json_of_another_program_is_not_a_save_to_disk_folder(tmp_path):
    (tmp_path / "state.json").write_text('{"global_step": 3}')
    (line,) = problems(tmp_path)
    assert "no data file in this folder" in line
    (tmp_path / "rows.jsonl").write_text(json.dumps(PAIR))
    assert problems(tmp_path) == []


def test_parquet_with_two_columns_of_one_name_is_refused(tmp_path):
    column = pyarrow.array(["a"])
    pyarrow.parquet.write_table(pyarrow.table([column, column], names=["prompt", "prompt"]), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"rows\.parquet: the column 'prompt' occurs twice"):
        list(file_rows(tmp_path / "rows.parquet"))
