"""Launched processes: joining, collectives, ordering and exit."""

import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dschat.arguments.command_line import SettingsError
from dschat.distributed import collectives, launch

RANKS = Path(__file__).with_name("launch_ranks.py")


@pytest.mark.parametrize("case", ["collectives_of_two", "main_first", "gather_and_broadcast"])
def test_collectives_of_two_ranks(case, programs, tmp_path):
    programs.run(RANKS, [case, tmp_path], processes=2, log=tmp_path / "log")


def test_a_settings_error_is_printed_once_without_a_traceback(programs, tmp_path):
    text = programs.run(RANKS, ["settings_error", tmp_path], processes=2, log=tmp_path / "log", code=2)
    assert text.count("--shade green: choose another") == 1
    assert "Traceback" not in text


def test_an_internal_error_prints_a_traceback(programs, tmp_path):
    text = programs.run(RANKS, ["internal_error", tmp_path], processes=2, log=tmp_path / "log", code=1)
    assert "Traceback" in text and "an internal error" in text


def test_an_error_of_one_rank_is_printed_first_and_ends_the_others_which_name_it(programs, tmp_path):
    text = programs.run(RANKS, ["internal_error_of_one", tmp_path], processes=3, log=tmp_path / "log", code=1)
    assert text.index("Traceback") < text.index("rank 1 (") and "KeyError: 'an internal error'" in text
    mentions = text.count("has failed in phase 'start': KeyError: 'an internal error'")
    assert mentions == 2, "by rank 0, which is outside any collective, and by rank 2, which is inside one"


def test_a_settings_error_of_one_rank_ends_all_with_status_2(programs, tmp_path):
    text = programs.run(RANKS, ["settings_error_of_one", tmp_path], processes=2, log=tmp_path / "log", code=None)
    assert "rank 1 (" in text and "--shade green: choose another" in text


def test_a_signal_to_one_rank_before_training_ends_all_with_its_status(programs, tmp_path):
    text = programs.run(RANKS, ["terminated", tmp_path], processes=2, log=tmp_path / "log", code=128 + signal.SIGTERM)
    assert text.count("SIGTERM: the run ends without saving a checkpoint") == 1 and "rank 1 (" in text
    assert "Traceback" not in text


def test_collectives_work_without_a_process_group():
    assert (collectives.rank(), collectives.world_size(), collectives.is_main()) == (0, 1, True)
    collectives.barrier()
    assert collectives.all_gather_objects("me") == ["me"]
    value = torch.tensor([1, 2])
    total = collectives.sum_over_ranks(value)
    total += 1
    assert value.tolist() == [1, 2] and total.tolist() == [2.0, 3.0]
    largest = collectives.max_over_ranks(value)
    largest += 1
    assert value.tolist() == [1, 2] and largest.tolist() == [2.0, 3.0]


def test_seed_all_seeds_every_generator():
    def draw(seed: int) -> list[float]:
        launch.seed_all(seed)
        return [random.random(), np.random.rand(), torch.rand(()).item()]

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        assert draw(3) == draw(3)
        assert all(one != other for one, other in zip(draw(3), draw(4), strict=True))
        draw(2**40)  # NumPy takes 32 bits only
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@pytest.fixture
def environment(monkeypatch):
    """os.environ as a copy without launch variables: changes made by a launch end with the test."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    return os.environ


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"WORLD_SIZE": "2"}, 4),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4"}, 2),  # the node's ranks share the node's cores
        ({"WORLD_SIZE": "16", "LOCAL_SIZE": "8"}, 1),  # the deepspeed launcher's name for it
        ({"WORLD_SIZE": "100"}, 1),
        ({"WORLD_SIZE": "2", "OMP_NUM_THREADS": "3"}, 7),  # set by the user, read by torch at its start: kept
        ({"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, 4),  # set by torchrun
    ],
)
def test_ranks_share_the_cores(variables, expected, environment, monkeypatch):
    environment.pop("OMP_NUM_THREADS", None)
    environment.update(variables)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(7)
        launch._set_threads()
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(threads)


def test_missing_build_tools_are_listed_before_any_build(environment, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    environment["PATH"] = str(tmp_path)
    environment.pop("CXX", None)
    with pytest.raises(SettingsError, match=r"needs g\+\+ and ninja: install them") as caught:
        launch._check_build_tools()
    assert "\n" not in str(caught.value)
    for tool in ("g++", "ninja"):
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    launch._check_build_tools()


def test_a_virtual_environment_builds_into_itself_with_its_own_ninja(environment, monkeypatch, tmp_path):
    scripts = tmp_path / "bin"
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(scripts))
    environment["PATH"] = "/usr/bin"
    environment.pop("TORCH_EXTENSIONS_DIR", None)
    launch._use_own_build_folder()
    assert environment["PATH"] == "/usr/bin"  # it has no ninja of its own
    assert Path(environment["TORCH_EXTENSIONS_DIR"]) == tmp_path / "torch_extensions"
    scripts.mkdir()
    (scripts / "ninja").touch()
    environment["TORCH_EXTENSIONS_DIR"] = "/chosen"
    launch._use_own_build_folder()
    assert environment["PATH"] == f"{scripts}{os.pathsep}/usr/bin"
    assert environment["TORCH_EXTENSIONS_DIR"] == "/chosen"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_build_folder_of_another_user_is_not_used(environment, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    environment.pop("TORCH_EXTENSIONS_DIR", None)
    (tmp_path / "torch_extensions").mkdir()
    os.chown(tmp_path / "torch_extensions", 12345, 12345)
    launch._use_own_build_folder()
    assert "TORCH_EXTENSIONS_DIR" not in environment
