"""Build locks: which are removed, which are waited for, and for how long."""

import os
import time
from pathlib import Path

import pytest
from rlhf_models import group_of_one

from dschat.arguments.command_line import SettingsError
from dschat.distributed import build_locks, launch
from dschat.distributed.build_locks import MACHINES, clear_stale_build_locks


def make_lock(builds: Path, name: str, *, age: float = 0.0) -> Path:
    lock = builds / f"deepspeed_{name}" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - age, time.time() - age))
    return lock


def register_another_machine(builds: Path, *, age: float = 0.0) -> None:
    (builds / MACHINES).mkdir()
    (builds / MACHINES / "elsewhere").touch()
    os.utime(builds / MACHINES / "elsewhere", (time.time() - age, time.time() - age))


@pytest.fixture
def no_waiting(monkeypatch):
    def sleep(seconds):
        raise AssertionError("clear_stale_build_locks waited")

    monkeypatch.setattr(build_locks.time, "sleep", sleep)


def test_on_one_machine_a_lock_that_no_process_holds_is_stale_immediately(no_waiting, tmp_path, capfd):
    killed, young = make_lock(tmp_path, "killed", age=700), make_lock(tmp_path, "young")
    running = make_lock(tmp_path, "busy")
    with running.open():
        clear_stale_build_locks(tmp_path)
    assert not killed.exists() and not young.exists()
    assert running.exists(), "its builder is alive, and torch waits for it"
    assert capfd.readouterr().err == ""


def test_a_machine_registered_long_ago_is_ignored(no_waiting, tmp_path):
    lock = make_lock(tmp_path, "young")
    register_another_machine(tmp_path, age=10 * 24 * 3600)
    clear_stale_build_locks(tmp_path)
    assert not lock.exists()


def test_a_run_waits_for_a_lock_that_another_machine_may_hold(tmp_path, monkeypatch, capfd):
    lock = make_lock(tmp_path, "remote")
    register_another_machine(tmp_path)
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            lock.unlink()  # the build on the other machine has ended

    monkeypatch.setattr(build_locks.time, "sleep", sleep)
    clear_stale_build_locks(tmp_path)
    assert len(pauses) == 3
    assert capfd.readouterr().err.count(f"waiting for another machine or user to build an operation, 600 s at most; if "
                                        f"none does, remove {lock}") == 1  # fmt: skip


@pytest.mark.parametrize("age", [0.0, -5000.0], ids=["", "whose clock is ahead"])
def test_the_wait_ends_after_the_longest_build_time(age, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(build_locks, "LONGEST_BUILD_SECONDS", 0.2)
    monkeypatch.setattr(build_locks, "POLL_SECONDS", 0.05)
    lock = make_lock(tmp_path, "remote", age=age)
    register_another_machine(tmp_path)
    clear_stale_build_locks(tmp_path)
    assert not lock.exists() and "waiting for another machine" in capfd.readouterr().err


def test_a_run_waits_for_a_lock_of_another_user_before_it_removes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(build_locks, "LONGEST_BUILD_SECONDS", 0.2)
    monkeypatch.setattr(build_locks, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(os, "getuid", lambda: lock.stat().st_uid + 1)
    lock = make_lock(tmp_path, "remote")

    def unlink(self, missing_ok=False):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(SettingsError, match=r"left over .* \(Permission denied\): remove it, or set TORCH"):
        clear_stale_build_locks(tmp_path)


class LocksCleared(Exception):
    pass


def test_a_run_clears_stale_locks_before_it_builds_anything(monkeypatch, tmp_path):
    def raise_cleared(builds: Path) -> None:
        raise LocksCleared(builds)

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "clear_stale_build_locks", raise_cleared)
    with pytest.raises(LocksCleared, match=str(tmp_path)), group_of_one():
        pass
