"""The file system that a directory is on, according to the kernel's list of mounts. Reads /proc only, no storage."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from restart_trace.redaction import redact_text

_MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """A mounted file system: its type, source, mount point and mount options."""

    fs_type: str
    source: str
    point: str
    options: str

    def __str__(self) -> str:
        """As mount(8) lists it, without passwords."""
        return redact_text(f"{self.source} on {self.point} type {self.fs_type} ({self.options})")


def mount_of(directory: str | Path) -> Mount | None:
    """The mount that `directory` is on, or will be on once it exists; None if the kernel does not list mounts."""
    try:
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return None
    return mount_among(lines, os.path.realpath(directory))


def storage_fields(use: str, directory: str | Path | None) -> dict[str, str]:
    """Fields of the runtime record for `use` ("save" or "load"): the directory of checkpoints, and its mount."""
    if not directory:
        return {}
    if "://" in str(directory):  # object storage has no mount
        return {f"{use}_dir": str(directory)}
    mount = mount_of(directory)
    return {f"{use}_dir": str(directory)} | ({f"{use}_mount": str(mount)} if mount else {})


def mount_among(lines: Iterable[str], directory: str) -> Mount | None:
    """The mount of an absolute path without links, from the lines of mountinfo (proc(5)); None if there is none."""
    found: Mount | None = None
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, of_fs = before.split(), after.split()
        if len(fields) < 6 or len(of_fs) < 2:
            continue
        point = _plain(fields[4])
        # Of two mounts on the same point the later one is visible.
        if f"{directory}/".startswith(f"{point.rstrip('/')}/") and (found is None or len(point) >= len(found.point)):
            found = Mount(of_fs[0], _plain(of_fs[1]), point, fields[5])
    return found


def _plain(text: str) -> str:
    """`text` with its octal escapes decoded, which the kernel writes for spaces and some other characters."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
