"""A model's folder, checked before anything is loaded from it: its JSON files, and its config against its weights."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import transformers
from jinja2 import TemplateSyntaxError
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dschat.arguments.strict_json import read_json_object

JSON_FILES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json",
    "added_tokens.json",
)  # fmt: skip
_NO_GENERATORS = ("Classification", "QuestionAnswering", "MultipleChoice", "MaskedLM", "SentencePrediction")


def json_problems(folder: Path) -> list[str]:
    """A line for each JSON file of the folder that cannot be read."""
    problems = []
    for name in JSON_FILES:
        if (folder / name).exists():
            try:
                read_json_object(folder / name, constants=True)  # limits of some configs are Infinity
            except ValueError as error:
                problems.append(f"{error}: get the file anew")
    return problems


def causal_problems(config: PreTrainedConfig) -> list[str]:
    """Why a model of this config does not continue text; [] if it may."""
    names = config.architectures or []
    non_causal = [name for name in names if any(kind in name for kind in _NO_GENERATORS)]
    if non_causal:
        return [f"is a {non_causal[0]}, which does not continue text: name a causal language model"]
    custom = getattr(config, "auto_map", None)
    if config.is_encoder_decoder or (config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not custom):
        return [f"{config.model_type} models are no decoders that continue text: name a causal language model"]
    return []


def shape_problems(folder: Path, config: PreTrainedConfig) -> list[str]:
    """Where the config contradicts the headers of the folder's safetensors files.

    The model is built without memory (on the meta device), as transformers does when it loads it. Parameters that have
    other names in the files, quantised ones, and models of custom code are left to the loading.
    """
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    shapes = _stored_shapes(folder)
    if not shapes or not isinstance(architecture, type) or getattr(config, "quantization_config", None):
        return []
    try:
        with torch.device("meta"):
            expected = {name: list(value.shape) for name, value in architecture(config).state_dict().items()}
    except Exception as error:  # of the architecture's own code: whatever it is, loading would end with it
        return [f"config.json describes no model that can be built ({type(error).__name__}: {one_line(error)})"]
    differing = [name for name in sorted(expected) if name in shapes and shapes[name] != expected[name]]
    if differing:
        name, more = differing[0], f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        return [
            f"config.json contradicts the weights: {name} has shape {shapes[name]} in the files and {expected[name]} "
            f"by the config{more}: get both from one place"
        ]
    layers, stored = getattr(config.get_text_config(), "num_hidden_layers", 0) or 0, _stored_layers(shapes)
    if 0 < stored < layers:
        return [
            f"config.json contradicts the weights: num_hidden_layers is {layers}, and the files hold {stored} layers"
        ]
    return []


def template_problems(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A syntax error of the tokenizer's chat template; what it refuses to render is found with the rows."""
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateSyntaxError as error:
        return [f"the chat template is no valid Jinja (line {error.lineno}: {one_line(error.message)}): mend it there"]
    except Exception:  # of the template itself: another conversation may please it
        return []
    return []


def one_line(error: object) -> str:
    """The message of an error of any library, on one line of readable length."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}…"


def _stored_shapes(folder: Path) -> dict[str, list[int]]:
    """Name → shape of the tensors in readable safetensors files; damaged ones are reported by weight_problems."""
    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError):
            return {}
    return shapes


def _stored_layers(shapes: dict[str, list[int]]) -> int:
    matches = [re.search(r"(?:^|\.)(?:layers|h|blocks?)\.(\d+)\.", name) for name in shapes]
    return max((int(match[1]) + 1 for match in matches if match), default=0)
