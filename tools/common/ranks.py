"""Ranks on the command line."""

from __future__ import annotations

import argparse


def parse_rank_ranges(text: str) -> list[tuple[int, int]]:
    """ "0-7,12" to [(0, 7), (12, 12)]. Raises argparse.ArgumentTypeError for anything else."""
    ranges = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of ranks such as 0-7,12")
        ranges.append((int(first), int(last or first)))
    return ranges
