"""Helper processes: real ones, really killed, with connections that others hold, too."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron.processes.helper_process import HelperProcess, helper_command
from tests.dist.harness import wait_for

HELPER = """
import sys
from multiprocessing.connection import Connection
from megatron.processes.parent_process import ignore_stop_signals
def main(fd, word):
    ignore_stop_signals()
    connection = Connection(fd)
    connection.send(word)
    while True:
        if connection.recv() == "end": sys.exit(3)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "some_helper.py").write_text(HELPER)
    monkeypatch.syspath_prepend(tmp_path)
    return "some_helper"


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """The other ends of connections, as a process has them that another thread forks while a helper is started."""
    real, ends = socket.socketpair, list[socket.socket]()

    def socketpair() -> tuple[socket.socket, socket.socket]:
        ours, theirs = real()
        ends.append(theirs.dup())
        return ours, theirs

    monkeypatch.setattr(socket, "socketpair", socketpair)
    yield ends
    for each in ends:
        each.close()


def test_a_helper_imports_from_where_its_parent_does(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And passes over what Python passes over in sys.path."""
    (tmp_path / "another_helper.py").write_text("def main(*words): print(words)")
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path / "a path"])
    command = helper_command("another_helper", 1, "two")
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "(1, 'two')\n"


@pytest.mark.parametrize("what", ["reads", "writes"])
def test_the_end_of_a_helper_wakes_who_waits_for_it(module: str, held: list[socket.socket], what: str) -> None:
    helper = HelperProcess(module, "hello")
    assert helper.connection.recv() == "hello" and len(held) == 1
    os.kill(helper.pid, signal.SIGSTOP)
    if what == "reads":
        os.kill(helper.pid, signal.SIGKILL)
        with pytest.raises((EOFError, ConnectionError)):
            helper.connection.recv()
    else:
        wait_for(lambda: psutil.Process(helper.pid).status() == psutil.STATUS_STOPPED, "a stopped helper")
        os.kill(helper.pid, signal.SIGKILL)
        with pytest.raises(ConnectionError):
            helper.connection.send_bytes(bytes(1 << 26))  # more than a socket holds
    helper.end()
    assert helper.describe_end() == f"(process {helper.pid}) was killed by SIGKILL, exit code -9"


def test_what_a_helper_has_said_is_read_after_its_end(module: str, held: list[socket.socket]) -> None:
    helper = HelperProcess(module, "last words")
    wait_for(lambda: helper.connection.poll(), "its words")
    helper.connection.send("end")
    helper.end()
    assert helper.describe_end() == f"(process {helper.pid}) ended with exit code 3"
    assert helper.connection.recv() == "last words"
    with pytest.raises((EOFError, ConnectionError)):
        helper.connection.recv()


def test_a_closed_helper_is_gone(module: str) -> None:
    helper = HelperProcess(module, "hello")
    assert helper.connection.recv() == "hello" and helper.is_alive()
    os.kill(helper.pid, signal.SIGTERM)  # as all processes of a job may get one
    helper.close()
    assert not helper.is_alive() and helper.describe_end() == f"(process {helper.pid}) ended with exit code 1"


def test_a_helper_that_was_killed_serves_nobody_while_it_ends(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the save after one that was given up would be handed to it, and fail."""
    helper = HelperProcess(module, "hello")
    assert helper.connection.recv() == "hello"
    monkeypatch.setattr(helper._process, "poll", lambda: None)  # that may take a while
    assert helper.is_alive()
    helper.kill_soon()
    assert not helper.is_alive()
    helper.close()
    assert helper.describe_end() == f"(process {helper.pid}) was killed by SIGKILL, exit code -9"


def test_a_connection_that_is_freed_says_that_it_is_closed(module: str) -> None:
    """The thread that watches the helper may get hold of it meanwhile, when its number is another file's already."""
    helper = HelperProcess(module, "ready")
    connection = helper.connection
    connection.__del__()
    assert connection.closed
    helper.close()
    assert not helper.is_alive()
