"""Redact passwords and keys in URLs before they reach files, consoles and messages."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"
# URLs, and reward functions (file.py:name), both with options after a question mark.
_ADDRESS = re.compile(r"(?:\b[a-z][a-z0-9+.\-]*://|\.py:\w+\?)[^\s'\"<>|]+", re.IGNORECASE)
_WEIGHT = r"@[-+.0-9eE]+$"  # weight at the end of a --reward
_USER = re.compile(rf"(?<=://)(?:[^/?#]*|[^/?#]*:[^?#]*)(?!{_WEIGHT})@")  # a password may contain a /
_PARAMETER = re.compile(rf"(?P<name>[^?&#;=]*)=(?P<value>[^&#;\s]*?)(?=[&#;\s]|{_WEIGHT}|$)")
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_SECRET_WORDS = {
    "key", "apikey", "accesskey", "token", "accesstoken", "authtoken", "secret", "password", "passwd", "passphrase",
    "pwd", "auth", "authorization", "sig", "signature", "credential", "credentials", "jwt", "bearer", "session",
    "sessionid",
}  # fmt: skip
# Opaque values: long runs of letters and digits, which names, short words and versions do not have.
_OPAQUE = re.compile(r"[A-Za-z0-9]{24}|(?=[A-Za-z]*[0-9])(?=[0-9]*[A-Za-z])[A-Za-z0-9]{16}")


def redacted(text: str) -> str:
    """Replace passwords, query values with secret names, and opaque query values in URLs by ***.

    "https://me:pw@host/score?api_key=k&model=7b@0.5" → "https://***@host/score?api_key=***&model=7b@0.5". URLs
    that differ only in secrets become equal, so that a new key does not prevent --resume.
    """
    return _ADDRESS.sub(lambda match: _redacted_address(match[0]), text)


def redacted_values(value: Any) -> Any:
    """`redacted` for every string in nested lists and mappings, such as the arguments of a run."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {name: redacted_values(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted_values(entry) for entry in value]
    return value


def _redacted_address(address: str) -> str:
    before, mark, query = _USER.sub(f"{HIDDEN}@", address, count=1).partition("?")
    return before + mark + _PARAMETER.sub(_redacted_parameter, query)


def is_secret_name(name: str) -> bool:
    """Whether a parameter or variable is named like a secret, by whole words: max_tokens and tokenizer are not."""
    words = {word.lower() for word in _WORDS.findall(name)}
    return bool(words & _SECRET_WORDS)


def _redacted_parameter(match: re.Match[str]) -> str:
    secret = match["value"] and (is_secret_name(unquote(match["name"])) or _OPAQUE.search(match["value"]))
    return f"{match['name']}={HIDDEN if secret else match['value']}"
