"""The secret of a launch: all its parts know it, and prove that to each other when they connect (handshake.py).

It is in the environment of the launch's processes, never on a command line, in a log or in a trace. A launcher of one
host makes it. Several hosts share it by the variable, or by a file that one user may read.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

VARIABLE = "MEGATRON_LAUNCH_SECRET"
_SHORTEST = 32  # characters: whoever connects gets an HMAC by which a guess can be tested
_RANDOM_BYTES = 32
HOW_TO_SHARE = (
    f"give all hosts the same {VARIABLE}, such as the output of `openssl rand -hex 32`, or the same --secret-file, "
    "on a file system that they share"
)


class SecretError(ValueError):
    """There is no secret, or it cannot be used; the message names the variable or the file, and what helps."""


def launch_secret() -> str | None:
    """That of this launch; None if it has none. Raises SecretError."""
    secret = os.environ.get(VARIABLE, "")
    return _checked(secret, VARIABLE) if secret else None


def required_secret() -> bytes:
    """Raises SecretError also if there is none."""
    secret = launch_secret()
    if secret is None:
        raise SecretError(f"{VARIABLE}: is not set, and the parts of a launch on several hosts need it; {HOW_TO_SHARE}")
    return secret.encode()


def make_secret() -> None:
    """On one host: have this process and those that it starts know a new secret, unless one is given already."""
    if launch_secret() is None:
        os.environ[VARIABLE] = secrets.token_hex(_RANDOM_BYTES)


def take_secret_of(path: Path, *, create: bool) -> None:
    """Have this process know the secret in a file, which only its owner may access.

    `create`: make the file with a new secret if there is none. Raises SecretError.
    """
    try:
        if create and not path.exists():
            _create(path)
        with path.open() as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is no text"
        first = "" if create else "start the coordinator first, which makes the file, or "
        raise SecretError(
            f"--secret-file {path}: {why}; {first}make it yourself where you may write: "
            f"(umask 077; openssl rand -hex 32 > FILE)"
        ) from error
    if mode & 0o077:
        raise SecretError(
            f"--secret-file {path}: others may access it (mode {mode:o}); chmod 600 {path}; where Kubernetes mounts a "
            f"Secret, give the volume `defaultMode: 0400` and no fsGroup, or {VARIABLE} from the Secret"
        )
    given = os.environ.get(VARIABLE)
    if given and given != text:
        raise SecretError(f"--secret-file {path}: {VARIABLE} is another secret; give one of them")
    os.environ[VARIABLE] = _checked(text, f"--secret-file {path}")


def _checked(secret: str, where: str) -> str:
    if len(secret) < _SHORTEST:
        raise SecretError(
            f"{where}: has {len(secret)} characters, and a secret that nobody guesses at least {_SHORTEST}; take the "
            "output of `openssl rand -hex 32`"
        )
    return secret


def _create(path: Path) -> None:
    """Complete or not at all, and by one of several coordinators (link(2))."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(_RANDOM_BYTES) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
