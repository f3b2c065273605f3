"""Calls of the file system, while they have not returned."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from megatron.fileio.files import open_file
from restart_trace.under_way import STORAGE, entries


def test_an_open_that_does_not_return_is_under_way(tmp_path: Path) -> None:
    """Of a pipe without a reader, which waits as the making of a file does on storage that hangs."""
    pipe, opened = tmp_path / "pipe", []
    os.mkfifo(pipe)
    thread = threading.Thread(target=lambda: opened.append(open_file(pipe, os.O_WRONLY)), daemon=True)
    thread.start()
    while not any(entry.depends_on == STORAGE and entry.text == f"opening of {pipe}" for entry in entries().values()):
        assert thread.is_alive()
        time.sleep(0.001)
    reader = os.open(pipe, os.O_RDONLY)
    thread.join()
    assert not any(entry.text == f"opening of {pipe}" for entry in entries().values())
    for fd in (reader, *opened):
        os.close(fd)
