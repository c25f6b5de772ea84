"""Two answers side by side in a terminal: wrapping, rewriting of rows, scrolling, interruption."""

import io
import os
import random
import re
import signal
import sys

import pytest
from repository import SCRIPTS

sys.path.insert(0, str(SCRIPTS))

import chat_columns  # noqa: E402
from chat_columns import SEPARATOR, cells, clipped, stream_columns  # noqa: E402


class Screen(io.StringIO):
    """A terminal of some rows that does what the escape sequences mean; only rows on the screen can be reached."""

    def __init__(self, height):
        super().__init__()
        self.height = height

    def rows(self):
        """Everything that was shown, scrolled rows included."""
        rows, row, column = [""], 0, 0
        for control, text in re.findall(r"(\x1b\[\d*[AK]|[\r\n])|([^\x1b\r\n]+)", self.getvalue()):
            if control == "\r":
                column = 0
            elif control == "\n":
                row, column = row + 1, 0  # the terminal driver returns the carriage too
                rows += [""] * (row == len(rows))
            elif control == "\x1b[K":
                rows[row] = rows[row][:column]
            elif control:
                row = max(row - int(control[2:-1]), len(rows) - self.height, 0)
            else:
                rows[row] = rows[row][:column].ljust(column) + text + rows[row][column + len(text) :]
                column += len(text)
        return [row.rstrip() for row in rows]


class SpokenText:
    """An answer whose pieces are given; None among them is Ctrl-C."""

    def __init__(self, pieces):
        self.pieces, self.text, self.read = pieces, "", 0

    def __iter__(self):
        for piece in self.pieces:
            if piece is None:
                os.kill(os.getpid(), signal.SIGINT)
                piece = ""
            self.read += 1
            self.text += piece
            yield piece


def wrapped(text, width):
    return [row for _, row in chat_columns.wrapped(text, width)]


def words(rng, count):
    long = "x" * rng.randint(1, 70) + " "
    return [rng.choice(["a ", "word ", "rather-long-word ", "\n", long]) for _ in range(count)]


def side_by_side(texts, width):
    columns = [wrapped(text.strip(), width) for text in texts]
    rows = max(map(len, columns))
    columns = [column + [""] * (rows - len(column)) for column in columns]
    return [SEPARATOR.join([left.ljust(width), right]).rstrip() for left, right in zip(*columns, strict=True)]


@pytest.mark.parametrize("seed", range(6))
def test_what_is_shown_at_the_end_is_both_texts_in_columns_however_long_they_are(seed):
    rng = random.Random(seed)
    answers = [SpokenText(words(rng, rng.choice([3, 40, 400]))) for _ in range(2)]
    size = os.terminal_size((100, rng.choice([8, 24])))
    screen = Screen(size.lines)
    stream_columns(answers, headings=["A", "B"], size=size, out=screen)
    width = (100 - 1 - len(SEPARATOR)) // 2
    heading, rule, *rows = screen.rows()
    assert heading == "A".ljust(width) + SEPARATOR + "B" and set(rule) == {"-", "+"}
    assert rows == [*side_by_side([answer.text for answer in answers], width), ""]
    assert max(map(len, rows)) < 100


def test_both_columns_grow_together():
    """Neither is more than half a screen of rows ahead while the other is generated."""
    long, slow = SpokenText(["line\n"] * 100), SpokenText(["a "] * 400)
    ahead = []

    class Watched(Screen):
        def write(self, text):
            if long.read < 100 and slow.read < 400:
                rows = [len(wrapped(answer.text.strip(), 48)) for answer in (long, slow)]
                ahead.append(rows[0] - rows[1])
            return super().write(text)

    stream_columns([long, slow], headings=["A", "B"], size=os.terminal_size((100, 12)), out=Watched(12))
    assert max(ahead) == 5, "half of the 10 rows that can be rewritten"


def test_ctrl_c_stops_both_between_two_tokens_and_the_texts_stay():
    answers = [SpokenText(["one ", None, "never "]), SpokenText(["two ", "three ", "never "])]
    screen, before = Screen(20), signal.getsignal(signal.SIGINT)
    stream_columns(answers, headings=["A", "B"], size=os.terminal_size((100, 20)), out=screen)
    assert screen.rows()[2:] == [f"{'one [interrupted]':<48}{SEPARATOR}two three [interrupted]", ""]
    assert [answer.text for answer in answers] == ["one ", "two three "]
    assert signal.getsignal(signal.SIGINT) == before


def test_a_second_ctrl_c_ends_the_program_as_everywhere():
    with pytest.raises(KeyboardInterrupt):
        stream_columns([SpokenText([None, "a"]), SpokenText([None, "b"])], headings=["A", "B"],
                       size=os.terminal_size((100, 20)), out=Screen(20))  # fmt: skip


def test_a_model_without_an_answer_leaves_its_column_empty():
    screen = Screen(20)
    stream_columns([None, SpokenText(["two"])], headings=["A", "B"], size=os.terminal_size((100, 20)), out=screen)
    assert screen.rows()[2] == " " * 48 + SEPARATOR + "two"


@pytest.mark.parametrize(("text", "rows"), [
    ("one two three", ["one two", "three"]),
    ("one two  three", ["one two", "three"]),
    ("abcdefghijk", ["abcdefgh", "ijk"]),
    ("a abcdefgh", ["a", "abcdefgh"]),
    ("    if x: y", ["    if", "x: y"]),
    ("漢字漢字漢字", ["漢字漢字", "漢字"]),
    ("e\u0301" * 9, ["e\u0301" * 8, "e\u0301"]),
    ("a\n\nb", ["a", "", "b"]),
    ("", [""]),
])  # fmt: skip
def test_rows_break_at_spaces_and_have_at_most_the_width_in_cells(text, rows):
    assert wrapped(text, 8) == rows
    assert all(cells(row) <= 8 for row in rows)


def test_rows_before_the_last_do_not_change_when_a_text_grows():
    text = "".join(words(random.Random(1), 200)).strip()
    final = wrapped(text, 20)
    for end in range(1, len(text)):
        rows = wrapped(text[:end].strip(), 20)
        assert rows[:-1] == final[: len(rows) - 1]


def test_a_row_begins_where_its_index_says():
    text = "".join(words(random.Random(2), 200)).strip()
    for start, row in chat_columns.wrapped(text, 20):
        assert text[start:].startswith(row)


def test_a_long_heading_shows_its_end():
    assert clipped("A: output/quickstart/sft", 12) == "…ckstart/sft" and clipped("short", 12) == "short"


def test_escape_sequences_are_text_in_columns_too():
    screen = Screen(20)
    stream_columns([SpokenText(["\x1b[2Jx"]), SpokenText(["y"])], headings=["A", "B"], size=os.terminal_size((100, 20)),
                   out=screen)  # fmt: skip
    assert "\\x1b[2Jx" in screen.rows()[2]
