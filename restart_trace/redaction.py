"""Removes passwords, tokens and keys from command lines and environments before they are recorded.

Whether a value is secret cannot be seen from the value, so the name decides: only the variables listed in process.py
are recorded, and of command lines everything except the values of flags and assignments with a name that indicates a
secret. Passwords in URLs are removed everywhere.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

REDACTED = "***"
# user:password@host, with or without a scheme; and with a scheme also a user alone, which may be a token.
_CREDENTIALS = re.compile(r"(?P<user>[^\s/:@'\"=,]*):[^\s/@'\"]+@(?=[\w.\[])|(?<=://)[^\s/:@'\"]+@(?=[\w.\[])")
# Parts of a name, between - _ . or a change of case. Plurals such as "tokens" and "keys" count things.
_SECRET_WORDS = {
    "authorization", "bearer", "cookie", "credential", "credentials", "passphrase", "passwd", "password", "pw", "pwd",
    "secret", "secrets",
}  # fmt: skip
_SECRET_ENDINGS = {"auth", "key", "pat", "signature", "token"}  # not --num-key-value-heads
_JOINED_WORDS = ("apikey", "accesskey", "secretkey", "privatekey", "authtoken", "accesstoken", "password", "passwd")
_ASSIGNMENT = re.compile(r"^(?P<name>-{0,2}[A-Za-z][\w.-]*)(?P<equals>[=:]\s*)(?P<value>.+)$", re.DOTALL)
_WITHIN = re.compile(r"(?P<name>[A-Za-z][\w.-]*)(?P<equals>['\"]?\s?[=:]\s?['\"]?)(?P<value>[^\s,;&'\"]+)")
_FLAG = re.compile(r"^--?[A-Za-z][\w.-]*$")
_HEADER = re.compile(r"\b(Bearer|Basic)\s+\S+", re.IGNORECASE)


@functools.lru_cache(maxsize=4096)  # a rank that starts again in its process redacts the same words
def is_secret_name(name: str) -> bool:
    """Whether the name of a flag or variable indicates that it holds a secret."""
    bare = name.lstrip("-")
    words = re.split(r"[-_.]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", bare).lower())
    if any(joined in "".join(words) for joined in _JOINED_WORDS):
        return True
    return words[-1] in _SECRET_ENDINGS or any(word in _SECRET_WORDS for word in words)


@functools.lru_cache(maxsize=4096)
def redact_text(text: str) -> str:
    """`text` without passwords in URLs, values of secret assignments, and authorization headers."""
    text = text.encode("utf-8", "replace").decode("utf-8")  # an argument that is not UTF-8 could not be written
    text = _CREDENTIALS.sub(_without_password, text)
    text = _HEADER.sub(rf"\1 {REDACTED}", text)
    return _WITHIN.sub(_assignment, text)


def redact_command(words: Iterable[str]) -> list[str]:
    """A command line with its secrets replaced: values of `--api-key X`, `--api-key=X`, `key=X`, passwords in URLs."""
    redacted: list[str] = []
    follows_secret = False
    for word in words:
        assignment = _ASSIGNMENT.match(word)
        if follows_secret and not _FLAG.match(word):
            redacted.append(REDACTED)
        elif assignment and is_secret_name(assignment["name"]):
            redacted.append(f"{assignment['name']}{assignment['equals']}{REDACTED}")
        else:
            redacted.append(redact_text(word))
        follows_secret = bool(_FLAG.match(word)) and is_secret_name(word)
    return redacted


def _without_password(match: re.Match[str]) -> str:
    return f"{REDACTED}@" if match["user"] is None else f"{match['user']}:{REDACTED}@"


def _assignment(match: re.Match[str]) -> str:
    if not is_secret_name(match["name"]):
        return match[0]
    return f"{match['name']}{match['equals']}{REDACTED}"
