"""Build folders that other users cannot write to."""

import os
import stat
from pathlib import Path

import pytest

from dschat.distributed.private_folder import is_private_file, private_folder

NAME = f"dschat-{os.getuid()}"
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


def give_to_another_user(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)


UNSAFE = {
    "a link": lambda folder: folder.symlink_to(folder.parent.parent),
    "a dangling link": lambda folder: folder.symlink_to(folder.parent / "nowhere"),
    "a file": lambda folder: folder.touch(),
    "a world-writable folder": lambda folder: (folder.mkdir(), folder.chmod(0o777)),
    "a group-writable folder": lambda folder: (folder.mkdir(), folder.chmod(0o770)),
    "a world-writable parent": lambda folder: (folder.mkdir(mode=0o700), folder.parent.chmod(0o777)),
}


def test_the_first_usable_parent_is_chosen_and_its_folder_is_reused(tmp_path):
    (tmp_path / "first").mkdir()
    before = os.umask(0)
    try:
        folder = private_folder([tmp_path / "first", tmp_path / "second"])
    finally:
        os.umask(before)
    assert folder == tmp_path / "first" / NAME and stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "built.so").touch()
    assert private_folder([tmp_path / "first"]) == folder and (folder / "built.so").exists()


def test_an_own_folder_that_others_may_read_is_made_private_and_used(tmp_path):
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME).chmod(0o755)
    assert stat.S_IMODE(private_folder([tmp_path]).stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "make_unsafe",
    [*UNSAFE.values(), pytest.param(give_to_another_user, marks=AS_ROOT)],
    ids=[*UNSAFE.keys(), "another user's folder"],
)
def test_a_folder_that_others_may_have_written_to_is_not_used(make_unsafe, tmp_path, monkeypatch):
    bad, good = tmp_path / "bad", tmp_path / "good"
    bad.mkdir()
    make_unsafe(bad / NAME)
    assert private_folder([bad, good]) == good / NAME
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.warns(UserWarning, match=f"{bad / NAME}: "):
        fresh = private_folder([bad])
    assert fresh.parent == tmp_path and stat.S_IMODE(fresh.stat().st_mode) == 0o700 and not list(fresh.iterdir())


def test_a_file_is_private_if_only_its_owner_can_write_it(tmp_path):
    file, link = tmp_path / "built.so", tmp_path / "link.so"
    assert not is_private_file(file)
    file.touch(mode=0o700)
    link.symlink_to(file)
    assert is_private_file(file) and not is_private_file(link) and not is_private_file(tmp_path)
    for mode in (0o720, 0o702):
        file.chmod(mode)
        assert not is_private_file(file)


@AS_ROOT
def test_a_file_of_another_user_is_not_private(tmp_path):
    (tmp_path / "built.so").touch(mode=0o700)
    os.chown(tmp_path / "built.so", 12345, 12345)
    assert not is_private_file(tmp_path / "built.so")
