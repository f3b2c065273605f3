"""Command lines and environments as records may hold them: without passwords, tokens and keys.

What a value is cannot be told from it, so the names decide: of variables only those that are listed in process.py are
recorded, of command lines everything but the values of flags and assignments whose names say that they are secret. A
password within a URL is taken out wherever it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

REDACTED = "***"
# user:password@host, with or without a scheme before it; and a user alone where a scheme shows that it may be a token.
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


def is_secret_name(name: str) -> bool:
    """Whether a flag or variable of this name holds a secret, as far as names tell."""
    bare = name.lstrip("-")
    words = re.split(r"[-_.]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", bare).lower())
    if any(joined in "".join(words) for joined in _JOINED_WORDS):
        return True
    return words[-1] in _SECRET_ENDINGS or any(word in _SECRET_WORDS for word in words)


def redact_text(text: str) -> str:
    """Text without passwords in its URLs, values of secret assignments in it, and authorization headers."""
    text = text.encode("utf-8", "replace").decode("utf-8")  # an argument that is no UTF-8 could not be written
    text = _CREDENTIALS.sub(_without_password, text)
    text = _HEADER.sub(rf"\1 {REDACTED}", text)
    return _WITHIN.sub(_assignment, text)


def redact_command(words: Iterable[str]) -> list[str]:
    """A command line whose secrets are `REDACTED`: values of `--api-key X`, `--api-key=X`, `key=X`, URLs' passwords."""
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
