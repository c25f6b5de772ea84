"""Prepares the training data of the three steps from human conversations.

The conversations are the package `chitchat-dataset` (MIT): 7,168 chats of two people. Every conversation is
assigned to one part by a hash of its id: held out for evaluation, or training for step 1 (SFT), step 2 (preferences)
or step 3 (prompts). So no conversation is used for training twice, nor for both training and evaluation.

The preference pairs are DERIVED, not human judgements: the original reply is chosen over a reply from another
conversation on another topic. Within a part, every reply is chosen in one pair and rejected in another, of about the
same length: a reward model that ignores the prompt cannot exceed an accuracy of one half.
"""

import argparse
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from wheel_file import WheelFile

from dschat.arguments.script_inputs import SEEDS, exit_on_mistake, new_folder, number_type, read_json

CONVERSATIONS = WheelFile(
    package="chitchat-dataset",
    version="0.9.0",
    member="chitchat_dataset/dataset.json",
    size=40_303_934,
    sha256="d2a5d0bf6acf354fef51f3af39cbece2220d3b8f6086b658c3d335105798312a",
)
EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
LINK = re.compile(r"https?://|\bwww\.\w")
SYSTEM = "You are chatting with a friend."
# Shares of the conversations; size flags limit the rows of a part.
PARTS = {"eval": 0.10, "sft": 0.45, "preferences": 0.30, "prompts": 0.15}
BLOCK = 24  # replies of similar length among which the rejected ones are permuted

Message = dict[str, str]


@dataclass(frozen=True)
class Example:
    """A segment of a conversation: a system message, then alternating user and assistant; the assistant ends it."""

    conversation: str
    topic: str
    messages: tuple[Message, ...]

    @property
    def prompt(self) -> list[Message]:
        return list(self.messages[:-1])

    @property
    def reply(self) -> str:
        return self.messages[-1]["content"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=new_folder, default=Path("output/smollm2/data"),
                        help="folder of the jsonl files")  # fmt: skip
    parser.add_argument("--downloads", type=new_folder,
                        help="folder of the downloaded conversations; default: OUTPUT/../downloads")  # fmt: skip
    parser.add_argument("--seed", type=number_type(int, **SEEDS), default=0,
                        help="part of every hash, so it determines the split and the samples")  # fmt: skip
    rows = number_type(int, at_least=0)
    parser.add_argument("--sft", type=rows, default=0, help="SFT examples to write; 0: all")
    parser.add_argument("--preferences", type=rows, default=0, help="preference pairs to write; 0: all")
    parser.add_argument("--prompts", type=rows, default=0, help="prompts to write; 0: all")
    parser.add_argument("--eval", type=rows, default=256, help="held-out rows of each kind; 0: all")
    parser.add_argument("--max_turns", type=number_type(int, at_least=2), default=6,
                        help="maximum messages of an example, the reply included")  # fmt: skip
    parser.add_argument("--max_chars", type=number_type(int, at_least=100), default=600,
                        help="maximum characters of an example, roughly four per token")  # fmt: skip
    arguments = parser.parse_args(argv)
    with exit_on_mistake("prepare_data"):
        source = CONVERSATIONS.fetch(arguments.downloads or arguments.output.parent / "downloads")
        prepare(read_json(source), arguments)


def prepare(conversations: dict[str, dict], arguments: argparse.Namespace) -> None:
    """Clean, segment, split and write the data; prints and saves the counts."""
    counts: Counter[str] = Counter()
    parts: dict[str, list[Example]] = {name: [] for name in PARTS}
    for key, conversation in conversations.items():
        examples = examples_of(key, conversation, counts, arguments.max_turns, arguments.max_chars)
        counts["conversations used" if examples else "conversations too short"] += 1
        parts[part_of(uniform(key, seed=arguments.seed))] += examples
    for examples in parts.values():
        # In hash order, a smaller file is a random sample of a larger one, over as many conversations as possible.
        examples.sort(key=lambda example: uniform(repr(example), seed=arguments.seed))
    sizes = {"sft": arguments.sft, "preferences": arguments.preferences, "prompts": arguments.prompts}
    arguments.output.mkdir(parents=True, exist_ok=True)
    for kind, size in sizes.items():
        for name, part, limit in ((kind, kind, size), (f"{kind}_eval", "eval", arguments.eval)):
            rows = rows_of(kind, parts[part][: limit or None], seed=arguments.seed)
            write_rows(arguments.output / f"{name}.jsonl", rows)
            counts[f"rows in {name}.jsonl"] = len(rows)
    (arguments.output / "counts.json").write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
    print("\n".join(f"{number:9,} {name}" for name, number in counts.items()))


