"""Sizes on the command line."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}


def parse_bytes(text: str) -> int:
    """Bytes in "1GiB", "500MB" or "1000000". Raises argparse.ArgumentTypeError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?i?B?)", text)
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 1GiB, 500MB or 1000000")
    return int(float(match[1]) * _UNITS[match[2]])
