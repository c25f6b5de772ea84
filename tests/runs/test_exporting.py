"""The instructions after a failed export."""

from dschat.runs.exporting import export_instructions


def test_the_command_that_exports_later_resumes_and_holds_no_key(tmp_path):
    argv = ["main.py", "--resume", "never", "--reward", "http://host/score?api_key=SECRET&n=2@0.5", "--seed", "1"]
    assert export_instructions(tmp_path, argv).startswith("There is no checkpoint")
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    text = export_instructions(tmp_path, argv)
    assert "step-00000003" in text and text.endswith("'http://host/score?api_key=***&n=2@0.5' --seed 1 --resume auto")
