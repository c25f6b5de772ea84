"""HTTP server for a reward model: POST /score for the requests of reward_client, GET /health."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from aiohttp import web
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.chat_template import Message
from dschat.data.collators import collate_sft
from dschat.models.scalar_head import TokenScores
from dschat.rewards.reward_model import conversation_ids
from dschat.rewards.server.connections import Connections
from dschat.rewards.server.dynamic_batches import DynamicBatches, QueueFull

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Question:
    """A valid request: B prompts as chats, B responses, and which of these ended with an EOS."""

    messages: list[list[Message]]
    responses: list[str]
    ended: list[bool]


class TooLarge(ValueError):
    """A valid request that exceeds the size limits."""


class TextScorer:
    """Tokenises and scores conversations as RewardModel does.

    Args:
        model: network of a saved classifier, on its device.
        max_tokens: longer conversations are truncated on the left.
    """

    def __init__(self, model: TokenScores, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int) -> None:
        self.model, self.tokenizer, self.max_tokens = model.eval(), tokenizer, max_tokens
        self.device = next(model.parameters()).device

    def read(self, question: Question) -> list[Tensor]:
        """Token ids of each conversation, as int32: a fifth of a list's memory while queued.

        Raises: ValueError if the chat template rejects the messages.
        """
        return [
            torch.tensor(
                conversation_ids(self.tokenizer, chat, response, ended=ended, max_tokens=self.max_tokens),
                dtype=torch.int32,
            )
            for chat, response, ended in zip(question.messages, question.responses, question.ended, strict=True)
        ]

    @torch.inference_mode()
    def score(self, rows: Sequence[Tensor]) -> list[float]:
        """The score of each row of ids."""
        features = [{"input_ids": ids.tolist(), "loss_mask": [False] * len(ids)} for ids in rows]
        batch = collate_sft(features, pad_token_id=self.tokenizer.pad_token_id, pad_to_multiple_of=1)
        ids, attended = (batch[name].to(self.device) for name in ("input_ids", "attention_mask"))
        return self.model(ids, attended, whole_sequence=True).tolist()


def read_question(body: bytes, limits: Limits) -> Question:
    """Parse and validate a JSON body; unused fields are ignored.

    Raises:
        TooLarge: more messages or characters than the limits allow.
        ValueError: the body is invalid.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON ({type(error).__name__})") from error
    if not isinstance(fields, dict):
        raise ValueError('the body must be an object: {"messages": [[...], ...], "responses": ["...", ...]}')
    messages, responses = fields.get("messages"), fields.get("responses")
    if not (isinstance(responses, list) and responses and all(isinstance(text, str) for text in responses)):
        raise ValueError("responses must be a list of texts, at least one")
    if len(responses) > limits.max_rows:
        raise ValueError(f"{len(responses)} responses, but a request may have {limits.max_rows}: ask in parts")
    if not (isinstance(messages, list) and all(map(_is_chat, messages))):
        raise ValueError('messages must be a list of chats: [[{"role": "user", "content": "..."}], ...]')
    ended = fields.get("ended", [True] * len(responses))
    if not (isinstance(ended, list) and all(isinstance(value, bool) for value in ended)):
        raise ValueError("ended must be a list of true and false")
    if not len(messages) == len(responses) == len(ended):
        raise ValueError(
            f"{len(messages)} messages, {len(responses)} responses and {len(ended)} ended: they must be equally many"
        )
    _refuse_too_large(messages, responses, limits)
    # Only these two keys are passed to the chat template; others could change how it renders.
    chats = [[{name: message[name] for name in ("role", "content")} for message in chat] for chat in messages]
    try:
        json.dumps([chats, responses], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text holds half of a surrogate pair, which is no character") from error
    return Question(chats, responses, ended)


def _refuse_too_large(messages: list[list[Message]], responses: list[str], limits: Limits) -> None:
    """Refuse large requests: templating and tokenising time grows with size, and requests are read one by one."""
    count = sum(map(len, messages))
    if count > limits.max_messages:
        raise TooLarge(f"{count} messages, but a request may have {limits.max_messages}: ask in parts, or shorten")
    characters = sum(map(len, responses))
    characters += sum(len(message[name]) for chat in messages for message in chat for name in ("role", "content"))
    if characters > limits.max_characters:
        raise TooLarge(
            f"{characters} characters, but a request may have {limits.max_characters}: ask in parts, or shorten"
        )


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in value
    )


