"""Trace files read into memory, a batch of them at a time, with the process record that each begins with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from restart_trace.regular import read_regular

from ..common.problems import Problem
from .discover import TraceFile
from .head import Head, process_record
from .lines import LineFault, parse_json

BATCH_BYTES = 16 << 20  # decoded at once: some 50,000 records


@dataclass(frozen=True)
class FileText:
    """One file in memory. `index` is its place among the heads; `body` holds whole lines."""

    index: int
    name: str
    body: bytes
    lines: int
    torn: LineFault | None


@dataclass
class Reading:
    """What the files themselves say, filled while their batches are read."""

    heads: list[Head]
    problems: list[Problem]


def read_batches(files: list[TraceFile], reading: Reading) -> Iterator[tuple[list[FileText], int]]:
    """Batches of files with the bytes read; files that are empty or cannot be read become problems.

    Every file is in one batch, so whatever concerns one process can be worked out batch by batch.
    """
    batch: list[FileText] = []
    num_bytes = 0
    for file in files:
        text = _read(file, reading)
        if text is None:
            continue
        batch.append(text)
        num_bytes += len(text.body)
        if num_bytes >= BATCH_BYTES:
            yield batch, num_bytes
            batch, num_bytes = [], 0
    yield batch, num_bytes


def _read(file: TraceFile, reading: Reading) -> FileText | None:
    name = file.path.name
    try:
        content = read_regular(file.path)
    except OSError as exc:
        reading.problems.append(Problem("unreadable_file", f"{name}: {exc.strerror}", {"file": name}))
        return None
    if not content:
        message = f"{name}: has no records: its process died before the first, or the disk was full"
        reading.problems.append(Problem("empty_file", message, {"file": name}))
        return None
    process, fault = process_record(content[: content.find(b"\n") + 1] or content, file)
    if fault:
        reading.problems.append(Problem("no_process_record", f"{name}: line 1: {fault}", {"file": name}))
    reading.heads.append(Head(file, process))
    return _whole_lines(len(reading.heads) - 1, name, content)


def _whole_lines(index: int, name: str, content: bytes) -> FileText:
    """Part a last line without its newline from the rest, unless it is a record all the same."""
    if content.endswith(b"\n"):
        return FileText(index, name, content, content.count(b"\n"), None)
    end = content.rfind(b"\n") + 1
    lines = content.count(b"\n")
    try:
        parse_json(content[end:])
    except ValueError:  # includes UnicodeDecodeError
        return FileText(index, name, content[:end], lines, LineFault(lines + 1, "cut short", True))
    return FileText(index, name, content + b"\n", lines + 1, None)
