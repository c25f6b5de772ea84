"""What a model card says about the origin of a model: method, base model and data sources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dschat.data.sources.data_path import parse_data_path
from dschat.data.sources.hub_datasets import hub_dataset
from dschat.data.sources.reasoning_gym import PREFIX

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]*[A-Za-z0-9])?")
_FRONT_MATTER = re.compile(r"---\n(.*?)\n---(\n|$)", re.DOTALL)
_LICENSE = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class Method:
    """How a model was trained, for title, first sentence and tags of its card."""

    name: str
    product: str
    description: str
    tags: tuple[str, ...]


def method_of(program: str, arguments: Mapping[str, Any], name: str) -> Method:
    """The method of a run's model.

    Args:
        program: its name in run.json.
        name: as for `write_model_card`.
    """
    if program == "step1_supervised_finetuning":
        return Method("SFT", "A causal language model.", "supervised fine-tuning", ("sft",))
    if program == "step2_reward_model_finetuning":
        return Method(
            "reward model", "A reward model: one output, the score of a conversation at its last token.",
            "the pairwise (Bradley–Terry) loss", ("reward-model",),
        )  # fmt: skip
    if program == "step2_dpo_finetuning":
        loss = arguments["preference_loss"]
        return Method(loss.upper(), "A causal language model.", f"preference optimisation ({loss})", (loss,))
    algorithm = arguments["algorithm"]
    products = {
        "critic": "The critic of an RLHF run: one output, the value of the state after the last token.",
        "actor_ema": "A causal language model: the moving average of the actor of an RLHF run.",
    }
    product = products.get(name.split("/")[0], "A causal language model: the actor of an RLHF run.")
    role = {"critic": "critic of ", "actor_ema": "averaged actor of "}.get(name.split("/")[0], "")
    return Method(f"{role}{algorithm}", product, f"RLHF ({algorithm})", ("rlhf", algorithm))


def trained_from(arguments: Mapping[str, Any], name: str) -> str:
    """Folder or hub name of the model that a run's model was initialised from; `name` as for `write_model_card`."""
    if "actor_model_name_or_path" not in arguments:
        return arguments["model_name_or_path"]
    flags = ["critic_model_name_or_path", "reward_model_name_or_path"] if name.split("/")[0] == "critic" else []
    return next(arguments[flag] for flag in [*flags, "actor_model_name_or_path"] if arguments.get(flag))


def hub_name(path: str) -> str | None:
    """The path if it is a name on the hub, None if it is a local folder."""
    is_name = _HUB_NAME.fullmatch(path) and not Path(path).expanduser().exists()
    return path if is_name else None


def base_metadata(base: str, *, is_adapter: bool) -> dict[str, Any]:
    """base_model, its relation and the license, as far as they are known, for the front matter of a card.

    The base model of a local folder, and its license, are those that the card in that folder names.
    """
    metadata = {} if hub_name(base) else _front_matter(Path(base).expanduser() / "README.md")
    root = base if hub_name(base) else metadata.get("base_model")
    relation = "adapter" if is_adapter and root == base else "finetune"
    named = {"base_model": root, "base_model_relation": relation} if root else {}
    return named | {key: metadata[key] for key in _LICENSE if key in metadata}


def _front_matter(card: Path) -> dict[str, Any]:
    """The YAML at the beginning of a card; {} without a card, or if it is not valid."""
    if not card.is_file():
        return {}
    match = _FRONT_MATTER.match(card.read_text(encoding="utf-8", errors="replace"))
    try:
        content = yaml.safe_load(match[1]) if match else {}
    except yaml.YAMLError:
        return {}
    return content if isinstance(content, dict) else {}


def hub_data_sets(arguments: Mapping[str, Any]) -> list[str]:
    """The entries of --data_path and --eval_data_path that are names on the hub, or local copies of such data sets."""
    entries = [*(arguments.get("data_path") or []), *(arguments.get("eval_data_path") or [])]
    return list(dict.fromkeys(name for name in map(_hub_data_set, entries) if name))


def _hub_data_set(entry: str) -> str | None:
    (path,), _ = parse_data_path([entry])
    if path.startswith(PREFIX):
        return None
    dataset, target = hub_dataset(path)
    if target != path:
        path = path.partition("=")[0]  # "openai/gsm8k=PATH": a local copy
    elif hub_name(path) is None:
        return None
    return path if dataset is None else dataset.hub or path
