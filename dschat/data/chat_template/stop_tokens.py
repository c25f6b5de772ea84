"""Tokens that end a response: the tokenizer's EOS and the end of turn that its chat template writes."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from .rendering import ChatRenderer

PROBE = "Xqprobeqx"  # no template changes it: no spaces, no markup


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The first special token that the template writes after an assistant's text; None if it writes none.

    Determined by rendering a probe: "<|im_end|>\\n" after the probe gives the id of <|im_end|>.
    """
    turn = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
    renderer = ChatRenderer.of(tokenizer, turn)
    after = renderer.conversation(turn).rpartition(PROBE)[2]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return next((i for i in renderer.ids(after) if i in special), None)


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config_eos: int | Iterable[int] | None = None
) -> list[int]:
    """Ids that end a response: the tokenizer's EOS, the template's end of turn, the model's generation config."""
    if generation_config_eos is None:
        configured: list[int] = []
    elif isinstance(generation_config_eos, int):
        configured = [generation_config_eos]
    else:
        configured = list(generation_config_eos)
    end_id = end_of_turn_id(tokenizer) if tokenizer.chat_template else None
    return list(dict.fromkeys(i for i in (tokenizer.eos_token_id, end_id, *configured) if i is not None))
