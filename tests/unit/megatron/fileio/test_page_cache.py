"""What the kernel says of a file's pages."""

from __future__ import annotations

import mmap
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from megatron.fileio.page_cache import ResidentPages, populate
from tests.unit.trace_helpers import start_python

PAGE = os.sysconf("SC_PAGESIZE")


def test_a_file_that_was_just_written_is_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * PAGE + 1))
    with path.open("rb") as file:
        pages = ResidentPages(file.fileno())
    assert pages.share(0, 3 * PAGE + 1) == 1 and pages.missing_bytes(0, 3 * PAGE + 1) == 0
    assert pages.share(PAGE, 9 * PAGE) == 1 and pages.share(4 * PAGE, 9 * PAGE) == 0, "beyond the end is nothing"


def test_what_was_dropped_is_missing_until_it_is_read(path_on_disk: Path) -> None:
    path = path_on_disk / "file"
    path.write_bytes(bytes(64 * PAGE))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        pages = ResidentPages(file.fileno())
        if pages.share(0, 64 * PAGE):
            pytest.skip("this file system keeps its files in memory")
        assert pages.missing_bytes(PAGE + 1, 3 * PAGE) == 2 * PAGE
        os.pread(file.fileno(), PAGE, PAGE)
        assert pages.missing_bytes(PAGE, 2 * PAGE) == 0 and pages.share(0, 64 * PAGE) < 1


def test_an_empty_file_has_no_pages(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open("rb") as file:
        pages = ResidentPages(file.fileno())
    assert pages.share(0, PAGE) == 0 and pages.missing_bytes(0, PAGE) == 0


def test_a_file_larger_than_the_memory_that_is_allowed_can_be_looked_at(tmp_path: Path) -> None:
    code = """
        import resource, sys
        from megatron.fileio.page_cache import ResidentPages
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
        with open(sys.argv[1], "rb") as file:
            print(ResidentPages(file.fileno()).share(0, 1 << 20))
    """
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(4 << 30)
    process = start_python(code, path, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and out == "0.0\n", err


def test_other_threads_run_while_pages_are_read(tmp_path: Path) -> None:
    """Half a GiB takes the kernel a while. One that keeps the interpreter lock lets others run twice, not ten times."""
    size, inside, ran, ended = 512 << 20, threading.Event(), 0, threading.Event()

    def run() -> None:
        nonlocal ran
        while not ended.is_set():
            ran += inside.is_set()
            time.sleep(0.001)

    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(size)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        most = 0
        for _ in range(50):  # where others take the processor meanwhile, the thread may not get to run
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
                ran = 0
                inside.set()
                assert populate(mapping, 0, size) == size
                inside.clear()
                most = max(most, ran)
            if most >= 10:
                break
    finally:
        ended.set()
        thread.join()
    assert most >= 10
