"""HTTP client of reward services: one JSON POST per batch returns one score per response."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from email.message import Message
from http.client import HTTPException
from typing import Any

from dschat.arguments.secrets import HIDDEN, redacted
from dschat.distributed.terminal import printable
from dschat.rewards.function_arguments import ARGUMENTS
from dschat.rewards.functions import validated_scores
from dschat.rewards.response_batch import ResponseBatch
from dschat.rewards.retry import Unavailable, timeout_of

TOKEN_VARIABLE = "DSCHAT_REWARD_TOKEN"
_MAX_REPLY = 64 << 20  # bytes
_HINTS = {
    400: "the service rejects the request as invalid",
    401: f"the token is wrong: set the environment variable {TOKEN_VARIABLE} to that of the service",
    403: f"the token is not allowed to request scores: set the environment variable {TOKEN_VARIABLE} to another",
    404: "there is no service at this path",
    413: "a batch is too large for the service: raise its limit, or lower --per_device_generation_batch_size",
}


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Rejects redirects: a redirected POST would become a GET, and the token would be sent to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def service_scores(url: str, batch: ResponseBatch, *, seconds: float) -> list[float]:
    """POST {"messages", "prompts", "responses", "rows", "ended"} → {"scores": [number or null for each response]}.

    The request has OpenRLHF's fields too, "query" (prompt + response) and "labels", and the reply may be its
    {"rewards": [...]}. The environment variable DSCHAT_REWARD_TOKEN, if set, is sent as bearer token.

    Args:
        seconds: socket timeout; inf: no limit.

    Returns: scores, NaN for null.

    Raises:
        Unavailable: no connection, or 429, 502, 503, 504.
        TimeoutError: no response in time.
        PermissionError: 401 or 403.
        ValueError: any other status, a reply that is not one finite number (or null) per response, a token that is not
            valid in a header.
    """
    fields = {name: vars(batch)[name] for name in ("messages", "responses", "rows", "ended")}
    remote = {"prompts": batch.prompts, "query": ARGUMENTS["queries"](batch), "labels": ARGUMENTS["labels"](batch)}
    body = json.dumps(fields | remote).encode()
    headers = {"Content-Type": "application/json"}
    token = token_of_environment()
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    url = redacted(url)  # only used in messages from here on
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=timeout_of(seconds)) as reply:
            text = reply.read(_MAX_REPLY)
    except urllib.error.HTTPError as error:
        raise _http_error(url, error, token) from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise TimeoutError(f"{url} did not reply within {seconds:g} s") from error
        raise Unavailable(f"{url} cannot be reached ({error.reason})") from error
    except TimeoutError:
        raise
    except (OSError, HTTPException) as error:  # the connection was lost during the reply
        raise Unavailable(f"{url} closed the connection ({type(error).__name__}: {error})") from error
    return _parse_reply(text, batch, url)


def token_of_environment() -> str | None:
    """The bearer token of client and server from the environment; None if not set.

    Raises: ValueError, which does not contain the token, if it is not valid in a header.
    """
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise ValueError(f"{TOKEN_VARIABLE}: a token is made of printable ASCII characters; generate another one")
    return token or None


def _parse_reply(text: bytes, batch: ResponseBatch, url: str) -> list[float]:
    try:
        reply = json.loads(text)
        scores = reply["scores"] if "scores" in reply and "rewards" not in reply else reply["rewards"]
        is_valid = isinstance(scores, list) and all(score is None or type(score) in (int, float) for score in scores)
    except (ValueError, KeyError, TypeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise ValueError(f'{url} replied {text[:200]!r}, but {{"scores": [a number or null for each]}} is expected')
    return validated_scores(scores, batch.responses, source=url)


def _http_error(url: str, error: urllib.error.HTTPError, token: str | None) -> Exception:
    """The exception for an HTTP error status; the token is removed from the service's message."""
    with error:
        reply = error.read(300).decode(errors="replace").strip()
    if token:
        reply = reply.replace(token, HIDDEN)
    reply, reason = printable(redacted(reply)), printable(error.reason)
    message = f"{url} replied {error.code} {reason}: {_HINTS.get(error.code, 'it failed')} ({reply})"
    if error.code in (429, 502, 503, 504):
        return Unavailable(message, seconds=_retry_after(error.headers))
    if error.code in (401, 403):
        return PermissionError(message)
    if 300 <= error.code < 400:
        target = printable(redacted(str(error.headers.get("Location"))))
        message = f"{url} redirects to {target}: use that address"
    return ValueError(message)


def _retry_after(headers: Message) -> float | None:
    """Seconds of a Retry-After header; None without one, or if it is a date."""
    value = headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else None
