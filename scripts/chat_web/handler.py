"""Handles the requests of one connection to the chat server."""

from __future__ import annotations

import json
import queue
import secrets
import select
import socket
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from dschat.arguments.strict_json import parse_json

from .chat_requests import answer_steps, parse_answer_request, parse_rating
from .generation_thread import END, Job, QueueFull

if TYPE_CHECKING:
    from .server import ChatServer

PAGE = Path(__file__).with_name("page.html")
SIGN_IN = Path(__file__).with_name("sign_in.html")
MAX_BODY = 4 << 20  # bytes
MAX_HEADER_SECONDS = 30
POLL_SECONDS = 0.25  # between checks whether the browser is still there
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


class RequestError(Exception):
    """A request that cannot be answered: HTTP status and reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class ChatHandler(BaseHTTPRequestHandler):
    """One request per connection: a stream of an answer ends with its connection."""

    server: ChatServer
    timeout = MAX_HEADER_SECONDS
    disable_nagle_algorithm = True  # pieces of an answer are small
    server_version, sys_version = "dschat", ""

    def log_message(self, format: str, *args: Any) -> None:
        """No access log: the terminal is the user's."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        problem = self.server.access.problem(self.headers, port=self.server.server_port)
        if problem and problem[0] == 401 and url.path == "/":
            self._sign_in(parse_qs(url.query).get("token", [""])[0])
        elif problem:
            self._send_error(*problem)
        elif url.path == "/":
            self._send_html(200, PAGE)
        elif url.path == "/settings":
            self._send_json(200, self.server.page_settings())
        else:
            self._send_error(404, f"there is nothing at {url.path}")

    def do_POST(self) -> None:
        actions = {"/answer": self._answer, "/stop": self._stop, "/rating": self._rate}
        try:
            if problem := self.server.access.problem(self.headers, port=self.server.server_port):
                raise RequestError(*problem)
            if self.path not in actions:
                raise RequestError(404, f"there is nothing at {self.path}")
            actions[self.path](self._body())
        except RequestError as error:
            self._send_error(error.status, str(error))
        except QueueFull as error:
            self._send_error(503, str(error))
        except ValueError as error:
            self._send_error(400, str(error))

    def _answer(self, body: bytes) -> None:
        """Stream an answer; a browser that closes the connection ends it."""
        server = self.server
        request = parse_answer_request(body, models=len(server.models), settings=server.settings)
        job = Job(partial(answer_steps, server.models[request.model], request))
        number, before = server.submit(request.model, job)
        try:
            self._send_head(200, "application/x-ndjson")
            self._send_event({"job": number})
            if before:
                self._send_event({"waiting": before})
            for event in self._events(job):
                self._send_event(event)
        except OSError:
            pass  # the browser has closed the connection
        finally:
            server.discard(number)

    def _events(self, job: Job) -> Iterator[dict[str, Any]]:
        """The events of a job until its end, or until the browser has closed the connection."""
        while True:
            try:
                event = job.events.get(timeout=POLL_SECONDS)
            except queue.Empty:
                event = None
            if event is END or self._is_closed():
                return
            if event and event.get("text") != "":  # a token that completes no character
                yield event

    def _is_closed(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

    def _stop(self, body: bytes) -> None:
        fields = parse_json(body)
        number = fields.get("job") if isinstance(fields, dict) else None
        if not isinstance(number, int):
            raise RequestError(400, "job must be the number of an answer")
        with self.server.jobs_lock:
            job = self.server.jobs.get(number)
        if job is not None:  # else it has just ended
            job.stopped.set()
        self._send_json(200, {"stopped": job is not None})

    def _rate(self, body: bytes) -> None:
        row, tie = parse_rating(body, self.server.models, settings=self.server.settings)
        try:
            path = self.server.ratings.append(row, tie=tie)
        except OSError as error:
            reason = f"the rating was not saved: {error.filename}: {error.strerror}"
            raise RequestError(507, f"{reason}; make room or name another file with --ratings") from error
        self._send_json(200, {"saved": str(path)})

    def _sign_in(self, token: str) -> None:
        """Exchange the token for a cookie, so that it leaves the address; without the right one show the form."""
        if not self.server.access.is_token(token):
            self._send_html(401, SIGN_IN, note="That token is wrong." if token else "")
            return
        self.send_response(303)
        self.send_header("Set-Cookie", self.server.access.cookie(port=self.server.server_port))
        self.send_header("Location", "/")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()

    def _body(self) -> bytes:
        if self.headers.get_content_type() != "application/json":
            raise RequestError(415, "Content-Type must be application/json")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise RequestError(411, "Content-Length is missing")
        if len(length) > 9 or int(length) > MAX_BODY:
            raise RequestError(413, f"a request may have {MAX_BODY} bytes: start a new chat")
        return self.rfile.read(int(length))

    def _send_head(self, status: int, kind: str, *, nonce: str = "none") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", POLICY.format(nonce=nonce))
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()

    def _send_html(self, status: int, file: Path, *, note: str = "") -> None:
        nonce = secrets.token_urlsafe(16)
        self._send_head(status, "text/html; charset=utf-8", nonce=nonce)
        page = file.read_text(encoding="utf-8").replace("{{NONCE}}", nonce).replace("{{NOTE}}", note)
        self.wfile.write(page.encode())

    def _send_json(self, status: int, value: dict[str, Any]) -> None:
        self._send_head(status, "application/json")
        self._send_event(value)

    def _send_error(self, status: int, reason: str) -> None:
        self._send_json(status, {"error": reason})

    def _send_event(self, event: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(event).encode() + b"\n")
