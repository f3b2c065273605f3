"""The number of the iteration that is under way, in the file of a start: storage may hang or fail meanwhile."""

from __future__ import annotations

import logging
import os
import struct
import threading
from pathlib import Path

import pytest

from megatron.checkpointing.preflight.crashes import CrashFile
from tests.dist.harness import wait_for


def step_in(path: Path) -> int:
    return struct.unpack_from("<Q", path.read_bytes()[:8])[0]  # type: ignore[no-any-return]


def test_an_iteration_is_in_the_file_as_soon_as_it_has_begun(tmp_path: Path) -> None:
    crash = CrashFile(str(tmp_path / "crash"), 0, {})
    for step in range(1, 50):
        crash.begin(step)
        assert step_in(tmp_path / "crash") == step
    crash.close()


def test_training_goes_on_while_storage_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = CrashFile(str(tmp_path / "crash"), 0, {})
    gate, pwrite = threading.Event(), os.pwrite

    def wait_and_write(fd: int, content: bytes, offset: int) -> int:
        assert gate.wait(300)
        return pwrite(fd, content, offset)

    monkeypatch.setattr(os, "pwrite", wait_and_write)
    for step in range(1, 50):
        crash.begin(step)
    assert step_in(tmp_path / "crash") == 0
    gate.set()
    wait_for(lambda: step_in(tmp_path / "crash") == 49, "the last iteration")
    crash.close()


def test_storage_that_fails_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    crash = CrashFile(str(tmp_path / "crash"), 0, {})

    def fail(fd: int, content: bytes, offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwrite", fail)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 4):
            crash.begin(step)
    crash.close()
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.endswith("is not noted for a crash by a signal: [Errno 5] Input/output error")
