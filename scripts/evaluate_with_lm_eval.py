"""Evaluate an exported model on benchmarks with EleutherAI's lm-eval, with the model's chat template.

    python scripts/evaluate_with_lm_eval.py FOLDER --tasks gsm8k ifeval [--limit 100] [option of `lm_eval run` ...]

FOLDER is an exported causal language model, or a folder of adapters, whose base model is loaded too. Options that this
script does not have go to lm-eval. Results are written to FOLDER/lm_eval, or where --output_path says. Needs lm-eval:
pip install -e ".[lm-eval]".
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

from dschat.arguments.models import TRUST_HELP
from dschat.arguments.script_inputs import existing_folder, exit_on_mistake
from dschat.arguments.strict_json import read_json_object

ADAPTER, MODEL = "adapter_config.json", "config.json"


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=existing_folder, help="exported model, or adapters")
    parser.add_argument("--tasks", nargs="+", required=True, help="names of lm-eval's tasks (lm_eval ls tasks)")
    parser.add_argument("--dtype", default="auto", help="of the weights; default: that of the files")
    parser.add_argument("--batch_size", default="8", help="a number, or auto (on a GPU)")
    parser.add_argument("--output_path", type=Path, help="folder or JSON file of the results; default: FOLDER/lm_eval")
    parser.add_argument("--no_chat_template", action="store_true", help="give the model the plain text of the tasks")
    parser.add_argument("--trust_remote_code", action="store_true", help=TRUST_HELP)
    return parser.parse_known_args(arguments)


def model_arguments(folder: Path, *, dtype: str) -> list[str]:
    """lm-eval's --model_args for an exported folder.

    Raises:
        ValueError: the folder has no causal language model, its adapters name no base model, or lm-eval would split
            its path.
    """
    if (folder / ADAPTER).is_file():
        config = read_json_object(folder / ADAPTER, constants=True)
        base, is_causal = config.get("base_model_name_or_path"), config.get("task_type") == "CAUSAL_LM"
        if not base:
            raise ValueError(f"{folder}: its {ADAPTER} names no base model: set base_model_name_or_path there")
        values = {"pretrained": base, "peft": folder, "tokenizer": folder}
    elif (folder / MODEL).is_file():
        architectures = read_json_object(folder / MODEL, constants=True).get("architectures") or []
        is_causal = not any(name.endswith("ForSequenceClassification") for name in architectures)
        values = {"pretrained": folder}
    else:
        raise ValueError(f"{folder}: has neither {MODEL} nor {ADAPTER}: name the folder of an exported model")
    if not is_causal:
        raise ValueError(f"{folder}: is a reward model or critic, which writes no text: name a causal language model")
    for value in values.values():
        if "," in str(value):
            raise ValueError(f"{value}: lm-eval splits paths at commas: rename the folder")
    return [f"{name}={value}" for name, value in (values | {"dtype": dtype}).items()]


def command_of(options: argparse.Namespace, others: list[str]) -> list[str]:
    """The command that runs lm-eval. Raises ValueError as `model_arguments`."""
    flags = [] if options.no_chat_template else ["--apply_chat_template"]
    flags += ["--trust_remote_code"] if options.trust_remote_code else []
    return [
        sys.executable, "-m", "lm_eval", "run", "--model", "hf",
        "--model_args", *model_arguments(options.folder, dtype=options.dtype), "--tasks", *options.tasks,
        "--batch_size", options.batch_size, "--output_path", str(options.output_path or options.folder / "lm_eval"),
        *flags, *others,
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options, others = parse(arguments)
    with exit_on_mistake("evaluate_with_lm_eval"):
        command = command_of(options, others)
        if importlib.util.find_spec("lm_eval") is None:
            raise ValueError('lm-eval is not installed: pip install -e ".[lm-eval]" or bash scripts/install.sh lm-eval')
    print(f"$ {shlex.join(command)}", flush=True)
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
