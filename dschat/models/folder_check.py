"""A model's folder, checked before anything is loaded from it: its JSON files, and its config against its weights."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from jinja2 import TemplateSyntaxError
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dschat.arguments.strict_json import read_json_object
from dschat.distributed.terminal import quoted

JSON_FILES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json",
    "added_tokens.json", "adapter_config.json",
)  # fmt: skip
MAX_LAYERS = 10_000
MARKER = "abc"  # content of a user message, searched for in the rendered text
LEGACY_NAMES = ("gamma", "beta", "weight_g", "weight_v")  # which transformers renames for every model
_NON_CAUSAL_HEADS = ("Classification", "QuestionAnswering", "MultipleChoice", "MaskedLM", "SentencePrediction")


def json_problems(folder: Path) -> list[str]:
    """A line for each JSON file of the folder that cannot be read."""
    problems = []
    for name in JSON_FILES:
        if (folder / name).exists():
            try:
                read_json_object(folder / name, constants=True)  # limits of some configs are Infinity
            except ValueError as error:
                problems.append(f"{error}: download the file again")
    return problems


def causal_problems(config: PreTrainedConfig) -> list[str]:
    """Why a model of this config cannot generate text; [] if it can."""
    names = config.architectures or []
    non_causal = [name for name in names if any(kind in name for kind in _NON_CAUSAL_HEADS)]
    if non_causal:
        return [f"is a {non_causal[0]}, which does not generate text: choose a causal language model"]
    custom = getattr(config, "auto_map", None)
    if config.is_encoder_decoder or (config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not custom):
        return [f"{config.model_type} models are not causal language models: choose one that generates text"]
    return []


def config_problems(folder: Path) -> list[str]:
    """A missing config.json, and values in it that transformers would misread, or reject without a clear message."""
    path = folder / "config.json"
    if (folder / "adapter_config.json").exists():
        return [f"{folder} holds a PEFT adapter, not a full model: merge it into its base model "
                "(merge_and_unload, then save_pretrained), and use that folder"]  # fmt: skip
    if not path.is_file():
        return ["no model configuration: the folder has no config.json; name one that save_pretrained wrote "
                "(a run exports its model when it ends)"]  # fmt: skip
    config, problems = read_json_object(path, constants=True), []
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        problems.append(f"architectures is {quoted(names)}, and must be a list of class names")
    layers = config.get("num_hidden_layers", 1)
    if isinstance(layers, int) and not 1 <= layers <= MAX_LAYERS:
        problems.append(f"num_hidden_layers is {layers}, and must be from 1 to {MAX_LAYERS}")
    quantization = config.get("quantization_config")
    if quantization is not None and not (isinstance(quantization, dict) and quantization.get("quant_method")):
        problems.append(f"quantization_config is {quoted(quantization)}, and must be an object with a quant_method")
    for name, value in config.items():
        if name.endswith(("dropout", "pdrop")) and isinstance(value, (int, float)) and not 0 <= value < 1:
            problems.append(f"{name} is {value}, and must be at least 0 and below 1")
    return [f"{path}: {problem}: download the file again" for problem in problems]


def generation_problems(folder: Path) -> list[str]:
    """Why transformers rejects the folder's generation_config.json; [] if it is valid or missing."""
    if not (folder / "generation_config.json").is_file():
        return []
    path, remedy = folder / "generation_config.json", "fix the value, or remove the file"
    try:
        ids = GenerationConfig.from_dict(read_json_object(path, constants=True)).eos_token_id
    except Exception as error:  # any of its many checks: loading the model would fail too
        return [f"{path}: {one_line(error)}: {remedy}"]
    if not all(isinstance(token, int) for token in (ids if isinstance(ids, list) else [ids or 0])):
        return [f"{path}: eos_token_id is {quoted(ids)}, and must be a token id or a list of them: {remedy}"]
    return []


def shape_problems(folder: Path, config: PreTrainedConfig, *, new_head: bool = False) -> list[str]:
    """Where the config contradicts the headers of the folder's safetensors files.

    The model is built without memory (on the meta device), as transformers does when it loads it. Not checked here
    are parameters under other names in the files, quantised ones, and models with custom code.

    Args:
        new_head: parameters outside the backbone may be missing, as a head is added.
    """
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    stored = _stored_tensors(folder)
    if not stored or not isinstance(architecture, type) or getattr(config, "quantization_config", None):
        return []
    stored_layers, layers = _layer_counts(stored), getattr(config.get_text_config(), "num_hidden_layers", 0) or 0
    if 0 < max(stored_layers.values(), default=0) < layers:  # before building it, which could take a million layers
        return [
            f"config.json contradicts the weights: num_hidden_layers is {layers}, and the files hold "
            f"{max(stored_layers.values())} layers: take both from the same model"
        ]
    try:
        with torch.device("meta"):
            model = architecture(config)
            expected = {name: list(value.shape) for name, value in model.state_dict().items()}
    except Exception as error:  # any error of the architecture's own code: loading would fail too
        return [f"no model can be built from config.json ({type(error).__name__}: {one_line(error)})"]
    differing = [name for name in sorted(expected) if name in stored and stored[name].shape != expected[name]]
    if differing:
        name, more = differing[0], f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        return [
            f"config.json contradicts the weights: {name} has shape {stored[name].shape} in the files and "
            f"{expected[name]} by the config{more}: take both from the same model"
        ]
    return (
        _unused_layers(model, expected, stored_layers, layers)
        or _integer_weights(expected, stored)
        or _missing_parameters(folder, model, stored, new_head=new_head)
    )


