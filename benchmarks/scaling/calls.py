"""System calls of one simulated rank on files of the job, by what it did: out of strace's account.

What is removed of an old checkpoint is removed while a rank does other things, and counts by itself. Rank 0's
heartbeat in the directory of saves, four calls a second, is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_MARK = re.compile(r'"/mark/(\w+)/(begin|end)"')
REMOVAL = "removal"
_REMOVED = re.compile(r"^(?!.*\brename).*/\.incomplete_removed_")
_HEARTBEAT = re.compile(r"\butimensat\(.*/\.generations/")
_READ = re.compile(r"\b(?:read|pread64)\(.* = (\d+)$")


@dataclass
class Calls:
    """How many, and how many bytes were read."""

    number: int = 0
    read_bytes: int = 0


def calls_on(account: Path, directory: Path) -> Mapping[str, Calls]:
    """By operation; calls that name `directory`, or a file in it, by path or by descriptor."""
    found: dict[str, Calls] = {}
    doing: str | None = None
    for line in account.read_text(errors="replace").splitlines():
        mark = _MARK.search(line)
        if mark is not None:
            doing = mark[1] if mark[2] == "begin" else None
            found.setdefault(mark[1], Calls())
        elif str(directory) in line and "resumed>" not in line and _HEARTBEAT.search(line) is None:
            what = REMOVAL if _REMOVED.search(line) is not None else doing
            if what is not None:
                calls = found.setdefault(what, Calls())
                calls.number += 1
                read = _READ.search(line)
                calls.read_bytes += int(read[1]) if read is not None else 0
    return found
