"""The code block of a model card that loads the model and runs it once."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dschat.arguments.strict_json import read_json_object
from dschat.data.chat_template import encode_answer
from dschat.models.tokenizer import load_tokenizer

FOLDER_LINE = 'folder = "."  # the folder of this file, or its name on the hub'
_TEXT = [{"role": "user", "content": "What is 2 plus 3?"}]
_ANSWER = "It is 5."

_BASE = """\
base = {auto}.from_pretrained(PeftConfig.from_pretrained(folder).base_model_name_or_path{options})
model = PeftModel.from_pretrained(base, folder)
"""
_GENERATE = """\
messages = [{"role": "user", "content": "What is 2 plus 3?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**inputs, max_new_tokens=64)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
"""
_SCORE = """\
messages = [{{"role": "user", "content": "What is 2 plus 3?"}}, {{"role": "assistant", "content": "It is 5."}}]
text = tokenizer.apply_chat_template(messages, tokenize=False){ending}
ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
model.config.get_text_config().pad_token_id = None  # one conversation has no padding: its last token is the score's
score = model(ids).logits[0, 0].item()
print(score)
"""


def loading_example(folder: Path, *, is_adapter: bool, classifier: bool, trust_remote_code: bool) -> str:
    """Python code that loads the model of an exported folder, and generates a response or scores a conversation.

    Args:
        is_adapter: the folder has adapters of PEFT, whose base model is loaded first.
        classifier: the model has one output.
        trust_remote_code: of the run; the code sets it if the folder's config names custom code.
    """
    auto = "AutoModelForSequenceClassification" if classifier else "AutoModelForCausalLM"
    config = folder / "config.json"
    has_code = config.is_file() and "auto_map" in read_json_object(config, constants=True)
    options = ", trust_remote_code=True" if trust_remote_code and (has_code or is_adapter) else ""
    peft = "from peft import PeftConfig, PeftModel\n" if is_adapter else ""
    if is_adapter:
        labels = ", num_labels=1" if classifier else ""
        load = _BASE.format(auto=auto, options=f"{labels}{options}")
    else:
        load = f"model = {auto}.from_pretrained(folder{options})\n"
    ending = ""
    if classifier:
        ending = _ending(load_tokenizer(str(folder), trust_remote_code=trust_remote_code))
    return (
        f"{peft}from transformers import {auto}, AutoTokenizer\n\n{FOLDER_LINE}\n"
        f"tokenizer = AutoTokenizer.from_pretrained(folder{options})\n{load}"
        + (_SCORE.format(ending=ending) if classifier else _GENERATE)
    )


def _ending(tokenizer: PreTrainedTokenizerBase) -> str:
    """What makes a rendered conversation end where training ended it: at its end-of-turn token."""
    text = tokenizer.apply_chat_template([*_TEXT, {"role": "assistant", "content": _ANSWER}], tokenize=False)
    prompt, answer = encode_answer(tokenizer, _TEXT, _ANSWER)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if ids == prompt + answer:
        return ""
    end = tokenizer.convert_ids_to_tokens(answer[-1])
    before, found, rest = text.rpartition(end)
    if found and _ANSWER in before:
        return f".removesuffix({rest!r})  # the score is read at {end}"
    return f".rstrip() + {end!r}  # the score is read at {end}"
