"""Export the models of a finished run as Hugging Face folders; if that fails, print how to export them later."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from dschat.arguments import LoraArguments
from dschat.arguments.secrets import redacted
from dschat.checkpoints.selection import newest_checkpoint
from dschat.distributed import collectives, watchdog
from dschat.models.adapter_files import export_adapters, has_adapters
from dschat.models.weights import ExportError, export_model
from dschat.runs.model_card import write_model_card
from dschat.runs.signals import SignalFlag


class ExportFailed(SystemExit):
    """The models could not be written; the reason and the remedy have been printed."""

    def __init__(self) -> None:
        super().__init__(1)


def export_run(
    models: Mapping[str, nn.Module | None], output_dir: str | Path, tokenizer: PreTrainedTokenizerBase, *,
    signal_flag: SignalFlag, lora: LoraArguments | None = None, bases: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Export every model of a finished run, with its model card; a collective. Signals do not interrupt the export.

    Args:
        models: subfolder of output_dir ("" is output_dir itself) → module for export_model; None is skipped.
        signal_flag: its signal handlers have been installed since training began.
        lora, bases: with --export_adapters, the folder or hub name that each model with adapters was trained from.

    Raises:
        ExportFailed: on every rank, if a model cannot be written; its partial files are removed.
    """
    output_dir = Path(output_dir)
    signal_flag.reaction = "the model is exported first, then the run ends"
    watchdog.phase("export")
    for name, module in models.items():
        if module is None:
            continue
        base = (bases or {}).get(name) if lora is not None and lora.export_adapters and has_adapters(module) else None
        try:
            if base is not None:
                adapter = Path(name, "adapter")
                export_adapters(module, output_dir / adapter, tokenizer, base_model=base)
                write_model_card(output_dir / adapter, run_folder=output_dir, name=adapter.as_posix())
            if base is None or lora.export_adapters == "beside":
                export_model(module, output_dir / name, tokenizer)
                write_model_card(output_dir / name, run_folder=output_dir, name=name)
        except ExportError as error:
            if collectives.is_main():
                print(f"{error}. {export_instructions(output_dir, sys.argv)}", file=sys.stderr, flush=True)
            raise ExportFailed from None


def export_instructions(output_dir: str | Path, argv: Sequence[str]) -> str:
    """Instructions for exporting the models of a run later, from its last checkpoint; keys in URLs are redacted."""
    newest = newest_checkpoint(output_dir)
    if newest is None:
        return "There is no checkpoint (--save_interval, --save_minutes) to export it from later"
    command = list(argv)
    while "--resume" in command:
        position = command.index("--resume")
        del command[position : position + 2]
    command = [argument for argument in command if not argument.startswith("--resume=")]
    return (
        f"The last checkpoint is {newest}. Make room, then run this command, which resumes there and exports: "
        f"{redacted(shlex.join([*command, '--resume', 'auto']))}"
    )
