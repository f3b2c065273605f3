"""Keeps decoded logs as Parquet, so that they are decoded only once.

The name of an entry is a digest of every file's name, size, modification time and inode, and of the versions of the
tables and of the log format: changed logs have another name, so an entry is never stale.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from restart_trace.regular import open_regular, read_regular
from restart_trace.schema import SCHEMA_VERSION

from ..common.problems import Problem
from ..common.progress import Progress
from ..common.table_files import write_table
from .discover import Listing, TraceFile
from .files import Head
from .records import Records

CACHE_VERSION = 5  # rises with every change of the tables of `Records`, or of what reading leaves out
DIRECTORY = ".ckpt_analysis_cache"  # beside the logs
FROM_BYTES = 16 << 20  # smaller logs are read as fast as they would be found
# A file that changed this recently may change again within one tick of the file system's clock.
_SETTLED_NS = 1_000_000_000
_ENTRY = re.compile(r"[0-9a-f]{32}")
_DRAFT = re.compile(rf"\.{_ENTRY.pattern}\.[0-9]+")

Loaded = tuple[Records, list[Head], list[Problem]]


@dataclass(frozen=True)
class Cache:
    """Where entries are kept: `directory`, or beside the logs if it is None."""

    directory: Path | None
    progress: Progress
    from_bytes: int = FROM_BYTES

    def open(self, listing: Listing) -> Entry | None:
        """The place of these logs in the cache; None if they are not worth one or cannot be told apart."""
        try:
            states = [_state(file) for file in listing.files]
        except OSError:  # reading will say what is wrong with that file
            return None
        if sum(state["size"] for state in states) < self.from_bytes:
            return None
        if max(state["mtime_ns"] for state in states) > time.time_ns() - _SETTLED_NS:
            self.progress.remark("the logs are still being written, so their Parquet cache is left alone")
            return None
        where = listing.directory / DIRECTORY
        if self.directory is not None:
            logs = hashlib.sha256(os.fsencode(listing.directory.resolve())).hexdigest()[:16]
            where = self.directory / logs
        versions = {"cache": CACHE_VERSION, "schema": SCHEMA_VERSION, "polars": pl.__version__}
        text = json.dumps([versions, states], sort_keys=True)
        return Entry(listing, where / hashlib.sha256(text.encode()).hexdigest()[:32], self.progress)


@dataclass(frozen=True)
class Entry:
    """What is or will be kept of one set of files, in the directory `path`."""

    listing: Listing
    path: Path
    progress: Progress

    def load(self) -> Loaded | None:
        """What was stored; None if there is nothing, or it is damaged."""
        try:
            facts = json.loads(read_regular(self.path / "facts.json"))
            tables = {name: _read_table(self.path / f"{name}.parquet") for name in facts["heights"]}
            whole = {name: table.height for name, table in tables.items()} == facts["heights"]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, pl.exceptions.PolarsError) as exc:
            self.progress.remark(f"{self.path}: this cache entry is damaged and is made anew: {exc}")
            return None
        if not whole:
            self.progress.remark(f"{self.path}: this cache entry is incomplete and is made anew")
            return None
        heads = [Head(self.listing.files[place], process) for place, process in facts["heads"]]
        return Records(**tables), heads, [Problem(**problem) for problem in facts["problems"]]

    def store(self, records: Records, heads: list[Head], problems: list[Problem]) -> None:
        """Keep what was read, whole or not at all, and remove what is out of date. Failure is a remark."""
        if any(problem.kind == "unreadable_file" for problem in problems):
            return  # a change of permissions would not show in the name of the entry
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            draft.mkdir(parents=True)
            _write(draft, self.listing.files, records, heads, problems)
            if self.path.exists():
                shutil.rmtree(self.path)
            draft.rename(self.path)
            _remove_others(self.path)
        except OSError as exc:
            reason = exc.strerror or exc
            self.progress.remark(
                f"{self.path.parent}: no Parquet cache was kept here ({reason}); --cache-dir takes another place"
            )
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _read_table(path: Path) -> pl.DataFrame:
    """Raises OSError or PolarsError."""
    with open(open_regular(path), "rb"):  # polars would wait for the writer of a FIFO
        return pl.read_parquet(path)


def _state(file: TraceFile) -> dict[str, Any]:
    status = file.path.stat()
    return {"name": file.path.name, "size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}


def _write(draft: Path, files: list[TraceFile], records: Records, heads: list[Head], problems: list[Problem]) -> None:
    for name, table in records.tables.items():
        write_table(table, draft / f"{name}.parquet", "parquet", compression="lz4", statistics=False)
    places = {file: place for place, file in enumerate(files)}
    facts = {
        "heights": {name: table.height for name, table in records.tables.items()},
        "heads": [(places[head.file], head.process) for head in heads],
        "problems": [asdict(problem) for problem in problems],
    }
    (draft / "facts.json").write_text(json.dumps(facts))


def _remove_others(path: Path) -> None:
    """Remove entries of the same logs in an earlier state, and drafts that a killed process left a day ago."""
    for other in path.parent.iterdir():
        is_entry = _ENTRY.fullmatch(other.name) is not None
        is_old_draft = _DRAFT.fullmatch(other.name) is not None and other.lstat().st_mtime < time.time() - 86_400
        if other != path and (is_entry or is_old_draft):
            shutil.rmtree(other, ignore_errors=True)