def _unused_layers(
    model: PreTrainedModel, expected: dict[str, list[int]], stored: dict[str, int], layers: int
) -> list[str]:
    """Layers in the files that the config does not use, except those for multi-token prediction."""
    extra = getattr(model.config.get_text_config(), "num_nextn_predict_layers", 0) or 0
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    for prefix, built in _layer_counts(expected).items():
        count = stored.get(prefix, 0)
        unexpected = not any(re.search(pattern, f"{prefix}.{built}.weight") for pattern in ignored)
        if count > built + extra and built == layers and unexpected:
            return [
                f"config.json contradicts the weights: num_hidden_layers is {layers}, and the files hold {count} "
                f"layers ({prefix}.0 to {prefix}.{count - 1}): take both from the same model"
            ]
    return []


def _integer_weights(expected: dict[str, list[int]], stored: dict[str, StoredTensor]) -> list[str]:
    integers = [name for name in sorted(expected) if name in stored and stored[name].dtype[0] in "IUB"
                and stored[name].dtype != "BF16" and name.endswith(("weight", "bias"))]  # fmt: skip
    if not integers:
        return []
    return [
        f"{integers[0]} is stored as {stored[integers[0]].dtype} (integers), and config.json has no "
        "quantization_config to decode them: take both from the same model"
    ]


def _missing_parameters(
    folder: Path, model: PreTrainedModel, stored: dict[str, StoredTensor], *, new_head: bool
) -> list[str]:
    """Parameters missing from all files; only for architectures that transformers loads without renaming."""
    legacy = any(name.endswith(LEGACY_NAMES) for name in stored)
    if legacy or get_model_conversion_mapping(model, add_legacy=False):
        return []
    backbone = f"{model.base_model_prefix}."
    stored_names = {name.removeprefix(backbone) for name in stored}
    names: dict[int, list[str]] = {}  # of each parameter; tied ones have several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    optional = getattr(model, "_keys_to_ignore_on_load_missing", None) or []
    missing = [
        tied_names[0]
        for tied_names in names.values()
        if not any(name.removeprefix(backbone) in stored_names for name in tied_names)
        and not any(re.search(pattern, name) for pattern in optional for name in tied_names)
        and not (new_head and not tied_names[0].startswith(backbone))
    ]
    if not missing:
        return []
    return [
        f"the weights in {folder} lack {len(missing)} parameters of {type(model).__name__} ({', '.join(missing[:3])}"
        f"{', …' if len(missing) > 3 else ''}), which would be random: choose a complete model of this kind"
    ]


def template_problems(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Why the chat template cannot render a conversation, or the tokenizer cannot encode it; [] if both work.

    Some templates require a system prompt or an answer: one conversation that can be rendered is enough.
    """
    if not isinstance(tokenizer.model_max_length, (int, float)):
        return [f"model_max_length in tokenizer_config.json is {quoted(tokenizer.model_max_length)}, and must be a "
                "number: fix it, or remove it"]  # fmt: skip
    user, answer = {"role": "user", "content": MARKER}, {"role": "assistant", "content": "b"}
    reasons, rendered = [], []
    for messages in ([user], [user, answer], [{"role": "system", "content": "s"}, user]):
        try:
            rendered.append(tokenizer.apply_chat_template(messages, tokenize=False))
        except TemplateSyntaxError as error:
            return [
                f"the chat template is not valid Jinja (line {error.lineno}: {one_line(error.message)}): fix it"
            ]
        except Exception as error:  # of the template's own expressions
            reasons.append(one_line(error))
    if not rendered:
        return [f"the chat template cannot render a conversation, not even one user message ({reasons[0]}): fix it"]
    if not any(MARKER in text for text in rendered):
        return ["the chat template omits the user's message: fix it, or download it again"]
    try:
        tokenizer(rendered[0], add_special_tokens=False)
    except Exception as error:  # the tokenizers package has no error type of its own
        return [f"the tokenizer cannot encode a conversation ({one_line(error)}): download its files again"]
    return []


def one_line(error: object) -> str:
    """The message of an error of any library, on one line of readable length."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}…"


class StoredTensor(NamedTuple):
    shape: list[int]
    dtype: str  # as safetensors names it


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors in readable safetensors files; damaged ones are reported by weight_problems."""
    tensors = {}
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                tensors |= {name: StoredTensor(part.get_shape(), part.get_dtype()) for name, part in slices.items()}
        except (SafetensorError, OSError):
            return {}
    return tensors


def _layer_counts(names: Iterable[str]) -> dict[str, int]:
    """Prefix of a list of layers, such as "model.layers" → the number of layers in it."""
    counts: dict[str, int] = {}
    for name in names:
        if match := re.match(r"((?:.*\.)?(?:layers|h|blocks?))\.(\d+)\.", name):
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    return counts