def uniform(key: str, *, seed: int) -> float:
    """A number in [0, 1) that depends on the key and the seed alone."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:8], "big") / 2**64


def part_of(share: float) -> str:
    """The part whose interval of [0, 1) contains `share`."""
    upper = 0.0
    for name, width in PARTS.items():
        upper += width
        if share < upper:
            return name
    return name


def clean(text: str, counts: Counter[str]) -> str:
    """One line, single spaces, e-mail addresses replaced and counted."""
    text, replaced = EMAIL.subn("[email]", " ".join(text.split()))
    counts["e-mail addresses scrubbed"] += replaced
    return text


def turns_of(messages: Iterable[Sequence[dict]], counts: Counter[str]) -> list[str]:
    """Alternating turns: consecutive messages of one author become lines of one turn, empty ones are dropped."""
    turns: list[tuple[str, str]] = []
    for message in (message for group in messages for message in group):
        text = clean(message["text"], counts)
        counts["messages"] += 1
        if not text:
            counts["messages empty"] += 1
        elif turns and turns[-1][0] == message["sender"]:
            turns[-1] = message["sender"], f"{turns[-1][1]}\n{text}"
        else:
            turns.append((message["sender"], text))
    return [text for _, text in turns]


def examples_of(key: str, conversation: dict, counts: Counter[str], max_turns: int, max_chars: int) -> list[Example]:
    """The conversation as non-overlapping examples, at most six, in order."""
    turns = turns_of(conversation["messages"], counts)
    topic = clean(conversation.get("prompt") or "", counts)
    examples = []
    for start, window in windows(turns, max_turns=max_turns, max_chars=max_chars):
        # The topic was given as a conversation opener; later turns have usually left it.
        system = f"{SYSTEM} Topic: {topic}" if topic and start == 0 else SYSTEM
        roles = ("user", "assistant") * (len(window) // 2)
        dialogue = [{"role": role, "content": text} for role, text in zip(roles, window, strict=True)]
        examples.append(Example(key, topic, ({"role": "system", "content": system}, *dialogue)))
    return examples[:6]


def windows(turns: Sequence[str], *, max_turns: int, max_chars: int) -> Iterator[tuple[int, Sequence[str]]]:
    """Yields (start, turns[start:end]): an even number of turns, at most max_turns, that passes `is_usable`."""
    start = 0
    while start + 2 <= len(turns):
        end = min(start + max_turns - max_turns % 2, start + (len(turns) - start) // 2 * 2)
        while end > start and not is_usable(turns[start:end], max_chars=max_chars):
            end -= 2
        if end > start:
            yield start, turns[start:end]
        # Advancing by one turn swaps the roles, which is fine: both speakers are human.
        start = max(end, start + 1)


def is_usable(window: Sequence[str], *, max_chars: int) -> bool:
    """Quality filter: minimum length of context and reply, maximum length, no links."""
    context, reply = " ".join(window[:-1]), window[-1]
    return (
        sum(map(len, window)) <= max_chars
        and not any(LINK.search(turn) for turn in window)
        and len(context.split()) >= 5
        and len(reply.split()) >= 4
        and 15 <= len(reply) <= max_chars // 2
        and sum(map(str.isalpha, reply)) >= len(reply) // 2
    )


def rows_of(kind: str, examples: Sequence[Example], *, seed: int) -> list[dict]:
    """The rows of one file: `messages`, or `prompt`, or `prompt`, `chosen`, `rejected`."""
    if kind == "sft":
        return [{"messages": list(example.messages)} for example in examples]
    if kind == "prompts":
        return [{"prompt": example.prompt} for example in examples]
    return [
        {
            "prompt": example.prompt,
            "chosen": [{"role": "assistant", "content": example.reply}],
            "rejected": [{"role": "assistant", "content": other.reply}],
            "source": "derived",
        }
        for example, other in derived_pairs(examples, seed=seed)
    ]


def derived_pairs(examples: Sequence[Example], *, seed: int) -> list[tuple[Example, Example]]:
    """Pairs (example, other example whose reply is the rejected one), in the order of `examples`.

    Examples are sorted by reply length and split into blocks. Within a block, replies are permuted so that no
    example gets its own reply, or one with the same conversation, topic or words. A block without such a
    permutation in 200 draws is skipped.
    """
    generator = random.Random(seed)
    order = sorted(range(len(examples)), key=lambda index: (len(examples[index].reply), index))
    rejected: dict[int, int] = {}
    for begin in range(0, len(order), BLOCK):
        block = order[begin : begin + BLOCK]
        for _ in range(200):
            permuted = generator.sample(block, len(block))
            if all(is_unrelated(examples[own], examples[other]) for own, other in zip(block, permuted, strict=True)):
                rejected.update(zip(block, permuted, strict=True))
                break
    return [(example, examples[rejected[index]]) for index, example in enumerate(examples) if index in rejected]


def is_unrelated(example: Example, other: Example) -> bool:
    """Whether the other's reply can be the rejected one: from another conversation and topic, with other words."""
    same_topic = example.topic != "" and example.topic == other.topic
    same_words = example.reply.casefold() == other.reply.casefold()
    return example.conversation != other.conversation and not same_topic and not same_words


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    """Write a jsonl file atomically."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as sink:
        for row in rows:
            line = json.dumps(row, ensure_ascii=False)
            assert not EMAIL.search(line), f"an e-mail address was left in {line}"
            sink.write(line + "\n")
    partial.rename(path)


if __name__ == "__main__":
    main()
