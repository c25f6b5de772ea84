"""Merge LoRA adapters of a PEFT folder into their base model, which gives a plain Hugging Face folder to train from.

    python scripts/merge_adapters.py ADAPTERS OUTPUT_DIR [--base FOLDER]

ADAPTERS is a folder with adapter_config.json, as PEFT, TRL and --export_adapters write them. A trained scalar head that
is stored with them is merged too. Everything runs on the CPU, adapters are added in float32.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from dschat.arguments.models import TRUST_HELP
from dschat.arguments.script_inputs import exit_on_mistake
from dschat.models.adapter_files import CONFIG_FILE
from dschat.models.causal_lm import load_tokenizer
from dschat.models.weights import export_model


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapters", type=Path, help="PEFT folder")
    parser.add_argument("output_dir", type=Path, help="folder of the merged model")
    parser.add_argument("--base", help="folder or hub name of the base model; default: the one named in the adapters")
    parser.add_argument("--trust_remote_code", action="store_true", help=TRUST_HELP)
    return parser.parse_args(arguments)


def merged_model(adapters: Path, base: str, *, trust_remote_code: bool) -> PreTrainedModel:
    """The base model, in the dtype of its files, with the adapters folded into its weights."""
    is_classifier = PeftConfig.from_pretrained(adapters).task_type == "SEQ_CLS"
    auto = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    labels = {"num_labels": 1} if is_classifier else {}
    model = auto.from_pretrained(base, dtype="auto", trust_remote_code=trust_remote_code, **labels)
    dtype = model.dtype
    peft = PeftModel.from_pretrained(model.float(), adapters)
    return peft.merge_and_unload().to(dtype)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    with exit_on_mistake("merge_adapters"):
        if not (options.adapters / CONFIG_FILE).is_file():
            raise ValueError(f"{options.adapters}: is not a PEFT folder: it has no {CONFIG_FILE}")
        if options.output_dir.exists() and any(options.output_dir.iterdir()):
            raise ValueError(f"{options.output_dir}: is not empty: name a new folder")
        base = options.base or PeftConfig.from_pretrained(options.adapters).base_model_name_or_path
        if not base:
            raise ValueError(f"{options.adapters}: does not name its base model: give it with --base")
        model = merged_model(options.adapters, base, trust_remote_code=options.trust_remote_code)
        has_tokenizer = (options.adapters / "tokenizer_config.json").is_file()
        tokenizer = load_tokenizer(
            str(options.adapters) if has_tokenizer else base, trust_remote_code=options.trust_remote_code
        )
        with torch.no_grad():
            export_model(model, options.output_dir, tokenizer)
        print(f"{base} with {options.adapters} → {options.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
