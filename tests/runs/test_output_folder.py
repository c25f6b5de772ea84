"""Output folders: one run per folder, and one folder per run."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dschat.runs import output_folder

RANKS = Path(__file__).with_name("output_folder_ranks.py")


@pytest.fixture(autouse=True)
def release_locks():
    yield
    for file in output_folder._locks.values():
        file.close()
    output_folder._locks.clear()


def test_a_second_run_in_a_folder_is_refused_and_the_message_names_the_first(tmp_path):
    output_folder.lock_folder(tmp_path)
    other = f"from dschat.runs import output_folder; output_folder.lock_folder({str(tmp_path)!r})"
    printed = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True)
    assert printed.returncode and f"another run is writing there (process {os.getpid()} on" in printed.stderr


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_a_file_system_without_locks_gives_a_warning_and_no_error(code, monkeypatch, tmp_path, capsys):
    def refuse(_file, _operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    output_folder.lock_folder(tmp_path)
    assert f"cannot lock files ({os.strerror(code)})" in capsys.readouterr().err


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EACCES])
def test_a_lock_held_by_another_machine_counts_as_another_run(code, monkeypatch, tmp_path):
    def refuse(_file, _operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / ".lock").write_text("process 7 on elsewhere")
    with pytest.raises(ValueError, match="another run is writing there .process 7 on elsewhere."):
        output_folder.lock_folder(tmp_path)


def test_a_folder_that_is_not_writable_is_named(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ValueError, match="cannot be written there"):
        output_folder.lock_folder(tmp_path)


def test_an_output_folder_that_the_nodes_do_not_share_is_refused(programs, tmp_path):
    printed = programs.run(RANKS, [tmp_path], processes=2, log=tmp_path / "log", code=2)
    assert printed.count("files that rank 0 writes there are not visible on") == 1 and "Traceback" not in printed
    assert not list(tmp_path.rglob(".shared-*"))
