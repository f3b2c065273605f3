"""Space reserved for files that are written directly."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from megatron.fileio.direct_files import allocate
from tests.alarm import alarm
from tests.dist.storage import disk_without_direct_io, small_disk

MIB = 1 << 20


def test_reserves_the_space_of_a_file(tmp_path: Path) -> None:
    for keep_size in (False, True):
        with (tmp_path / f"{keep_size}").open("xb") as file:
            allocate(file.fileno(), MIB, keep_size=keep_size)
            status = os.fstat(file.fileno())
        assert (status.st_size, status.st_blocks * 512) == (0 if keep_size else MIB, MIB)


def test_reserves_nothing_for_an_empty_file(tmp_path: Path) -> None:
    with (tmp_path / "empty").open("xb") as file:
        allocate(file.fileno(), 0)
        assert os.fstat(file.fileno()).st_size == 0


def test_tells_that_the_disk_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2 * MIB) as mounted:
        if not mounted:
            pytest.skip("mounting a disk small enough to fill needs root")
        with (tmp_path / "disk" / "file").open("xb") as file, pytest.raises(OSError) as caught:
            allocate(file.fileno(), 4 * MIB)
        assert caught.value.errno == errno.ENOSPC


def test_a_file_system_that_reserves_nothing_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    with disk_without_direct_io(tmp_path / "ram") as mounted:
        if not mounted:
            pytest.skip("mounting a file system that reserves nothing needs root")
        with (tmp_path / "ram" / "file").open("xb") as file:
            allocate(file.fileno(), MIB)
            assert os.fstat(file.fileno()).st_size == 0


def test_what_cannot_be_reserved_may_still_be_written(tmp_path: Path) -> None:
    with open("/dev/null", "wb", buffering=0) as device:  # ENODEV
        allocate(device.fileno(), MIB)
    sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    allocate(sealed, MIB)  # EPERM
    assert os.fstat(sealed).st_size == 0
    os.close(sealed)
    with (tmp_path / "file").open("xb") as file, pytest.raises(OSError) as caught:
        allocate(file.fileno(), 1 << 62)
    assert caught.value.errno == errno.EFBIG


def test_a_signal_does_not_end_it() -> None:
    """A file in memory gives back what it has reserved when a signal comes, and tells EINTR."""
    fd = os.memfd_create("large")
    try:
        with alarm(0.005, lambda: None):
            allocate(fd, 256 * MIB)
        assert os.fstat(fd).st_blocks * 512 == 256 * MIB
    finally:
        os.close(fd)
