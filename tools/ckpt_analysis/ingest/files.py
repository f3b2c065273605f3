"""Reads trace files into memory, several at a time, and parses the process record that each begins with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from restart_trace.regular import read_regular

from ..common.problems import Problem
from .discover import TraceFile
from .lines import READ, other_version, parse_json, placed, process_record

_COORDINATES = b'\n{"type":"coordinates",'
# Decoded at once: some 70,000 records. Much larger buffers would each be of new memory, whose pages take longer to come
# by than to fill.
BATCH_BYTES = 16 << 20


@dataclass(frozen=True)
class Head:
    """A file whose records can be used: `process` is the first of them."""

    file: TraceFile
    process: dict[str, Any]


@dataclass(frozen=True)
class FileText:
    """One file in memory: whole lines, the second from `start`. `index` is its place among the heads of its batch."""

    index: int
    head: Head
    content: bytes
    start: int

    def lines(self) -> list[bytes]:
        """The lines after the first, without their newlines."""
        return self.content[self.start :].split(b"\n")[:-1]


@dataclass
class Reading:
    """What the files of a batch themselves say, filled while they are read."""

    heads: list[Head]
    problems: list[Problem]
    other_versions: dict[int, dict[str, int]]  # version -> name of file -> records

    def add(self, more: Reading) -> None:
        """What the files of the next batch say."""
        self.heads += more.heads
        self.problems += more.problems
        for version, counts in more.other_versions.items():
            self.other_versions.setdefault(version, {}).update(counts)


def batches(files: Sequence[TraceFile], sizes: Sequence[int]) -> Iterator[tuple[list[TraceFile], int]]:
    """The files, which have `sizes` bytes, in batches of some BATCH_BYTES, with the bytes of each batch.

    Every file is in one batch, so whatever concerns one process can be worked out batch by batch.
    """
    batch: list[TraceFile] = []
    num_bytes = 0
    for file, size in zip(files, sizes, strict=True):
        batch.append(file)
        num_bytes += size
        if num_bytes >= BATCH_BYTES:
            yield batch, num_bytes
            batch, num_bytes = [], 0
    if batch:
        yield batch, num_bytes


def read_files(files: Sequence[TraceFile], reading: Reading) -> list[FileText]:
    """Files in memory, but for those that cannot be used: they become problems."""
    texts = (_read(file, reading) for file in files)
    return [text for text in texts if text is not None]


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
    end = content.find(b"\n") + 1 or len(content)
    process, faults = process_record(content[:end], file)
    if process is None:
        message = f"{name}: line 1: {faults[0]}: nothing says which process the file is of, and it was left out"
        reading.problems.append(Problem("no_process_record", message, {"file": name}))
        return None
    version = other_version(process)
    if version is not None:
        reading.other_versions.setdefault(version, {})[name] = content.count(b"\n")
        return None
    rank, cycle = process["rank"], process["cycle"]
    if file.rank is not None and (rank, cycle) != (file.rank, file.cycle):
        message = f"{name}: its records are of rank {rank}, cycle {cycle}; the file was left out"
        data = {"file": name, "rank": rank, "cycle": cycle}
        reading.problems.append(Problem("wrong_file_name", message, data))
        return None
    content = _whole_lines(name, content, reading)
    # Hooks learn the rank's place after the first record; to look for it in every trace would take time.
    place = content.rfind(_COORDINATES) if process["instrument"] == "hooks" else -1
    if place >= 0:
        process = placed(process, content[place + 1 : content.index(b"\n", place + 1)])
    reading.heads.append(Head(file, process))
    return FileText(len(reading.heads) - 1, reading.heads[-1], content, end)


def _whole_lines(name: str, content: bytes, reading: Reading) -> bytes:
    """The content without a last line that lacks its newline, unless that is a record all the same."""
    if content.endswith(b"\n"):
        return content
    end = content.rfind(b"\n") + 1
    try:
        parse_json(content[end:])
    except ValueError:  # includes UnicodeDecodeError
        number = content.count(b"\n") + 1
        message = f"{name}: the last line ({number}) is cut short and was left out"
        reading.problems.append(Problem("torn_line", message, {"file": name, "line": number}))
        return content[:end]
    return content + b"\n"


def version_problems(counts: dict[int, dict[str, int]]) -> list[Problem]:
    """One problem per version that this tool does not know: its names may mean something else."""
    problems: list[Problem] = []
    for version, files in sorted(counts.items()):
        count, names = sum(files.values()), sorted(files)
        message = (
            f"{count} records of {len(names)} file(s) ({names[0]}, ...) have schema version {version}; this tool reads "
            f"version {READ}, so they were left out: use the tool of that version"
        )
        data = {"version": version, "count": count, "files": names}
        problems.append(Problem("unknown_schema_version", message, data))
    return problems
