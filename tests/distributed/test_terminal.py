"""Untrusted text on a terminal: control characters are escaped."""

import pytest

from dschat.distributed.terminal import printable


@pytest.mark.parametrize(
    "text, escaped",
    [
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b31m", r"\x9b31m"),  # C1: another start of an escape sequence
        ("safe\rover", r"safe\x0dover"),
        ("a\x08b\x7f\x00", r"a\x08b\x7f\x00"),
        ("\u202eevil\u202c \u2066x\u2069", r"\u202eevil\u202c \u2066x\u2069"),
        ("\u2028", r"\u2028"),
        ("\ud800", r"\ud800"),
    ],
)
def test_control_characters_are_escaped(text, escaped):
    assert printable(text) == escaped
    assert "".join(map(printable, text)) == escaped, "escaping one character at a time gives the same"


def test_text_of_any_script_is_unchanged():
    text = "line\n\ttab naïve שלום مرحبا 漢字 👩‍👩‍👧 \u00a0\u200b \\x1b"
    assert printable(text) == text and printable(ValueError("x")) == "x"


@pytest.mark.parametrize("code", [*range(0x20), *range(0x7F, 0xA0)])
def test_every_control_character_but_newline_and_tab_is_escaped(code):
    assert printable(chr(code)) == (chr(code) if chr(code) in "\n\t" else f"\\x{code:02x}")
