"""Small checkpoints without engines, for tests of saving, selection and loading."""

from pathlib import Path

from dschat.checkpoints.saving import save_checkpoint


def save(output: Path, step: int, *, keep: int = 10, text: str = "weights " * 50) -> Path:
    """Save a checkpoint with one file of its own, model.bin."""
    return save_checkpoint(
        output, step, engines={}, state={"step": step, "rows": 7}, keep=keep,
        extra_writer=lambda folder: (folder / "model.bin").write_text(text),
    )  # fmt: skip


def checkpoint_names(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())
