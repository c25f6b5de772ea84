"""Limits of a reward server."""

from dataclasses import dataclass, field
from typing import Any


def _limit(default: float, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Limits:
    """Limits of a server; requests beyond them are refused."""

    max_batch_rows: int = _limit(32, "conversations per batch")
    max_batch_tokens: int = _limit(32768, "tokens per batch, padding included; a longer conversation is its own batch")
    max_wait: float = _limit(0.01, "seconds that a conversation waits for others to join its batch")
    max_queue: int = _limit(4096, "conversations waiting for a batch; also the limit of open requests")
    max_rows: int = _limit(1024, "conversations per request")
    max_messages: int = _limit(8192, "messages per request, over all its conversations")
    max_characters: int = _limit(4 << 20, "characters per request, over all its conversations")
    max_body: int = _limit(8 << 20, "bytes per request")
    max_held: int = _limit(256 << 20, "bytes of all open requests together")
    max_read_seconds: float = _limit(30.0, "seconds for receiving the body of a request")
    max_header_seconds: float = _limit(
        15.0, "seconds for receiving the header of a request, and for sending a response"
    )
    max_connections: int = _limit(2048, "connections at a time")
    max_connections_per_client: int = _limit(1024, "connections at a time from one address")
