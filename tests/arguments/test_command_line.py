"""Command line and YAML settings, with all mistakes reported in one message."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from dschat.arguments.command_line import SettingsError, as_settings_errors, parse, raise_mistakes
from dschat.arguments.flags import flag


@dataclass
class Colour:
    shade: Literal["dark", "light"] = flag("dark", "how much light", on_resume="apply")
    depth: Literal[0, 1, 2] = flag(1, "layers", on_resume="apply")
    gloss: float = flag(0.5, "share of light that is mirrored", at_least=0, below=1, on_resume="apply")
    coats: int = flag(1, "how often", at_least=1, on_resume="apply")
    pigments: list[str] = flag([], "what is in it", on_resume="apply")
    varnish: bool = flag(False, "seal it", on_resume="apply")
    varnish_hours: int = flag(12, "until it is dry", needs=["varnish"], on_resume="apply")
    sparkle: int = flag(0, "grains of mica a litre", needs=["varnish", "shade=dark"], on_resume="apply")

    def problems(self) -> list[str]:
        return ["--pigments: there are none"] if not self.pigments else []


@dataclass
class Brush:
    width: float | None = flag(None, "millimetres; default: as wide as the wall", above=0, on_resume="apply")

    def problems(self) -> list[str]:
        return []


@dataclass
class Paint:
    colour: Colour
    brush: Brush


def parsed(*argv: str, **options) -> Paint:
    return parse(Paint, ["--pigments", "ochre", *argv], description="paint", **options)


def mistakes(*argv: str, **options) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        parsed(*argv, **options)
    head, *lines = str(caught.value).split("\n  - ")
    assert head == f"{len(lines)} mistake{'s' if len(lines) > 1 else ''} in the settings of this run:"
    return lines


def test_defaults_types_lists_and_booleans():
    paint = parsed("--gloss", "0.25", "--pigments", "ochre", "umber", "--varnish", "--depth", "2")
    assert paint.colour == Colour(gloss=0.25, pigments=["ochre", "umber"], varnish=True, depth=2)
    assert paint.brush.width is None
    assert parsed("--varnish", "false", "--width", "3").brush.width == 3.0


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--shade", "green"], "--shade green: choose one of dark, light"),
        (["--depth", "4"], "--depth 4: choose one of 0, 1, 2"),
        (["--gloss", "1"], "--gloss 1.0: must be at least 0 and below 1"),
        (["--gloss", "-0.1"], "--gloss -0.1: must be at least 0 and below 1"),
        (["--gloss", "nan"], "--gloss nan: must be at least 0 and below 1"),
        (["--coats", "0"], "--coats 0: must be at least 1"),
        (["--width", "0"], "--width 0.0: must be above 0"),
        (["--coats", "many"], "--coats many: invalid int value: 'many'"),
        (["--varnish", "perhaps"], "--varnish perhaps: "),
        (["--glos", "0.1"], "--glos is not a flag of this step: did you mean --gloss?"),
        (["--glos=0.1"], "--glos is not a flag of this step: did you mean --gloss?"),
        (["--zzzzzz"], "--zzzzzz is not a flag of this step; --help lists them"),
        (["--coats"], "argument --coats: expected one argument"),
        (["--config"], "argument --config: expected one argument"),
        (["--coats", "2", "stray"], "stray: does not belong to any flag"),
        (["--config", "/nowhere/paint.yaml"], "--config /nowhere/paint.yaml: there is no such file"),
    ],
)
def test_a_mistake_is_reported_with_its_remedy(argv, message):
    (line,) = mistakes(*argv)
    assert line.startswith(message)


def test_all_mistakes_are_reported_together():
    def check(paint: Paint) -> list[str]:
        assert paint.colour.coats == 1 and paint.brush.width == 2  # the default in place of an invalid value
        return ["the wall is wet"]

    argv = ["--coats", "0", "--glos", "1", "--shade", "red", "--width", "2", "--depth", "x"]
    with pytest.raises(SettingsError) as caught:
        parse(Paint, argv, description="paint", check=check)
    lines = str(caught.value).splitlines()[1:]
    parts = ["--glos is not", "--shade red", "--depth x", "--coats 0", "--pigments: there are none", "wall is wet"]
    assert len(lines) == len(parts)
    for part in parts:
        assert sum(part in line for line in lines) == 1, (part, lines)


def test_a_missing_value_is_reported_together_with_earlier_mistakes():
    lines = mistakes("--shade", "red", "--coats")
    assert [line.split(":")[0] for line in lines] == ["--shade red", "argument --coats"]


def test_flags_override_the_yaml_file(tmp_path: Path):
    file = tmp_path / "paint.yaml"
    file.write_text("gloss: 0.25\ncoats: 3\npigments: [umber, sienna]\nvarnish: true\nwidth: null\n")
    paint = parse(Paint, ["--config", str(file), "--coats", "5"], description="paint")
    assert paint.colour == Colour(gloss=0.25, coats=5, pigments=["umber", "sienna"], varnish=True)
    assert paint.brush.width is None
    paint = parse(Paint, [f"--config={file}", "--pigments", "ochre"], description="paint")
    assert paint.colour.pigments == ["ochre"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("glos: 1", "--glos is not a flag of this step: did you mean --gloss?"),
        ("- gloss", "must contain lines of the form `flag: value`"),
        ("gloss: [", "not readable as YAML"),
        ("gloss: 7", "--gloss 7.0: must be at least 0 and below 1"),
    ],
)
def test_mistakes_in_the_yaml_file_are_reported_like_those_of_flags(text, message, tmp_path):
    file = tmp_path / "paint.yaml"
    file.write_text(text)
    (line,) = mistakes("--config", str(file))
    assert message in line


def test_a_flag_without_effect_warns_and_one_with_effect_does_not(capsys):
    parsed("--varnish_hours", "3")
    assert "warning: --varnish_hours 3 has no effect without --varnish" in capsys.readouterr().err
    parsed("--varnish_hours", "3", "--varnish")
    parsed("--varnish_hours", "12")
    assert capsys.readouterr().err == ""


def test_a_flag_may_need_a_value_of_another(capsys):
    parsed("--sparkle", "2", "--shade", "light")
    assert "warning: --sparkle 2 has no effect without --varnish or --shade dark\n" in capsys.readouterr().err
    parsed("--sparkle", "2", "--shade", "dark")
    parsed("--sparkle", "2", "--shade", "light", "--varnish")
    assert capsys.readouterr().err == ""


def test_warnings_about_settings_are_printed_on_rank_0_only(capsys, monkeypatch):
    def warn(paint: Paint) -> list[str]:
        coats, width = paint.colour.coats, paint.brush.width
        return [f"{coats} coats of a brush of {width} take their time"] if coats > 2 else []

    parsed("--coats", "3", "--width", "1", warn=warn)
    assert capsys.readouterr().err == "warning: 3 coats of a brush of 1.0 take their time\n"
    parsed("--coats", "2", warn=warn)
    monkeypatch.setenv("RANK", "1")
    parsed("--coats", "3", warn=warn)
    assert capsys.readouterr().err == ""


def test_help_lists_every_flag_with_its_help_text_and_default(capsys):
    with pytest.raises(SystemExit) as exited:
        parsed("--help")
    assert exited.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in (*dataclasses.fields(Colour), *dataclasses.fields(Brush)):
        assert f"--{field.name}" in text and field.metadata["help"] in text
    assert "(default: 0.5)" in text


def test_only_value_errors_become_settings_errors():
    with pytest.raises(SettingsError, match="too long"), as_settings_errors():
        raise ValueError("too long")
    with pytest.raises(SettingsError, match="^1 mistake"), as_settings_errors():
        raise_mistakes(["once"])
    with pytest.raises(KeyError), as_settings_errors():
        raise KeyError("an internal error")
    raise_mistakes([])
