"""Checkpoint contents, damage detection and retention; test_steps.py kills and resumes real engines."""

import json
import os
import random
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from dschat.checkpoints.loading import load_checkpoint
from dschat.checkpoints.saving import save_checkpoint
from dschat.checkpoints.selection import find_checkpoint, verify_checkpoint

RANKS = Path(__file__).with_name("checkpoint_ranks.py")


@pytest.fixture(autouse=True)
def generators_are_put_back():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def save(output: Path, step: int, *, keep: int = 10, text: str = "weights " * 50) -> Path:
    """A checkpoint whose only content of its own is a file."""
    return save_checkpoint(
        output, step, engines={}, state={"step": step, "rows": 7}, keep=keep,
        extra_writer=lambda folder: (folder / "model.bin").write_text(text) and None,
    )  # fmt: skip


def names(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())


def flip_a_byte(folder: Path) -> None:
    content = bytearray((folder / "model.bin").read_bytes())
    content[17] ^= 1
    (folder / "model.bin").write_bytes(content)


DAMAGES = {
    "flipped byte": (flip_a_byte, "model.bin has another checksum"),
    "truncated": (lambda folder: os.truncate(folder / "model.bin", 10), "model.bin has 10 bytes instead of 400"),
    "missing": (lambda folder: (folder / "model.bin").unlink(), "model.bin is missing"),
    "changed state": (lambda folder: (folder / "state.json").write_text('{"step": 9}'), "state.json"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json cannot be read"),
    "half a manifest": (lambda folder: os.truncate(folder / "manifest.json", 30), "manifest.json cannot be read"),
    "another manifest": (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
    "random state gone": (lambda folder: (folder / "random_rank0.safetensors").unlink(), "random_rank0"),
    "a file more": (lambda folder: (folder / "more.pt").touch(), "more.pt is not in the manifest"),
    "a hidden file more": (lambda folder: (folder / ".more").touch(), ".more is not in the manifest"),
    "a pipe": (lambda folder: os.mkfifo(folder / "pipe"), "pipe is not in the manifest"),
    "a file's link": (lambda folder: put_link(folder, "model.bin"), "model.bin is a link"),
    "a folder's link": (lambda folder: (folder / "actor").symlink_to(folder.parent), "actor is a link"),
    "the manifest's link": (lambda folder: put_link(folder, "manifest.json"), "manifest.json cannot be read (a link"),
}


def put_link(folder: Path, name: str) -> None:
    """The file's content under another folder, and a link to it in its place."""
    elsewhere = folder.parent.parent / f"{folder.name}-{name}"
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)


DIGEST = "0" * 64
BAD_MANIFESTS = {
    "a parent folder": ({"files": {"../secret": [1, DIGEST]}}, "'../secret' is no name of a file in the folder"),
    "an absolute path": ({"files": {"/etc/passwd": [1, DIGEST]}}, "'/etc/passwd' is no name"),
    "a detour": ({"files": {"a/../model.bin": [1, DIGEST]}}, "'a/../model.bin' is no name"),
    "a NUL": ({"files": {"a\0b": [1, DIGEST]}}, "is no name"),
    "escape codes": ({"files": {"\x1b]0;x\x07": [1, DIGEST]}}, r"'\x1b]0;x\x07' is no name"),
    "an empty name": ({"files": {"": [1, DIGEST]}}, "'' is no name"),
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
    assert find_checkpoint(tmp_path, "auto") is None, "a new run begins, the older checkpoints are aside"
    assert verify_checkpoint(tmp_path / "checkpoints-before-1" / folder.name) == []


@pytest.mark.parametrize("damage, message", DAMAGES.values(), ids=DAMAGES.keys())
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
def test_code_is_found_in_a_listed_pickle_of_any_name(name, tmp_path):
    folder = save_checkpoint(
        tmp_path, 2, engines={}, state={}, keep=2,
        extra_writer=lambda folder: torch.save({"x": os.system}, folder / name),
    )  # fmt: skip
    (problem,) = verify_checkpoint(folder)
    assert f"{name} is refused: it would run posix.system" in problem


def test_the_temporary_folder_of_a_killed_save_is_ignored_and_removed(tmp_path):
    folder = save(tmp_path, 3)
    shutil.copytree(folder, folder.with_name(".step-00000004.tmp"))
    (folder.with_name(".step-00000004.tmp") / "stale").touch()
    assert find_checkpoint(tmp_path, "auto") == folder
    again = save(tmp_path, 4)
    assert not (again / "stale").exists() and verify_checkpoint(again) == []
    assert names(tmp_path) == ["latest", "step-00000003", "step-00000004"]


def records(output: Path, step: int, text: str = "first") -> None:
    """What a run beside its checkpoints has written up to this step."""
    (output / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "of": "{text}"}}\n' for n in range(step + 1)))
    (output / "samples.jsonl").write_text(f'{{"step": {step}, "of": "{text}"}}\n')
    (output / "run.json").write_text(json.dumps(text))
    (output / "best").mkdir(exist_ok=True)
    (output / "best" / "config.json").write_text(text)


def test_a_run_without_resume_keeps_the_earlier_checkpoints_and_prints_how_to_use_them(tmp_path, capsys):
    save(tmp_path, 5)
    records(tmp_path, 5)
    assert find_checkpoint(tmp_path, "never") is None
    aside = tmp_path / "checkpoints-before-1"
    (printed,) = capsys.readouterr().out.splitlines()
    assert f"metrics and samples of the run before are in {aside}" in printed
    assert f"--resume {aside / 'step-00000005'}" in printed
    assert sorted(path.name for path in aside.iterdir()) == [
        "best", "latest", "metrics.jsonl", "run.json", "samples.jsonl", "step-00000005"]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints-before-1"]
    records(tmp_path, 0, "second")  # it has evaluated, but not trained: nothing to keep
    assert find_checkpoint(tmp_path, "auto") is None
    (printed,) = capsys.readouterr().out.splitlines()
    assert "starts from scratch" in printed and f"--resume {aside / 'step-00000005'}" in printed
    assert len(list(tmp_path.glob("*-before-*"))) == 1
    records(tmp_path, 1, "second")
    assert find_checkpoint(tmp_path, "auto") is None
    assert (tmp_path / "history-before-2" / "run.json").read_text() == '"second"'
    assert "1, " in (tmp_path / "history-before-2" / "metrics.jsonl").read_text()


def test_a_checkpoint_that_was_set_aside_is_resumed_with_its_logs(tmp_path):
    save(tmp_path, 5)
    records(tmp_path, 5)
    find_checkpoint(tmp_path, "never")
    save(tmp_path, 2, text="second")
    records(tmp_path, 2, "second")
    aside = tmp_path / "checkpoints-before-1" / "step-00000005"
    assert find_checkpoint(tmp_path, str(aside)) == aside
    for name in ("metrics.jsonl", "samples.jsonl", "run.json", "best/config.json"):
        assert "first" in (tmp_path / name).read_text()
        assert "second" in (tmp_path / "checkpoints-before-2" / name).read_text()
    assert not (tmp_path / "checkpoints").exists(), "those of the second run are kept with its records"
    save(tmp_path, 6)
    assert find_checkpoint(tmp_path, "auto").name == "step-00000006"


def test_files_of_an_interrupted_start_or_end_are_removed_at_the_next_start(tmp_path):
    older, newer = save(tmp_path, 3), save(tmp_path, 4)
    newer.rename(newer.with_name(".step-00000004.old"))  # killed while the new one was to take its name
    half = [
        newer.with_name(f".step-00000004.{end}") for end in ("tmp", "universal")] + [
        older.with_name(".step-00000001.gone"), tmp_path / ".unfinished", tmp_path / "critic" / ".unfinished",
        tmp_path / "best.unfinished", tmp_path / "best.replaced",
    ]  # fmt: skip
    for folder in half:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("half" if folder.name != "best.replaced" else "the best so far")
    (tmp_path / ".metrics.jsonl.tmp").touch()
    (tmp_path / "checkpoints" / ".latest.tmp").touch()
    assert find_checkpoint(tmp_path, "auto") == newer
    assert names(tmp_path) == ["latest", "step-00000003", "step-00000004"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "checkpoints"]
    assert (tmp_path / "best" / "config.json").read_text() == "the best so far"


def test_a_safetensors_error_is_a_failed_save(tmp_path):
    """safetensors raises an error of its own, which is no OSError."""

    def full(folder: Path) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    folder = save(tmp_path, 1)
    with pytest.raises(OSError, match="the checkpoint cannot be written: rank 0: I/O error: No space left"):
        save_checkpoint(tmp_path, 2, engines={}, state={}, keep=2, extra_writer=full)
    assert names(tmp_path) == ["latest", folder.name]


def test_random_states_that_do_not_fit_on_the_disk_are_a_failed_save(tmp_path):
    """The file that safetensors writes is larger than the system allows here, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="the checkpoint cannot be written: rank 0"):
            save_checkpoint(tmp_path, 2, engines={}, state={}, keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == []


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 3, 10, 200):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["latest", "step-00000010", "step-00000200"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000200"


def test_checkpoints_of_an_earlier_longer_run_are_removed(tmp_path):
    for step in (50, 100):
        save(tmp_path, step, keep=2, text="old run")
    new = save(tmp_path, 10, keep=2, text="new run")
    assert find_checkpoint(tmp_path, "auto") == new
    assert names(tmp_path) == ["latest", "step-00000010"]
    assert (new / "model.bin").read_text() == "new run"


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path):
    save(tmp_path, 4, text="first")
    folder = save(tmp_path, 4, text="second")
    assert (folder / "model.bin").read_text() == "second" and verify_checkpoint(folder) == []


def test_the_manifest_covers_every_file_but_itself(tmp_path):
    folder = save(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert manifest["step"] == 1 and manifest["world_size"] == 1


def test_every_random_generator_is_restored(tmp_path):
    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.randn(()).item()]

    draw()  # an odd number of normal numbers leaves one cached in Python's and NumPy's generators
    folder = save(tmp_path, 1)
    expected = draw()
    draw()
    assert load_checkpoint(folder, engines={}, fingerprint={"rows": 7}) == {"step": 1, "rows": 7}
    assert draw() == expected


def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    folder = save(tmp_path, 1)
    with pytest.raises(ValueError, match="rows was 7 and is 8.*--resume never"):
        load_checkpoint(folder, engines={}, fingerprint={"rows": 8})


def test_two_ranks_save_and_find_the_same_checkpoint(programs, tmp_path):
    programs.run(RANKS, [tmp_path], processes=2, log=tmp_path / "log")
    assert names(tmp_path) == ["latest", "step-00000003"]
    folder = tmp_path / "checkpoints" / "step-00000003"
    assert verify_checkpoint(folder) == [], "one process may convert it"
    folder = folder.rename(folder.with_name("step-00000003-update-0001"))
    (problem,) = verify_checkpoint(folder)
    assert "2 processes in the middle of an iteration" in problem and "start as many" in problem
