"""Judged batches on disk: no judged batch is lost, no partial one is used, no finished file is replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dschat.preference.judged_batches import (
    JudgedBatch,
    JudgedBatches,
    read_parts,
    remaining_batches,
    without_duplicates,
)

SETTINGS = {"--seed": 1, "--temperature": 0.7, "--reward": ["length?max=3@0.1"]}


def batch_of(*indices: int) -> JudgedBatch:
    pairs = [(index, {"prompt": [{"role": "user", "content": "é\u2028 ?"}], "chosen": f"{index}",
                      "chosen_score": 0.1 + index}) for index in indices]  # fmt: skip
    return JudgedBatch(list(indices), pairs, scored=3, unscored=1)


def opened(folder: Path, *, resume: bool = False, overwrite: bool = False, **changes) -> JudgedBatches:
    return JudgedBatches(folder, SETTINGS | changes, resume=resume, overwrite=overwrite)


def test_a_resumed_run_has_the_appended_batches_and_finishing_removes_the_parts(tmp_path):
    first = opened(tmp_path)
    for indices in ((0, 1), (2,)):
        first.append(batch_of(*indices))
    second = opened(tmp_path, resume=True)
    assert second.earlier == [batch_of(0, 1), batch_of(2)] and not second.finished
    second.append(batch_of(3))
    assert opened(tmp_path, resume=True).earlier == [batch_of(0, 1), batch_of(2), batch_of(3)]
    rows = [{"chosen": "ü"}, {"chosen": "\u2028"}]
    path = second.finish(rows)
    assert [json.loads(line) for line in path.read_bytes().decode().split("\n")[:-1]] == rows
    assert sorted(p.name for p in tmp_path.iterdir()) == ["preferences.jsonl", "preferences.settings.json"]
    done = opened(tmp_path, resume=True)
    assert done.finished and done.earlier == []


def test_a_truncated_or_damaged_line_is_skipped_and_does_not_affect_the_next(tmp_path, capsys):
    judged = opened(tmp_path)
    for index in range(3):
        judged.append(batch_of(index))
    content = judged.path.read_bytes()
    judged.path.write_bytes(content[:-1] + b"")  # the end of the line is gone, the line is whole
    assert read_parts(judged.path.parent) == [batch_of(0), batch_of(1), batch_of(2)]
    lines = content.split(b"\n")
    damaged = lines[1].replace(b"1.1", b"1.2")  # one score differs: only the checksum detects it
    assert damaged != lines[1]
    judged.path.write_bytes(b"\n".join([lines[0], damaged, lines[2][:-9]]))
    assert read_parts(judged.path.parent) == [batch_of(0)]
    output = capsys.readouterr().out
    assert f"{judged.path}:2 is incomplete" in output and f"{judged.path}:3 is incomplete" in output
    again = opened(tmp_path, resume=True)
    again.append(batch_of(1))
    assert read_parts(judged.path.parent) == [batch_of(0), batch_of(1)]


def test_a_failed_write_keeps_the_earlier_batches(tmp_path, monkeypatch):
    judged = opened(tmp_path)
    judged.append(batch_of(0))
    before = judged.path.read_bytes()
    monkeypatch.setenv("DSCHAT_FAILPOINT", "judging:raise")
    with pytest.raises(OSError, match=f"failpoint judging: '{judged.path}'"):
        judged.append(batch_of(1))
    assert judged.path.read_bytes() == before
    monkeypatch.setenv("DSCHAT_FAILPOINT", "pairs_written:raise")
    (tmp_path / "preferences.jsonl").write_text("old\n")
    with pytest.raises(OSError):
        judged.finish([{"chosen": "a"}])
    assert (tmp_path / "preferences.jsonl").read_text() == "old\n"
    assert opened(tmp_path, resume=True).earlier == [batch_of(0)] and not list(tmp_path.glob(".*.tmp"))


def test_a_run_killed_before_the_settings_are_moved_finishes_again_on_resume(tmp_path, monkeypatch):
    judged = opened(tmp_path)
    judged.append(batch_of(0))
    monkeypatch.setenv("DSCHAT_FAILPOINT", "pairs_renamed:raise")
    with pytest.raises(OSError):
        judged.finish([{"chosen": "a"}])
    again = opened(tmp_path, resume=True)
    assert again.earlier == [batch_of(0)] and not again.finished


def test_a_finished_file_is_replaced_only_with_overwrite_and_only_at_the_end(tmp_path):
    opened(tmp_path).finish([{"chosen": "old"}])
    with pytest.raises(ValueError, match=r"preferences\.jsonl already exists: .* or pass --overwrite"):
        opened(tmp_path)
    anew = opened(tmp_path, overwrite=True)
    anew.append(batch_of(0))
    assert "old" in (tmp_path / "preferences.jsonl").read_text()
    anew.finish([{"chosen": "new"}])
    assert "new" in (tmp_path / "preferences.jsonl").read_text()
    (tmp_path / "preferences.settings.json").unlink()  # foreign pairs, or of an earlier version
    with pytest.raises(ValueError, match="cannot be read"):
        opened(tmp_path, resume=True)


def test_without_resume_judged_batches_are_moved_aside(tmp_path, capsys):
    for number in (0, 1):
        judged = opened(tmp_path)
        assert judged.earlier == []
        judged.append(batch_of(number))
    assert read_parts(tmp_path / "preferences.part-before-1") == [batch_of(0)]
    opened(tmp_path)
    assert read_parts(tmp_path / "preferences.part-before-2") == [batch_of(1)]
    assert "preferences.part-before-2" in capsys.readouterr().out


@pytest.mark.parametrize("finished", [False, True])
def test_batches_made_with_other_settings_are_refused(tmp_path, finished):
    judged = opened(tmp_path)
    judged.append(batch_of(0))
    if finished:
        judged.finish([{"chosen": "a"}])
    with pytest.raises(ValueError, match=r"--temperature was 0\.7 and is 0\.8"):
        opened(tmp_path, resume=True, **{"--temperature": 0.8})
    opened(tmp_path, resume=True)


def test_batch_boundaries_do_not_depend_on_finished_batches(tmp_path):
    assert remaining_batches(7, batch_size=3, earlier=[]) == [[0, 1, 2], [3, 4, 5], [6]]
    assert remaining_batches(7, batch_size=3, earlier=[batch_of(3, 4, 5)]) == [[0, 1, 2], [6]]
    # Of a run with another batch size: what is left of each.
    assert remaining_batches(7, batch_size=3, earlier=[batch_of(0, 1), batch_of(2, 3)]) == [[4, 5], [6]]
    assert remaining_batches(3, batch_size=3, earlier=[batch_of(0, 1, 2)]) == []


def test_batches_that_two_nodes_read_count_once():
    assert without_duplicates([batch_of(0, 1), batch_of(2), batch_of(0, 1)]) == [batch_of(0, 1), batch_of(2)]
