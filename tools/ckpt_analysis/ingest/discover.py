"""Finds the trace files of a directory by their names."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from restart_trace.schema import CYCLE_FILE_REGEX, RANK_FILE_REGEX, SUPERVISOR_FILE_REGEX

from ...common.sweep_files import SWEEP
from ..common.errors import CouldNotRunError

DEFAULT_SUBDIRECTORY = "restart_trace"  # where a run leaves its trace in its save directory
IMPORTED_FILE = "imported.json"  # what `import` leaves in its directory instead of a trace
# Limits of the search for traces below a directory that holds none: it must not walk a file system.
_MOST_SEARCHED = 200  # directories
_MOST_NAMES = 1000  # of each directory
_MOST_NAMED = 3  # traces
_NOTHING_TRACED = (
    "restart-trace writes when a rank starts: a Python process that has RANK in its environment and imports torch, or "
    "joins a process group. Python started with -E, -I or -S, or by a script that sets PYTHONPATH anew, is not "
    "traced (docs/guides/trace_your_job.md)"
)


class LogDirectoryError(CouldNotRunError):
    """A directory that cannot be analysed; the message says why and what to give instead."""


@dataclass(frozen=True)
class TraceFile:
    """One record file. `rank` and `cycle` are those of its name; both are None for a supervisor's."""

    path: Path
    rank: int | None
    cycle: int | None

    def size(self) -> int:
        """Bytes; 0 if the system does not tell, which reading it will then report."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


@dataclass(frozen=True)
class Listing:
    """Record files of a trace directory and the cycles that were claimed in it.

    `copies` are files of a rank and cycle that another of the `files` has, too, each with that file.
    """

    directory: Path
    files: list[TraceFile]
    claimed_cycles: list[int]
    copies: list[tuple[TraceFile, TraceFile]]


def list_trace(given: Path) -> Listing:
    """List `given`, or its subdirectory `restart_trace` if `given` itself has no rank file.

    Raises LogDirectoryError if there is no such directory, it cannot be read, or holds no rank file.
    """
    listing = list_growing(given)
    if not _has_ranks(listing):
        if (given / IMPORTED_FILE).is_file():
            raise LogDirectoryError(
                f"{given}: an imported run has operations and no spans: use report, summary, compare or project"
            )
        raise LogDirectoryError(_why_no_trace(given))
    return listing


def list_growing(given: Path) -> Listing:
    """As `list_trace`, but there may be no rank file yet."""
    listing = list_files(given)
    nested = given / DEFAULT_SUBDIRECTORY
    return listing if _has_ranks(listing) or not nested.is_dir() else list_files(nested)


def _why_no_trace(given: Path) -> str:
    """The message about a directory without a trace; it names traces that are one or two levels below."""
    if not os.listdir(given):
        return f"{given}: no restart trace here (it is empty): no rank was traced. {_NOTHING_TRACED}"
    if (given / SWEEP).is_file():
        return (
            f"{given}: is the --out of a sweep, which has a trace for each cell: use sweep, compare, validate or bundle"
        )
    found = f"{given}: no restart trace here (it holds other things): "
    if below := _newest_traces_below(given):
        *others, last = map(str, below)
        return f"{found}did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
    return (
        f"{found}looked for rank_RRRRR_cycle_CCC.jsonl in it and in {DEFAULT_SUBDIRECTORY}/ below it. "
        "Give the directory named by --restart-trace-dir or --save, or by --trace-dir of restart-trace"
    )


def _newest_traces_below(given: Path) -> list[Path]:
    """The newest traces in subdirectories of `given` and in their subdirectories, newest first."""
    children = _subdirectories(given)
    searched = islice((path for child in children for path in (child, *_subdirectories(child))), _MOST_SEARCHED)
    return sorted(filter(_holds_trace, searched), key=_changed_ns, reverse=True)[:_MOST_NAMED]


def _subdirectories(directory: Path) -> list[Path]:
    """Its subdirectories, the last changed first. Those that cannot be read are left out."""
    return sorted((Path(entry) for entry in _entries(directory) if entry.is_dir()), key=_changed_ns, reverse=True)


def _holds_trace(directory: Path) -> bool:
    return any(re.match(RANK_FILE_REGEX, entry.name) for entry in _entries(directory))


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            yield from islice(entries, _MOST_NAMES)
    except OSError:
        return


def _changed_ns(directory: Path) -> int:
    try:
        return directory.stat().st_mtime_ns
    except OSError:
        return 0


def _has_ranks(listing: Listing) -> bool:
    return any(file.rank is not None for file in listing.files)


def list_files(directory: Path) -> Listing:
    """List `directory` itself, which may hold no rank file yet. Raises LogDirectoryError if it cannot be read."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        raise LogDirectoryError(f"{directory}: no such directory. Give the directory of a trace") from None
    except NotADirectoryError:
        raise LogDirectoryError(
            f"{directory}: is a file. Give the directory of a trace; the log of a job without one is read by "
            f"`ckpt-analysis import {shlex.quote(str(directory))}`"
        ) from None
    except OSError as exc:  # no permission, input/output error
        raise LogDirectoryError(
            f"{directory}: cannot be read as a directory: {exc.strerror}. Give the directory of a trace"
        ) from exc
    files: list[TraceFile] = []
    cycles: list[int] = []
    copies: list[tuple[TraceFile, TraceFile]] = []
    seen: dict[tuple[int, int], TraceFile] = {}
    # The trainer writes the shortest name with the numbers, so that is the original of several.
    for name in sorted(names, key=lambda name: (len(name), name)):
        if match := re.match(RANK_FILE_REGEX, name):
            file = TraceFile(directory / name, int(match.group(1)), int(match.group(2)))
            original = seen.setdefault((int(match.group(1)), int(match.group(2))), file)
            if original is file:
                files.append(file)
            else:
                copies.append((file, original))
        elif re.match(SUPERVISOR_FILE_REGEX, name):
            files.append(TraceFile(directory / name, None, None))
        elif match := re.match(CYCLE_FILE_REGEX, name):
            cycles.append(int(match.group(1)))
    files.sort(key=_place)
    return Listing(directory, files, cycles, copies)


def _place(file: TraceFile) -> tuple[bool, int, int, str]:
    """Ranks first, in the order of their numbers."""
    return file.rank is None, file.rank or 0, file.cycle or 0, file.path.name
