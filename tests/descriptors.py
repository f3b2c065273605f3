"""The open descriptors of this process, for tests of what the code under test leaves open."""

from __future__ import annotations

import os


def open_descriptors() -> set[tuple[int, str]]:
    """Returns (number, what it is open on) of each; `after - before` is what was opened since and is open still.

    The numbers of descriptors before and after are no such proof: objects that earlier tests left behind are collected
    at any time, and close theirs.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:  # closed since, as that of the listing itself
            continue
    return found
