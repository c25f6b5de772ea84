"""Invalid JSON files of settings are reported in one line that names the file."""

from __future__ import annotations

import pytest
from bad_input import INVALID_JSON, INVALID_SETTINGS_JSON, mistakes, one_line

from dschat.arguments.script_inputs import read_json
from dschat.arguments.strict_json import read_json_object
from dschat.checkpoints.manifest import read_manifest
from dschat.models.weight_files import weight_problems


@pytest.mark.parametrize("content", INVALID_JSON | INVALID_SETTINGS_JSON, ids=lambda content: repr(content[:20]))
def test_every_reader_refuses_invalid_json(content, tmp_path):
    part = (INVALID_JSON | INVALID_SETTINGS_JSON)[content]
    file = tmp_path / "settings.json"
    file.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_json_object(file, unique_keys=True)
    assert str(file) in one_line(caught) and part in str(caught.value)
    (line,) = mistakes("sft", "--deepspeed_config", str(file))
    assert line.startswith(f"  - --deepspeed_config {file}: ") and part in line
    (tmp_path / "manifest.json").write_bytes(content)
    if content in INVALID_JSON:
        with pytest.raises(ValueError, match="manifest.json cannot be read"):
            read_manifest(tmp_path)
        (tmp_path / "model.safetensors.index.json").write_bytes(content)
        (line,) = [line for line in weight_problems(tmp_path) if "index.json" in line]
        assert part in line and line.endswith("copy it again")


@pytest.mark.parametrize("content", [b"[]", b"3", b"null", b'"a"', b"true", b"1.5"])
def test_json_that_is_not_an_object_is_refused(content, tmp_path):
    file = tmp_path / "settings.json"
    file.write_bytes(content)
    (line,) = mistakes("sft", "--deepspeed_config", str(file))
    assert line.startswith(f"  - --deepspeed_config {file}: must be a JSON object")


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    for path, part in ((tmp_path, "is a folder"), (tmp_path / "none.json", "No such file")):
        (line,) = mistakes("sft", "--deepspeed_config", str(path))
        assert line.startswith(f"  - --deepspeed_config {path}: {part}")


@pytest.mark.parametrize("content", INVALID_JSON, ids=lambda content: repr(content[:20]))
def test_scripts_name_the_invalid_json_file(content, tmp_path):
    file = tmp_path / "run.json"
    file.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_json(file)
    assert one_line(caught).startswith(f"{file}: ")
