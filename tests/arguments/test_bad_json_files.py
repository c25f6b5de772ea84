"""JSON files of settings that cannot be used are answered by one line that names the file."""

from __future__ import annotations

import pytest
from bad_input import JSON, STRICT, mistakes, one_line

from dschat.arguments.script_inputs import read_json
from dschat.arguments.strict_json import read_json_object
from dschat.checkpoints.manifest import read_manifest
from dschat.models.weight_files import weight_problems


@pytest.mark.parametrize("content", JSON | STRICT, ids=lambda content: repr(content[:20]))
def test_no_reader_takes_what_is_no_json(content, tmp_path):
    part = (JSON | STRICT)[content]
    file = tmp_path / "settings.json"
    file.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_json_object(file, unique_keys=True)
    assert str(file) in one_line(caught) and part in str(caught.value)
    (line,) = mistakes("sft", "--deepspeed_config", str(file))
    assert line.startswith(f"  - --deepspeed_config {file}: ") and part in line
    (tmp_path / "manifest.json").write_bytes(content)
    if content in JSON:
        with pytest.raises(ValueError, match="manifest.json cannot be read"):
            read_manifest(tmp_path)
        (tmp_path / "model.safetensors.index.json").write_bytes(content)
        (line,) = [line for line in weight_problems(tmp_path) if "index.json" in line]
        assert part in line and line.endswith("copy it again")


@pytest.mark.parametrize("content", [b"[]", b"3", b"null", b'"a"', b"true", b"1.5"])
def test_an_object_is_wanted(content, tmp_path):
    file = tmp_path / "settings.json"
    file.write_bytes(content)
    (line,) = mistakes("sft", "--deepspeed_config", str(file))
    assert line.startswith(f"  - --deepspeed_config {file}: must be a JSON object")


def test_a_folder_and_a_missing_file_are_no_json(tmp_path):
    for path, part in ((tmp_path, "is a folder"), (tmp_path / "none.json", "No such file")):
        (line,) = mistakes("sft", "--deepspeed_config", str(path))
        assert line.startswith(f"  - --deepspeed_config {path}: {part}")


@pytest.mark.parametrize("content", JSON, ids=lambda content: repr(content[:20]))
def test_scripts_name_the_file_too(content, tmp_path):
    file = tmp_path / "run.json"
    file.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_json(file)
    assert one_line(caught).startswith(f"{file}: ")
