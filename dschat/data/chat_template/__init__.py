"""Chat templates: messages → token ids, and which of the tokens are trained.

conversations (prompts, conversations, answers, plain text; decoding) -> rendering (text of a template) and
assistant_turns (where each answer starts); control_tokens (their strings inside contents stay text), thoughts
(templates that open a thought), stop_tokens (what ends a response), default_template (for tokenizers without one).
"""

from .conversations import decode_responses, encode_answer, encode_conversation, encode_prompt, encode_text
from .default_template import ensure_chat_template
from .rendering import Message, Tools
from .stop_tokens import end_of_turn_id, stop_token_ids

__all__ = [
    "Message",
    "Tools",
    "decode_responses",
    "encode_answer",
    "encode_conversation",
    "encode_prompt",
    "encode_text",
    "end_of_turn_id",
    "ensure_chat_template",
    "stop_token_ids",
]
