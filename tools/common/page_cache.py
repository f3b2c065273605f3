"""How much of a file is in the page cache, dropping it and filling it; nothing is called cold that was not checked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from megatron.fileio.page_cache import ResidentPages

COLD, WARM, PARTLY_WARM, UNKNOWN = "cold", "warm", "partly warm", "unknown"  # what state_of tells
_COLD_BELOW, _WARM_FROM = 0.01, 0.99
_READ = 8 << 20


def resident_bytes(path: Path) -> tuple[int, int] | None:
    """(bytes in the page cache, bytes) of a file by mincore(2); None if the system cannot report it."""
    size = path.stat().st_size
    if size == 0:
        return 0, 0
    try:
        with path.open("rb") as file:
            missing = ResidentPages(file.fileno()).missing_bytes(0, size)
    except (OSError, AttributeError):  # AttributeError: no mincore in the C library
        return None
    return max(0, size - missing), size


def resident_share(paths: Sequence[Path]) -> float | None:
    """Part of the bytes of `paths` that is in the page cache; None if the system cannot report it."""
    known = [part for path in paths if (part := resident_bytes(path)) is not None]
    if len(known) < len(paths):
        return None
    return sum(there for there, _ in known) / max(1, sum(size for _, size in known))


def state_of(share: float | None) -> str:
    """cold, warm or partly warm, for a share of resident bytes."""
    if share is None:
        return UNKNOWN
    if share <= _COLD_BELOW:
        return COLD
    return WARM if share >= _WARM_FROM else PARTLY_WARM


def drop(paths: Sequence[Path]) -> float | None:
    """Get `paths` out of the page cache; what is still there afterwards, as `resident_share`.

    First by posix_fadvise(2), which drops clean pages of these files only. Where that does not do it, and this user
    may, by /proc/sys/vm/drop_caches, which drops the page cache of the whole machine.
    """
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    share = resident_share(paths)
    if state_of(share) != COLD and drop_all():
        share = resident_share(paths)
    return share


def drop_all() -> bool:
    """Drop the clean pages of the whole machine by /proc/sys/vm/drop_caches (root only); False without permission."""
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
        return True
    return False


def fill(paths: Sequence[Path]) -> float | None:
    """Read `paths` once, whole; what is in the page cache then, as `resident_share`."""
    buffer = bytearray(_READ)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return resident_share(paths)


def files_below(directory: Path) -> list[Path]:
    """All files below `directory`, in order."""
    return sorted(path for path in directory.rglob("*") if path.is_file())
