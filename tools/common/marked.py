"""A part of a document that a program writes, between two comments that name it."""

from __future__ import annotations

import re


def between_markers(document: str, name: str) -> str:
    """The text between the markers of `name`. Raises ValueError if they are not both there, each on its line."""
    begin, end = _markers(name)
    match = re.search(rf"^{begin}\n(.*?\n)??{end}$", document, re.DOTALL | re.MULTILINE)
    if match is None:
        raise ValueError(f"the document must hold the lines {begin} and {end}")
    return (match.group(1) or "").rstrip("\n")


def replaced(document: str, name: str, new: str) -> str:
    """`document` with `new` between the markers of `name`. Raises ValueError as `between_markers`."""
    between_markers(document, name)
    begin, end = _markers(name)
    before, rest = document.split(begin, 1)
    return f"{before}{begin}\n{new}\n{end}{rest.split(end, 1)[1]}"


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
