"""Reads a log, line by line: each format takes what it knows in a line into the `Draft` of the run."""

from __future__ import annotations

import re
from datetime import datetime

from .draft import PREFIX, Draft
from .formats import HANDLERS

_MOMENT = re.compile(rf"{PREFIX}\[(\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}})\]")


def feed(run: Draft, line: str) -> None:
    """Take the next line of the log. Raises CouldNotRunError if it contradicts an earlier one."""
    run.line_number += 1
    line = line.rstrip("\r\n")
    dated = _MOMENT.match(line)
    run.moment = datetime.strptime(dated[1], "%Y-%m-%d %H:%M:%S,%f") if dated else None
    if run.listing.feed(line):
        return
    found = [(match, handle) for pattern, handle in HANDLERS for match in pattern.finditer(line)]
    for match, handle in sorted(found, key=lambda one: one[0].start()):
        handle(run, *match.groups())
    run.known_lines += bool(found)
    if run.saves and not run.saves[-1].completed:
        run.saves[-1].seen_at(run.moment)
