"""Contents, retention and write errors of checkpoints; training/test_faults.py kills and resumes real runs."""

import json
import resource
import shutil
from pathlib import Path

import pytest
from safetensors import SafetensorError
from saved_checkpoints import checkpoint_names, save

from dschat.checkpoints.saving import save_checkpoint
from dschat.checkpoints.selection import find_checkpoint, verify_checkpoint

RANKS = Path(__file__).with_name("checkpoint_ranks.py")


def test_the_temporary_folder_of_a_killed_save_is_ignored_and_removed(tmp_path):
    folder = save(tmp_path, 3)
    shutil.copytree(folder, folder.with_name(".step-00000004.tmp"))
    (folder.with_name(".step-00000004.tmp") / "stale").touch()
    assert find_checkpoint(tmp_path, "auto") == folder
    next_folder = save(tmp_path, 4)
    assert not (next_folder / "stale").exists() and verify_checkpoint(next_folder) == []
    assert checkpoint_names(tmp_path) == ["latest", "step-00000003", "step-00000004"]


def test_a_safetensors_error_while_saving_is_an_oserror(tmp_path):
    """SafetensorError is not an OSError."""

    def fail(folder: Path) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    folder = save(tmp_path, 1)
    with pytest.raises(OSError, match="the checkpoint cannot be written: rank 0: I/O error: No space left"):
        save_checkpoint(tmp_path, 2, engines={}, state={}, keep=2, extra_writer=fail)
    assert checkpoint_names(tmp_path) == ["latest", folder.name]


def test_random_states_that_do_not_fit_on_the_disk_are_an_oserror(tmp_path):
    """The file of random states exceeds the file size limit set here, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="the checkpoint cannot be written: rank 0"):
            save_checkpoint(tmp_path, 2, engines={}, state={}, keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoint_names(tmp_path) == []


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 3, 10, 200):
        save(tmp_path, step, keep=2)
    assert checkpoint_names(tmp_path) == ["latest", "step-00000010", "step-00000200"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000200"


def test_checkpoints_of_an_earlier_longer_run_are_removed(tmp_path):
    for step in (50, 100):
        save(tmp_path, step, keep=2, text="old run")
    new = save(tmp_path, 10, keep=2, text="new run")
    assert find_checkpoint(tmp_path, "auto") == new
    assert checkpoint_names(tmp_path) == ["latest", "step-00000010"]
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


def test_two_ranks_save_and_find_the_same_checkpoint(programs, tmp_path):
    programs.run(RANKS, [tmp_path], processes=2, log=tmp_path / "log")
    assert checkpoint_names(tmp_path) == ["latest", "step-00000003"]
    folder = tmp_path / "checkpoints" / "step-00000003"
    assert verify_checkpoint(folder) == [], "one process may convert it"
    folder = folder.rename(folder.with_name("step-00000003-update-0001"))
    (problem,) = verify_checkpoint(folder)
    assert "2 processes in the middle of an iteration" in problem and "start the same number" in problem
