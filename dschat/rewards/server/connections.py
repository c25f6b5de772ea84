"""Connection limits and idle timeouts of an HTTP server.

aiohttp has no timeout for the header of a first request, nor for a client that does not read its response. Here each
connection has a deadline whenever the server waits for its client, and a new connection beyond the limit replaces the
longest-waiting one: a client that sends a complete request at once is served, no matter how many do not.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Connections:
    """The open connections of one server; not thread-safe, use it in the event loop's thread.

    Args:
        max_connections: maximum number of connections.
        max_per_client: maximum per client address.
        seconds: timeout for receiving the header of the next request, and for sending a response.
    """

    def __init__(self, *, max_connections: int, max_per_client: int, seconds: float) -> None:
        self.max_connections, self.max_per_client, self.seconds = max_connections, max_per_client, seconds
        self._clients: dict[asyncio.BaseTransport, str] = {}  # every connection → its client's address
        self._deadlines: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._clients)

    def add(self, transport: asyncio.BaseTransport) -> bool:
        """Register a new connection, closing another if needed; False if it was refused and closed."""
        client = str((transport.get_extra_info("peername") or ("",))[0])
        if sum(other == client for other in self._clients.values()) >= self.max_per_client:
            accepted = self._close_oldest(client)
        else:
            accepted = len(self) < self.max_connections or self._close_oldest(self._client_with_most_waiting())
        if not accepted:
            transport.abort()
            return False
        self._clients[transport] = client
        self.start_deadline(transport)
        return True

    def start_deadline(self, transport: asyncio.BaseTransport | None) -> None:
        """Start the deadline: the server waits for this client."""
        if transport in self._clients:
            self.cancel_deadline(transport)
            self._deadlines[transport] = asyncio.get_running_loop().call_later(self.seconds, self._close, transport)

    def cancel_deadline(self, transport: asyncio.BaseTransport | None) -> None:
        """Cancel the deadline: the client waits for the server."""
        deadline = self._deadlines.pop(transport, None)
        if deadline is not None:
            deadline.cancel()

    def remove(self, transport: asyncio.BaseTransport) -> None:
        self.cancel_deadline(transport)
        self._clients.pop(transport, None)

    def middleware(self) -> Any:
        """aiohttp middleware that suspends the deadline while a request is processed."""

        @web.middleware
        async def without_deadline(request: web.Request, handler: Handler) -> web.StreamResponse:
            transport = request.transport
            self.cancel_deadline(transport)
            try:
                return await handler(request)
            finally:
                self.start_deadline(transport)

        return without_deadline

    def _client_with_most_waiting(self) -> str | None:
        waiting = Counter(self._clients[transport] for transport in self._deadlines)
        return waiting.most_common(1)[0][0] if waiting else None

    def _close_oldest(self, client: str | None) -> bool:
        oldest = next((transport for transport in self._deadlines if self._clients[transport] == client), None)
        if oldest is not None:
            self._close(oldest)
        return oldest is not None

    def _close(self, transport: asyncio.BaseTransport) -> None:
        self.remove(transport)
        transport.abort()  # drops unsent data too: a client that never reads would keep the connection open


class _LimitedConnection(asyncio.Protocol):
    """An aiohttp connection registered with `Connections`."""

    def __init__(self, handler: asyncio.Protocol, connections: Connections) -> None:
        self._handler, self._connections = handler, connections
        self._transport: asyncio.BaseTransport | None = None  # None: refused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._connections.add(transport):
            self._transport = transport
            self._handler.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self._connections.remove(self._transport)
            self._handler.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._transport is not None:
            self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received() if self._transport is not None else None

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()


async def serve(
    app: web.Application, connections: Connections, *, host: str, port: int, shutdown_seconds: float,
    ready: Callable[[str], None], until: asyncio.Event,
) -> None:  # fmt: skip
    """Serve an application until the event is set, then finish the open requests.

    Args:
        app: must use the middleware of `connections`.
        shutdown_seconds: time limit for finishing the open requests.
        ready: called with the server's address once it listens.

    Raises: OSError if it cannot listen on the address.
    """
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=shutdown_seconds,
        handler_cancellation=True,  # a client's disconnect removes its rows from the queue
        auto_decompress=False,  # a small body must not expand to a large one
    )  # fmt: skip
    await runner.setup()
    try:
        listener = await asyncio.get_running_loop().create_server(
            lambda: _LimitedConnection(runner.server(), connections), host, port, backlog=2048
        )
        address, bound_port = listener.sockets[0].getsockname()[:2]
        ready(f"http://[{address}]:{bound_port}" if ":" in address else f"http://{address}:{bound_port}")
        await until.wait()
        listener.close()
    finally:
        await runner.cleanup()
