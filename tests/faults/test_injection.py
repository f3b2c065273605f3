"""The faults that are injected are those of the kernel: the call is seen by whoever made it, and has the effect."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.injection import Fault, Traced, faults_at, run_traced


def traced(function: Callable[[], Any], below: Path, fault: Fault | None = None) -> Traced:
    return run_traced(function, lambda path: path.startswith(str(below)), fault)


def errno_of(function: Callable[[], Any]) -> int:
    """0: it has not failed."""
    try:
        function()
    except OSError as error:
        return error.errno or -1
    return 0


def write(path: Path, content: bytes = b"0123456789") -> int:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        return os.write(fd, content)
    finally:
        os.close(fd)


def test_only_the_chosen_call_fails(tmp_path: Path) -> None:
    def work() -> list[int]:
        return [errno_of(lambda name=name: write(tmp_path / name)) for name in "abc"]

    assert traced(work, tmp_path).result == [0, 0, 0]
    assert traced(work, tmp_path, Fault("create", 2, "ENOSPC")).result == [0, errno.ENOSPC, 0]
    assert traced(work, tmp_path, Fault("any", 3, "lasting EIO")).result == [errno.EIO] * 3
    assert traced(work, tmp_path / "b", Fault("create", 1, "EIO")).result == [0, errno.EIO, 0]


def test_half_of_a_write_or_read_is_done(tmp_path: Path) -> None:
    assert traced(lambda: write(tmp_path / "a"), tmp_path, Fault("write", 1, "short")).result == 5
    assert (tmp_path / "a").read_bytes() == b"01234"
    buffers = [bytearray(4), bytearray(4)]

    def read() -> int:
        with (tmp_path / "a").open("rb", buffering=0) as file:
            return os.preadv(file.fileno(), buffers, 0)

    assert traced(read, tmp_path).result == 5
    assert traced(read, tmp_path, Fault("read", 1, "short")).result == 2


def test_a_close_that_fails_has_closed(tmp_path: Path) -> None:
    def work() -> tuple[int, int]:
        fd = os.open(tmp_path / "a", os.O_WRONLY | os.O_CREAT)
        return errno_of(lambda: os.close(fd)), errno_of(lambda: os.fstat(fd))

    assert traced(work, tmp_path, Fault("close", 1, "late EIO")).result == (errno.EIO, errno.EBADF)


def test_a_kill_comes_before_the_call(tmp_path: Path) -> None:
    found = traced(lambda: write(tmp_path / "a"), tmp_path, Fault("write", 1, "kill"))
    assert (found.status, found.result) == (-9, None)
    assert (tmp_path / "a").read_bytes() == b""


def test_calls_of_threads_and_of_programs_are_seen(tmp_path: Path) -> None:
    def in_thread() -> None:
        thread = threading.Thread(target=write, args=(tmp_path / "a",))
        thread.start()
        thread.join()

    def in_program() -> int:
        code = f"import os; os.mkdir({str(tmp_path / 'b')!r})"
        return subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL).returncode

    assert traced(in_thread, tmp_path, Fault("write", 1, "EIO")).hit == f"write {tmp_path / 'a'}"
    assert traced(in_program, tmp_path, Fault("mkdir", 1, "EIO")).result == 1
    assert not (tmp_path / "b").exists()


def test_calls_within_the_c_library_are_seen(tmp_path: Path) -> None:
    """The write within fclose(3) goes through no symbol that a preloaded library could replace."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p

    def work() -> int:
        file = ctypes.c_void_p(libc.fopen(str(tmp_path / "a").encode(), b"w"))
        libc.fwrite(b"0123456789", 1, 10, file)
        return libc.fclose(file)

    assert traced(work, tmp_path).result == 0
    assert traced(work, tmp_path, Fault("write", 1, "ENOSPC")).result == -1
    assert (tmp_path / "a").read_bytes() == b""


def test_each_call_has_its_faults() -> None:
    faults = faults_at(["stat", "write", "stat"])
    assert [faults[0][0], faults[2][0]] == [Fault("stat", 1, "EIO"), Fault("stat", 2, "EIO")]
    assert Fault("any", 3, "kill") in faults[2] and Fault("any", 3, "lasting ENOSPC") not in faults[2]
    assert Fault("write", 1, "short") in faults[1] and Fault("any", 2, "lasting ENOSPC") in faults[1]


@pytest.mark.parametrize("stop", [True, False])
def test_an_exception_is_told(tmp_path: Path, stop: bool) -> None:
    found = traced(lambda: [][0] if stop else 1, tmp_path)
    assert (found.raised is not None) is stop and (found.raised is None or "IndexError" in found.raised)
