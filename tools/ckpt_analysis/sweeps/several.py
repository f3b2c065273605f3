"""Compares sweeps: each configuration that at least two variants have measured."""

from __future__ import annotations

from pathlib import Path

from ..common.errors import CouldNotRunError
from ..compare.results import Comparison
from .bundle import opened
from .groups import Group, grouped, joined, measured_cells
from .read import read_sweep


def compared(named: dict[str, list[Path]]) -> tuple[dict[str, Comparison], list[str]]:
    """Title of a configuration -> its comparison, and titles of those that one variant alone has.

    `named`: name -> directories or bundles of sweeps; those of one name are repeats of each other. With one name the
    variants are engines, else "NAME: ENGINE". Raises CouldNotRunError if one cannot be read, or nothing is common.
    """
    groups: list[Group] = []
    for name, paths in named.items():
        for path in paths:
            with opened(path) as directory:
                prefix = "" if len(named) == 1 else f"{_short(name)}: "
                groups += grouped(measured_cells(read_sweep(directory)), prefix)
    everything = joined(groups)
    both = {group.title: group.comparison for group in everything if len(group.variants) > 1}
    if not both:
        raise CouldNotRunError("no configuration was measured by two of these; there is nothing to compare")
    return both, [group.title for group in everything if len(group.variants) == 1]


def _short(name: str) -> str:
    """The name as given, or the last part of a path."""
    return Path(name).name or name