class RewardServer:
    """Handles requests: authenticates, validates, tokenises, queues and scores.

    Args:
        token: bearer token required of requests for scores; None: no authentication.

    Attributes:
        requests, held: number of open requests, and the bytes of their bodies.
    """

    def __init__(self, scorer: TextScorer, *, limits: Limits, token: str | None) -> None:
        self.scorer, self.limits, self.token = scorer, limits, token
        self.requests, self.held = 0, 0
        self.connections = Connections(
            most=limits.max_connections, most_per_client=limits.max_connections_per_client,
            seconds=limits.max_header_seconds,
        )  # fmt: skip
        self.batches = DynamicBatches(
            scorer.score, max_rows=limits.max_batch_rows, max_tokens=limits.max_batch_tokens,
            max_wait=limits.max_wait, max_queue=limits.max_queue,
        )  # fmt: skip
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reads")  # tokenizers are not thread-safe

    def app(self) -> web.Application:
        """The application to serve with `self.connections` (see connections.serve)."""
        app = web.Application(client_max_size=self.limits.max_body, middlewares=[self.connections.middleware()])
        app.add_routes([web.get("/health", self.health), web.post("/score", self.score)])
        app.cleanup_ctx.append(self._running)
        return app

    async def _running(self, _: web.Application) -> AsyncIterator[None]:
        worker = asyncio.create_task(self.batches.run())
        yield
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
        self._reader.shutdown()

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "requests": self.requests, "waiting": len(self.batches.waiting)})

    async def score(self, request: web.Request) -> web.Response:
        """Handle POST /score: scores, or a 4xx or 5xx error; bodies beyond the limits are refused before being read."""
        if not self.admits(request.headers.get("Authorization", "")):
            refusal = _error(401, "wrong or missing token: send Authorization: Bearer TOKEN")
            refusal.force_close()  # close unauthenticated connections
            return refusal
        size = request.content_length
        if size is not None and size > self.limits.max_body:
            return _error(413, f"{size} bytes, but a request may have {self.limits.max_body}: ask in parts")
        size = self.limits.max_body if size is None else size  # without Content-Length assume the maximum
        crowded = max(self.requests, len(self.batches.waiting)) >= self.limits.max_queue
        if crowded or self.held + size > self.limits.max_held:
            return _busy("too much is waiting")
        self.requests, self.held = self.requests + 1, self.held + size
        try:
            return await self._answer(request)
        finally:
            self.requests, self.held = self.requests - 1, self.held - size

    def admits(self, authorization: str) -> bool:
        """Whether the header has the right token; compared in constant time."""
        if self.token is None:
            return True
        return hmac.compare_digest(authorization.encode(errors="surrogateescape"), f"Bearer {self.token}".encode())

    async def _answer(self, request: web.Request) -> web.Response:
        loop = asyncio.get_running_loop()
        try:
            body = await asyncio.wait_for(request.read(), self.limits.max_read_seconds)
            rows = await loop.run_in_executor(self._reader, self._read, body)
        except asyncio.TimeoutError:
            return _error(408, f"the request did not arrive within {self.limits.max_read_seconds:g} s")
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"a request may have {self.limits.max_body} bytes: ask in parts")
        except TooLarge as mistake:
            return _error(413, str(mistake))
        except (ValueError, web.RequestPayloadError) as mistake:
            return _error(400, str(mistake))
        except ConnectionError:
            return _error(400, "the connection was lost")  # not received by the client
        try:
            scores = await self.batches.scores(rows)
        except QueueFull as full:
            return _busy(str(full))
        except Exception as fault:  # of model or device, such as out of memory: the next batch may succeed
            logger.exception("a batch could not be scored")
            return _error(500, f"scoring failed ({type(fault).__name__})")
        if not all(map(math.isfinite, scores)):
            return _error(500, "the model's scores are not finite")
        return web.json_response({"scores": scores})

    def _read(self, body: bytes) -> list[Tensor]:
        return self.scorer.read(read_question(body, self.limits))


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


def _busy(message: str) -> web.Response:
    return web.json_response({"error": f"{message}: ask again later"}, status=503, headers={"Retry-After": "1"})
