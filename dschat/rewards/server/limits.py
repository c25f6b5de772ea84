"""Limits of a reward server."""

from dataclasses import dataclass, field
from typing import Any


def _limit(default: float, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Limits:
    """Limits of a server; requests beyond them are refused."""

    max_batch_rows: int = _limit(32, "conversations of a batch")
    max_batch_tokens: int = _limit(32768, "tokens of a batch, padding included; a longer conversation goes alone")
    max_wait: float = _limit(0.01, "seconds that a conversation waits for others")
    max_queue: int = _limit(4096, "conversations that may wait for a batch, and requests that may be unanswered")
    max_rows: int = _limit(1024, "conversations of a request")
    max_messages: int = _limit(8192, "messages of a request, all its conversations together")
    max_characters: int = _limit(4 << 20, "characters of a request's conversations, all together")
    max_body: int = _limit(8 << 20, "bytes of a request")
    max_held: int = _limit(256 << 20, "bytes of all requests that are unanswered")
    max_read_seconds: float = _limit(30.0, "seconds that the body of a request may take to arrive")
    max_header_seconds: float = _limit(
        15.0, "seconds that a connection may take to bring the header of a request, or to take an answer"
    )
    max_connections: int = _limit(2048, "connections at a time")
    max_connections_per_client: int = _limit(1024, "connections at a time from one address")
