"""Dynamic sampling: groups without signal are replaced by later prompts, identically on two ranks."""

import json
from pathlib import Path
from typing import Any

import dynamic_ranks
import pytest
from dynamic_ranks import CASES, QUESTIONS, REWARD, SIZE, SLOTS
from rlhf_models import save_models

from dschat.data.batches import GlobalBatches

pytestmark = pytest.mark.usefixtures("single_rank_group")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = save_models(tmp_path_factory.mktemp("models"))
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def one_process(folder) -> dict[str, Any]:
    return {case: dynamic_ranks.scenario(folder, case) for case in CASES}


@pytest.fixture(scope="module")
def two_ranks(folder, programs) -> dict[str, Any]:
    programs.run(Path(__file__).with_name("dynamic_ranks.py"), [folder], processes=2, log=folder / "log")
    return json.loads((folder / "dynamic.json").read_text())


def groups_of(samples: list) -> list[tuple[int, bool]]:
    """(prompt number, whether all its scores are equal) of each group, in the order of the rollouts."""
    groups = [samples[first : first + SIZE] for first in range(0, len(samples), SIZE)]
    assert all(len({prompt for prompt, _ in group}) == 1 for group in groups)
    return [(QUESTIONS.index(group[0][0]), len({round(score, 4) for _, score in group}) == 1) for group in groups]


@pytest.mark.parametrize("case", CASES)
def test_flat_groups_are_resampled_a_bounded_number_of_times_and_other_groups_are_kept(one_process, case):
    """Replays the rounds slot by slot, from the groups in the order in which they were sampled."""
    actual, rounds = one_process[case], 1 + CASES[case]["dynamic_sampling"]
    normalised = CASES[case].get("normalize_rewards", False)
    consumed = 0
    for number in range(3):
        groups = groups_of(actual["samples"][number])
        remaining = list(groups)
        slots: dict[int, tuple[int, bool]] = {}
        for _ in range(rounds):
            open_slots = [slot for slot in range(SLOTS) if slot not in slots or slots[slot][1]]
            for slot in open_slots:
                slots[slot] = remaining.pop(0)
        assert not remaining, "no round beyond the bound, and none for slots that were filled"
        consumed += len(groups)
        assert actual["prompts_consumed"][number] == consumed
        rows = [row for part in actual["minibatches"][2 * number : 2 * number + 2] for row in part]
        assert len(rows) == SLOTS * SIZE
        trains_flat = CASES[case]["dynamic_sampling"] == 0
        if not normalised:  # a score encodes its prompt: 10 · number + less than 7
            trained_rows = sorted((int(score // 10), trained) for score, trained, _ in rows)
            assert trained_rows == sorted(
                (prompt, trains_flat or not flat) for prompt, flat in slots.values() for _ in range(SIZE)
            )
        assert sum(trained for _, trained, _ in rows) == SIZE * sum(
            trains_flat or not flat for _, flat in slots.values()
        )
        flat = sum(flat for _, flat in groups)
        assert actual["sums"][number] == [SIZE * n for n in (len(groups), len(groups) - flat * (not trains_flat), flat)]
    if case == "nearly all":
        assert any(flat for _, flat in slots.values()), "this case must have a slot that is never filled"


@pytest.mark.parametrize("case", CASES)
def test_dynamic_sampling_uses_every_prompt_once_and_in_order(one_process, case):
    batches = GlobalBatches([1] * len(QUESTIONS), global_batch_size=SLOTS, seed=3, group_by_length=False)
    used = [prompt for samples in one_process[case]["samples"] for prompt, _ in groups_of(samples)]
    stream = [row for step in range(len(used) // SLOTS + 1) for row in batches.step(step)]
    assert used == stream[: len(used)]


@pytest.mark.parametrize("case", CASES)
def test_groups_stay_whole_and_two_ranks_make_the_minibatches_of_one_process(one_process, two_ranks, case):
    actual, expected = two_ranks[case], one_process[case]
    assert actual["prompts_consumed"] == expected["prompts_consumed"] and actual["sums"] == expected["sums"]
    assert len(actual["minibatches"]) == len(expected["minibatches"]) == 6
    for rows, expected_rows in zip(actual["minibatches"], expected["minibatches"], strict=True):
        for row, other in zip(rows, expected_rows, strict=True):
            assert row == pytest.approx(other, abs=1e-5)
    for name, moments in expected["moments"].items():
        assert actual["moments"][name] == pytest.approx(moments, rel=1e-9)
        count = SIZE * sum(len(samples) // SIZE for samples in expected["samples"])
        assert moments[0] == (count if CASES[case].get("normalize_rewards") else 0), "every response counts once"
    if not CASES[case].get("normalize_rewards"):
        for part in actual["minibatches"]:
            prompts = [int(score // 10) for score, _, _ in part]
            assert all(prompts.count(prompt) % SIZE == 0 for prompt in prompts)
