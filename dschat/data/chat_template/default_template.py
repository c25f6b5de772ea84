"""The Human/Assistant chat template that a tokenizer without one gets."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

# The generation prompt ends with ":" and the space belongs to the response: " Yes" is one token in most
# vocabularies, so ids(prompt) stays a prefix of ids(prompt + response).
_TURNS = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{{- message['content'] -}}
{%- elif message['role'] == 'user' -%}
{{- '\\n\\nHuman: ' + message['content'] -}}
{%- elif message['role'] == 'assistant' -%}
{{- '\\n\\nAssistant: ' + message['content'] + eos_token -}}
{%- elif message['role'] == 'tool' -%}
{{- '\\n\\nTool: ' + message['content'] -}}
{%- else -%}
{{- raise_exception('unknown role: ' + message['role']) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '\\n\\nAssistant:' -}}
{%- endif -%}
"""
_BOS = "{{- bos_token -}}\n"


def ensure_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Install a Human/Assistant chat template if the tokenizer has none; `save_pretrained` then saves it.

    The text is "<system>\\n\\nHuman: …\\n\\nAssistant: …<eos>", preceded by BOS where the tokenizer adds one to
    plain text. This is the only function here that modifies its argument.

    Returns:
        True if a template was installed, False if the tokenizer had one.

    Raises:
        ValueError: the tokenizer has no EOS token, so no response could end.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer {tokenizer.name_or_path!r} has no EOS token, so a response could never end: "
            "set one (--add_eot_token adds '<|endoftext|>'), or choose a model whose tokenizer has one."
        )
    if tokenizer.chat_template:
        return False
    begins_with_bos = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    tokenizer.chat_template = (_BOS if begins_with_bos else "") + _TURNS
    return True
