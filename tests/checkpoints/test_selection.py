"""Selection of the checkpoint to resume from: verification, damage, earlier runs, files of killed processes."""

import json
import os
from pathlib import Path

import pytest
import torch
from saved_checkpoints import checkpoint_names, save

from dschat.checkpoints.saving import save_checkpoint
from dschat.checkpoints.selection import find_checkpoint, verify_checkpoint


def flip_a_byte(folder: Path) -> None:
    content = bytearray((folder / "model.bin").read_bytes())
    content[17] ^= 1
    (folder / "model.bin").write_bytes(content)


DAMAGE = {
    "flipped byte": (flip_a_byte, "model.bin has a different checksum"),
    "truncated": (lambda folder: os.truncate(folder / "model.bin", 10), "model.bin has 10 bytes instead of 400"),
    "missing": (lambda folder: (folder / "model.bin").unlink(), "model.bin is missing"),
    "changed state": (lambda folder: (folder / "state.json").write_text('{"step": 9}'), "state.json"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json cannot be read"),
    "half a manifest": (lambda folder: os.truncate(folder / "manifest.json", 30), "manifest.json cannot be read"),
    "another manifest": (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
    "random state gone": (lambda folder: (folder / "random_rank0.safetensors").unlink(), "random_rank0"),
    "an extra file": (lambda folder: (folder / "more.pt").touch(), "more.pt is not in the manifest"),
    "an extra hidden file": (lambda folder: (folder / ".more").touch(), ".more is not in the manifest"),
    "a pipe": (lambda folder: os.mkfifo(folder / "pipe"), "pipe is not in the manifest"),
    "a link to a file": (lambda folder: replace_by_link(folder, "model.bin"), "model.bin is a link"),
    "a link to a folder": (lambda folder: (folder / "actor").symlink_to(folder.parent), "actor is a link"),
    "a link to the manifest": (
        lambda folder: replace_by_link(folder, "manifest.json"), "manifest.json cannot be read (it is a"),
}


def replace_by_link(folder: Path, name: str) -> None:
    """Move the file to another folder and put a link in its place."""
    target = folder.parent.parent / f"{folder.name}-{name}"
    (folder / name).rename(target)
    (folder / name).symlink_to(target)


DIGEST = "0" * 64
BAD_MANIFESTS = {
    "a parent folder": ({"files": {"../secret": [1, DIGEST]}}, "'../secret' is not the name of a file in the folder"),
    "an absolute path": ({"files": {"/etc/passwd": [1, DIGEST]}}, "'/etc/passwd' is not the name"),
    "a detour": ({"files": {"a/../model.bin": [1, DIGEST]}}, "'a/../model.bin' is not the name"),
    "a NUL": ({"files": {"a\0b": [1, DIGEST]}}, "is not the name"),
    "escape codes": ({"files": {"\x1b]0;x\x07": [1, DIGEST]}}, r"'\x1b]0;x\x07' is not the name"),
    "an empty name": ({"files": {"": [1, DIGEST]}}, "'' is not the name"),
    "a list of files": ({"files": ["model.bin"]}, "files must be an object"),
    "a digest alone": ({"files": {"model.bin": DIGEST}}, "must be its size and SHA-256"),
    "a text as size": ({"files": {"model.bin": ["1", DIGEST]}}, "must be its size and SHA-256"),
    "true as size": ({"files": {"model.bin": [True, DIGEST]}}, "must be its size and SHA-256"),
    "processes as text": ({"world_size": "1"}, "world_size must be an integer"),
    "a step of 1e999": ({"step": float("inf")}, "step must be an integer"),
    "a stage as text": ({"zero_stages": {"model": "2"}}, "a ZeRO stage must be an integer"),
    "stages as a list": ({"zero_stages": [2]}, "zero_stages must be an object"),
    "arguments as a list": ({"arguments": []}, "arguments must be an object"),
}


def test_an_intact_checkpoint_passes_verification_and_is_found(tmp_path):
    folder = save(tmp_path, 5)
    assert verify_checkpoint(folder) == []
    assert find_checkpoint(tmp_path, "auto") == folder == find_checkpoint(tmp_path, str(folder))
    assert (tmp_path / "checkpoints" / "latest").read_text() == folder.name
    assert find_checkpoint(tmp_path / "nothing", "auto") is None
    assert find_checkpoint(tmp_path, "never") is None
    assert find_checkpoint(tmp_path, "auto") is None, "a new run begins; the older checkpoints were set aside"
    assert verify_checkpoint(tmp_path / "checkpoints-before-1" / folder.name) == []


@pytest.mark.parametrize("damage, message", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(damage, message, tmp_path, capsys):
    older, newer = save(tmp_path, 2), save(tmp_path, 4)
    damage(newer)
    (problem,) = verify_checkpoint(newer)
    assert message in problem
    assert find_checkpoint(tmp_path, "auto") == older
    assert f"{newer} is damaged and skipped" in capsys.readouterr().out
    with pytest.raises(ValueError, match="cannot be used"):
        find_checkpoint(tmp_path, str(newer))
    damage(older)
    with pytest.raises(ValueError, match="none of the 2 checkpoints .* does not start from scratch"):
        find_checkpoint(tmp_path, "auto")


@pytest.mark.parametrize("change, message", BAD_MANIFESTS.values(), ids=BAD_MANIFESTS.keys())
def test_an_invalid_manifest_is_refused_in_one_line(change, message, tmp_path):
    folder = save(tmp_path, 2)
    manifest = json.loads((folder / "manifest.json").read_text()) | change
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (problem,) = verify_checkpoint(folder)
    assert message in problem and "\n" not in problem and problem.isprintable()


def test_a_deeply_nested_manifest_is_refused(tmp_path):
    folder = save(tmp_path, 2)
    (folder / "manifest.json").write_text("[" * 100_000)
    (problem,) = verify_checkpoint(folder)
    assert "manifest.json cannot be read" in problem


@pytest.mark.parametrize("name", ["actor.pt", "actor.bin", "actor", "actor.json"])
def test_code_is_detected_in_a_listed_pickle_of_any_name(name, tmp_path):
    folder = save_checkpoint(
        tmp_path, 2, engines={}, state={}, keep=2,
        extra_writer=lambda folder: torch.save({"x": os.system}, folder / name),
    )  # fmt: skip
    (problem,) = verify_checkpoint(folder)
    assert f"{name} is refused: it would run posix.system" in problem


def write_logs(output: Path, step: int, text: str = "first") -> None:
    """Write what a run keeps beside its checkpoints, up to this step."""
    (output / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "of": "{text}"}}\n' for n in range(step + 1)))
    (output / "samples.jsonl").write_text(f'{{"step": {step}, "of": "{text}"}}\n')
    (output / "run.json").write_text(json.dumps(text))
    (output / "best").mkdir(exist_ok=True)
    (output / "best" / "config.json").write_text(text)


def test_a_run_without_resume_keeps_the_earlier_checkpoints_and_prints_how_to_use_them(tmp_path, capsys):
    save(tmp_path, 5)
    write_logs(tmp_path, 5)
    assert find_checkpoint(tmp_path, "never") is None
    set_aside = tmp_path / "checkpoints-before-1"
    (printed,) = capsys.readouterr().out.splitlines()
    assert f"metrics and samples of the previous run are in {set_aside}" in printed
    assert f"--resume {set_aside / 'step-00000005'}" in printed
    assert sorted(path.name for path in set_aside.iterdir()) == [
        "best", "latest", "metrics.jsonl", "run.json", "samples.jsonl", "step-00000005"]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints-before-1"]
    write_logs(tmp_path, 0, "second")  # evaluated but not trained: nothing to keep
    assert find_checkpoint(tmp_path, "auto") is None
    (printed,) = capsys.readouterr().out.splitlines()
    assert "starts from scratch" in printed and f"--resume {set_aside / 'step-00000005'}" in printed
    assert len(list(tmp_path.glob("*-before-*"))) == 1
    write_logs(tmp_path, 1, "second")
    assert find_checkpoint(tmp_path, "auto") is None
    assert (tmp_path / "history-before-2" / "run.json").read_text() == '"second"'
    assert "1, " in (tmp_path / "history-before-2" / "metrics.jsonl").read_text()


def test_a_checkpoint_that_was_set_aside_is_resumed_with_its_logs(tmp_path):
    save(tmp_path, 5)
    write_logs(tmp_path, 5)
    find_checkpoint(tmp_path, "never")
    save(tmp_path, 2, text="second")
    write_logs(tmp_path, 2, "second")
    set_aside = tmp_path / "checkpoints-before-1" / "step-00000005"
    assert find_checkpoint(tmp_path, str(set_aside)) == set_aside
    for name in ("metrics.jsonl", "samples.jsonl", "run.json", "best/config.json"):
        assert "first" in (tmp_path / name).read_text()
        assert "second" in (tmp_path / "checkpoints-before-2" / name).read_text()
    assert not (tmp_path / "checkpoints").exists(), "those of the second run were moved with its logs"
    save(tmp_path, 6)
    assert find_checkpoint(tmp_path, "auto").name == "step-00000006"


def test_files_of_an_interrupted_start_or_end_are_removed_at_the_next_start(tmp_path):
    older, newer = save(tmp_path, 3), save(tmp_path, 4)
    newer.rename(newer.with_name(".step-00000004.old"))  # killed before the new folder was renamed
    unfinished = [
        newer.with_name(f".step-00000004.{end}") for end in ("tmp", "universal")] + [
        older.with_name(".step-00000001.gone"), tmp_path / ".unfinished", tmp_path / "critic" / ".unfinished",
        tmp_path / "best.unfinished", tmp_path / "best.replaced",
    ]  # fmt: skip
    for folder in unfinished:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("unfinished" if folder.name != "best.replaced" else "the best so far")
    (tmp_path / ".metrics.jsonl.tmp").touch()
    (tmp_path / "checkpoints" / ".latest.tmp").touch()
    assert find_checkpoint(tmp_path, "auto") == newer
    assert checkpoint_names(tmp_path) == ["latest", "step-00000003", "step-00000004"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "checkpoints"]
    assert (tmp_path / "best" / "config.json").read_text() == "the best so far"
