"""For tests with hostile files: JSON that is altered at will, things that are no files, and a limit to waiting."""

from __future__ import annotations

import contextlib
import copy
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.alarm import alarm

HANGS_S = 120.0  # nothing takes as long, unless it waits for ever
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.sampled_from([-1, 0, 1 << 63, 10**400, 1e308])
    | st.floats(allow_nan=True, allow_infinity=True) | st.text(max_size=8)
    | st.sampled_from(["", ".", "..", "/etc/passwd", "../x", "a//b", "x" * 300, "a\0b", "\x1b[2J", "\ud800"])
)  # fmt: skip
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def altered(draw: st.DrawFn, value: Any) -> Any:
    """`value` with one to three alterations: anything in place of a part, a part taken out, put in, or nested deep."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        holder: list[Any] = [value]
        parent, key = holder, 0
        while isinstance(parent[key], (dict, list)) and parent[key] and draw(st.integers(0, 4)):
            parent = parent[key]
            key = draw(st.sampled_from(sorted(parent) if isinstance(parent, dict) else range(len(parent))))
        action = draw(st.sampled_from(["replace", "remove", "nest", "add"]))
        if action == "remove" and parent is not holder:
            del parent[key]
        elif action == "nest":
            for _ in range(draw(st.sampled_from([1, 3, 100]))):
                parent[key] = draw(st.sampled_from([[parent[key]], {"a": parent[key]}]))
        elif action == "add" and isinstance(parent[key], dict):
            parent[key][draw(st.text(max_size=8))] = draw(JSON)
        else:
            parent[key] = draw(JSON)
        value = holder[0]
    return value


@contextlib.contextmanager
def blocking_fails() -> Iterator[None]:
    """Fails the test in what blocks, which opening a FIFO does for ever.

    Not by TimeoutError, which is an OSError: what is tested would take it for a file that cannot be read, and go on.
    """

    def give_up() -> None:
        pytest.fail(f"blocked for {HANGS_S:g} s")

    with alarm(HANGS_S, give_up):
        yield


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket may have 107 bytes
    try:
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def directory(path: Path) -> None:
    path.mkdir()


NO_FILES = [fifo, unix_socket, device, directory]
