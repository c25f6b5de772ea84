"""HTTP server for a reward model: POST /score for the requests of reward_client, GET /health."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web
from torch import Tensor

from dschat.rewards.server.connections import Connections
from dschat.rewards.server.dynamic_batches import DynamicBatches, QueueFull
from dschat.rewards.server.limits import Limits
from dschat.rewards.server.score_request import TooLarge, parse_score_request
from dschat.rewards.server.text_scorer import TextScorer

logger = logging.getLogger(__name__)


class RewardServer:
    """Handles requests: authenticates, validates, tokenises, queues and scores.

    Args:
        token: bearer token required of requests for scores; None: no authentication.

    Attributes:
        open_requests, open_bytes: number of open requests, and the bytes of their bodies.
    """

    def __init__(self, scorer: TextScorer, *, limits: Limits, token: str | None) -> None:
        self.scorer, self.limits, self.token = scorer, limits, token
        self.open_requests, self.open_bytes = 0, 0
        self.connections = Connections(
            max_connections=limits.max_connections, max_per_client=limits.max_connections_per_client,
            seconds=limits.max_header_seconds,
        )  # fmt: skip
        self.batches = DynamicBatches(
            scorer.score, max_rows=limits.max_batch_rows, max_tokens=limits.max_batch_tokens,
            max_wait=limits.max_wait, max_queue=limits.max_queue,
        )  # fmt: skip
        self._tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")  # tokenizers are not thread-safe

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
        self._tokenizer_thread.shutdown()

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "requests": self.open_requests, "waiting": len(self.batches.waiting)})

    async def score(self, request: web.Request) -> web.Response:
        """Handle POST /score: scores, or a 4xx or 5xx error; bodies beyond the limits are refused before being read."""
        if not self.is_authorized(request.headers.get("Authorization", "")):
            refusal = _error(401, "wrong or missing token: send Authorization: Bearer TOKEN")
            refusal.force_close()  # close unauthenticated connections
            return refusal
        size = request.content_length
        if size is not None and size > self.limits.max_body:
            return _error(413, f"{size} bytes exceed the limit of {self.limits.max_body} per request: split it")
        size = self.limits.max_body if size is None else size  # without Content-Length assume the maximum
        queue_full = max(self.open_requests, len(self.batches.waiting)) >= self.limits.max_queue
        if queue_full or self.open_bytes + size > self.limits.max_held:
            return _busy("the queue is full")
        self.open_requests, self.open_bytes = self.open_requests + 1, self.open_bytes + size
        try:
            return await self._handle_score(request)
        finally:
            self.open_requests, self.open_bytes = self.open_requests - 1, self.open_bytes - size

    def is_authorized(self, authorization: str) -> bool:
        """Whether the header has the right token; compared in constant time."""
        if self.token is None:
            return True
        return hmac.compare_digest(authorization.encode(errors="surrogateescape"), f"Bearer {self.token}".encode())

    async def _handle_score(self, request: web.Request) -> web.Response:
        loop = asyncio.get_running_loop()
        try:
            body = await asyncio.wait_for(request.read(), self.limits.max_read_seconds)
            rows = await loop.run_in_executor(self._tokenizer_thread, self._encode, body)
        except asyncio.TimeoutError:
            return _error(408, f"the request did not arrive within {self.limits.max_read_seconds:g} s")
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"a request may have {self.limits.max_body} bytes: split it")
        except TooLarge as error:
            return _error(413, str(error))
        except (ValueError, web.RequestPayloadError) as error:
            return _error(400, str(error))
        except ConnectionError:
            return _error(400, "the connection was lost")  # the client does not receive it
        try:
            scores = await self.batches.scores(rows)
        except QueueFull as full:
            return _busy(str(full))
        except Exception as error:  # of model or device, such as out of memory: the next batch may succeed
            logger.exception("a batch could not be scored")
            return _error(500, f"scoring failed ({type(error).__name__})")
        if not all(map(math.isfinite, scores)):
            return _error(500, "the model's scores are not finite")
        return web.json_response({"scores": scores, "rewards": scores})  # the latter as OpenRLHF expects

    def _encode(self, body: bytes) -> list[Tensor]:
        return self.scorer.encode(parse_score_request(body, self.limits))


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


def _busy(message: str) -> web.Response:
    return web.json_response({"error": f"{message}: retry later"}, status=503, headers={"Retry-After": "1"})
