"""Which requests the chat server answers: address, token, and protection from other web sites."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

TOKEN_VARIABLE = "DSCHAT_CHAT_TOKEN"
MIN_TOKEN = 16  # characters
MAKE_TOKEN = 'python -c "import secrets; print(secrets.token_urlsafe())"'
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def host_problems(host: str, *, token: str | None) -> list[str]:
    """One line for each problem of --host and --token."""
    problems = []
    if token is not None and (len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token):
        problems.append(f"--token: must be at least {MIN_TOKEN} ASCII characters without spaces: {MAKE_TOKEN}")
    try:
        addresses = {address[4][0] for address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        return [*problems, f"--host {host}: is not an address of this machine ({error})"]
    if token is None and not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        problems.append(
            f"--host {host}: others can reach it and use the models, so set --token or the environment variable "
            f"{TOKEN_VARIABLE}, to a secret such as {MAKE_TOKEN} prints; or leave --host out"
        )
    return problems


class Access:
    """Decides about requests by their headers.

    A page of another site can make a browser send requests to this server, also under a name of its own that resolves
    to this address (DNS rebinding), so `Host` must be a name of this machine and `Origin` this server.

    Args:
        host: the address that the server listens on, as the user gave it.
        token: required of every request, as bearer token, or by the cookie that the page's address with
            ?token=TOKEN sets; None: no token.
    """

    def __init__(self, host: str, *, token: str | None) -> None:
        self._token = token
        self._session = secrets.token_urlsafe(32)  # the cookie's value, so that browsers do not store the token
        self._names = {*LOOPBACK_NAMES, host.lower()}
        if token is not None:
            self._names.add(socket.gethostname().lower())

    def problem(self, headers: Mapping[str, str], *, port: int) -> tuple[int, str] | None:
        """(HTTP status, reason) if the request is refused.

        Args:
            headers: with case-insensitive names.
            port: of the server, which its cookie is named after: cookies are not separated by port.
        """
        host = headers.get("Host", "")
        name = _name_of(host)
        if name not in self._names and not (self._token is not None and _is_address(name)):
            return 403, f"Host {host!r} is not a name of this server: use the address that chat.py printed"
        origin = headers.get("Origin")
        if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
            return 403, f"Origin {origin!r}: requests of other sites are refused"
        if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and headers.get(
            "Sec-Fetch-Mode"
        ) != "navigate":  # links to the page are harmless
            return 403, "requests of other sites are refused"
        if self._token is None or self._has_token(headers, port=port):
            return None
        return 401, "the token is missing or wrong: open the page with ?token=TOKEN, or enter it there"

    def is_token(self, text: str) -> bool:
        """Compared in constant time."""
        return self._token is not None and _equal(text, self._token)

    def cookie(self, *, port: int) -> str:
        """The Set-Cookie header for a browser that has sent the token."""
        return f"dschat_{port}={self._session}; HttpOnly; SameSite=Strict; Path=/"

    def _has_token(self, headers: Mapping[str, str], *, port: int) -> bool:
        if self.is_token(headers.get("Authorization", "").removeprefix("Bearer ")):
            return True
        try:
            cookie = SimpleCookie(headers.get("Cookie", "")).get(f"dschat_{port}")
        except CookieError:
            return False
        return cookie is not None and _equal(cookie.value, self._session)


def _equal(text: str, secret: str) -> bool:
    return hmac.compare_digest(text.encode(errors="surrogateescape"), secret.encode())


def _name_of(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    """An IP address, which no other site's name can be."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
