"""Checks every record of a trace file against the format, line by line. Slower than reading, and stricter.

Imports the standard library only, so that its worker processes start fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from restart_trace.regular import read_regular
from restart_trace.schema import RECORD_FIELDS

from .discover import TraceFile
from .lines import READ, LineReader, other_version, process_record


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a file; `line` is 0 for the file as a whole."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.reason}"


@dataclass(frozen=True)
class Checked:
    """What one file held."""

    records: int
    num_bytes: int
    faults: list[Fault]


def check_file(file: TraceFile) -> Checked:
    """Check the records of a file against the format and its name."""
    path = file.path
    try:
        content = read_regular(path)
    except OSError as exc:
        return Checked(0, 0, [Fault(path.name, 0, str(exc.strerror))])
    if not content:
        return Checked(0, 0, [Fault(path.name, 0, "has no records")])
    lines = content.split(b"\n")
    torn = lines.pop()  # what follows the last newline
    faults = [Fault(path.name, number, reason) for number, reason in _faults(lines, file)]
    if torn:
        faults.append(Fault(path.name, len(lines) + 1, "the last line has no newline: cut short"))
    return Checked(len(lines), len(content), sorted(faults, key=lambda fault: fault.line or len(lines) + 2))


def _faults(lines: list[bytes], file: TraceFile) -> list[tuple[int, str]]:
    """(line, what is wrong with it) in their order; line 0 is the file as a whole."""
    if not lines:
        return []
    process, wrong = process_record(lines[0], file)
    if process is not None:
        if (version := other_version(process)) is not None:
            return [(1, f"schema version {version}, not {READ}: no record of the file was checked")]
        if file.rank is not None and (process["rank"], process["cycle"]) != (file.rank, file.cycle):
            wrong.append(f"is of rank {process['rank']}, cycle {process['cycle']}, which the name of the file is not")
        wrong += [f"unknown field {name}" for name in process if name not in RECORD_FIELDS["process"]]
    found = [(1, reason) for reason in wrong]
    reader = LineReader(process)
    for number, line in enumerate(lines[1:], start=2):
        found += [(number, reason) for reason in reader.read(line, number).faults]
    return found + [(0, reason) for reason in reader.unfinished()]
