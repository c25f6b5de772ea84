"""HTTP server of the chat page: the page, answers as streams of JSON lines, ratings.

    GET /            the page; with ?token=TOKEN it sets the session's cookie
    GET /settings    names of the models, sampling defaults, the file of ratings
    POST /answer     an AnswerRequest → lines {"job"}, {"waiting"}?, then those of answer_steps
    POST /stop       {"job": number}: ends that answer
    POST /rating     see parse_rating → {"saved": file}
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import socket
import socketserver
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import ThreadingHTTPServer

from chat_model import ChatModel, ChatSettings

from dschat.distributed.terminal import printable

from .access import Access
from .generation_thread import GenerationThread, Job
from .handler import ChatHandler
from .ratings import RatingsFile

MAX_CONNECTIONS = 64


class ChatServer(ThreadingHTTPServer):
    """The listening socket and what the requests share; each connection has a thread.

    Attributes:
        jobs: answers that are generated or wait, by number; guarded by jobs_lock.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CONNECTIONS

    models: Sequence[ChatModel]
    settings: ChatSettings
    ratings: RatingsFile
    generation: GenerationThread

    def __init__(self, host: str, port: int, *, token: str | None) -> None:
        self.access = Access(host, token=token)
        self.jobs: dict[int, Job] = {}
        self.jobs_lock = threading.Lock()
        self.job_numbers = itertools.count(1)
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        super().__init__(address[:2], ChatHandler, bind_and_activate=False)
        socketserver.TCPServer.server_bind(self)  # HTTPServer's looks the name up, which can take seconds
        self.server_name, self.server_port = host, self.server_address[1]

    @property
    def url(self) -> str:
        """The page's address."""
        name = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"http://{name}:{self.server_port}/"

    def process_request(self, request: socket.socket, client_address: tuple) -> None:
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: socket.socket, client_address: tuple) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: socket.socket, client_address: tuple) -> None:
        """Print the traceback, except of a connection that the browser has closed."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def submit(self, model: int, job: Job) -> tuple[int, int]:
        """Queue a job; returns its number and how many are before it. Raises QueueFull."""
        before = self.generation.submit(model, job)
        with self.jobs_lock:
            number = next(self.job_numbers)
            self.jobs[number] = job
        return number, before

    def discard(self, number: int) -> None:
        """Forget a job, and end it if it still runs."""
        with self.jobs_lock:
            self.jobs.pop(number).stopped.set()

    def page_settings(self) -> dict:
        """What the page has to know."""
        return {
            "models": [model.name for model in self.models],
            "settings": {**dataclasses.asdict(self.settings), "system": self.settings.system or ""},
            "ratings": str(self.ratings.path),
        }


@contextmanager
def bound_server(host: str, port: int, *, token: str | None) -> Iterator[ChatServer]:
    """A server whose address is reserved; it accepts connections once `serve_chat` runs.

    Raises: ValueError if the address cannot be used.
    """
    try:
        server = ChatServer(host, port, token=token)
    except OSError as error:
        raise ValueError(_bind_problem(host, port, error)) from error
    try:
        yield server
    finally:
        server.server_close()


def serve_chat(
    server: ChatServer, models: Sequence[ChatModel], *, settings: ChatSettings, ratings: RatingsFile
) -> None:
    """Serve the page until Ctrl-C, which ends the answers that are generated.

    Raises: ValueError if another program has taken the address since it was reserved.
    """
    server.models, server.settings, server.ratings = models, settings, ratings
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model.engine.generation())
        server.generation = stack.enter_context(GenerationThread(len(models)))
        try:
            server.server_activate()
        except OSError as error:
            raise ValueError(_bind_problem(server.server_name, server.server_port, error)) from error
        print(printable(f"Open {server.url} in a browser; Ctrl-C ends."), flush=True)
        print(printable(f"Ratings are appended to {ratings.path.resolve()}"), flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("\nEnded.", flush=True)


def _bind_problem(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--port {port}: is in use; end that program, or choose another (0: any that is free)"
    return f"--host {host} --port {port}: cannot listen there ({error.strerror or error})"
