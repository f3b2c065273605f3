"""Command line of ckpt-replay. Exit status: 0 measured, 1 an engine failed, 2 could not run."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.checkpointing.engines.errors import EngineUnavailableError, UnknownEngineError
from megatron.config import ConfigError
from megatron.config.uris import Location, ObjectUri, below, is_uri
from megatron.fileio.objects.errors import ObjectStoreError
from restart_trace.cycles import launch_key

from ..common.cli import CHECK_FAILED, COULD_NOT_RUN, OK, write_stdout
from ..common.machine import filesystem_of, machine
from .answer import sentence
from .figures import analyse
from .launch import TaskError, worker_group
from .locations import check_writable, remove
from .options import ALL, parse_arguments, request_from
from .plan import ReplayError, Request, location_of
from .replay import Replay
from .striping import check_striping, set_striping
from .table import render

_MOST_STORAGE_BYTES = 2 << 30
_ROOM = 1.05  # a checkpoint may be larger than its tensors by this factor
_ROOM_BYTES = 64 << 20  # and by this many bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # exit through `finally`, which removes files
    try:
        figures = _replay(arguments)
        if figures is None:  # another process of the launcher prints the report
            return OK
        text = json.dumps(figures)
        if arguments.output is not None:
            arguments.output.write_text(text + "\n")
        write_stdout((text if arguments.format == "json" else render(figures, show_all=arguments.all)) + "\n")
    except (
        ReplayError,
        ConfigError,
        UnknownEngineError,
        EngineUnavailableError,
        TaskError,
        ObjectStoreError,
        OSError,
    ) as exc:
        print(f"ckpt-replay: {str(exc).replace('--checkpoint-engine', '--engine')}", file=sys.stderr)
        return COULD_NOT_RUN
    return CHECK_FAILED if any(found["failed"] for found in figures["engines"].values()) else OK


def _replay(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The figures, on the process that prints the report. Raises what `main` catches."""
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    request = request_from(arguments, int(os.environ["WORLD_SIZE"]) if launched else None)
    world_size = len(request.share.ranks)
    key = launch_key(os.environ)
    name = hashlib.sha256(key.encode()).hexdigest()[:12] if launched else f"{os.getpid()}_{time.time_ns():x}"
    mine = (int(os.environ["RANK"]),) if launched else tuple(range(world_size))
    _check_directories(request)
    if request.striping is not None:
        check_striping(request.striping, Path(request.directory))
    # The directory is removed after the workers have ended, so that files they write until then are removed, too.
    with (
        _own_location(location_of(request.directory), name, 0 in mine and not request.keep) as location,
        tempfile.TemporaryDirectory(prefix="ckpt_replay_notes_") as notes,
        worker_group(mine, world_size, launched, Path(notes)) as workers,
    ):
        prepared = workers.prepare(request)
        left_out = prepared["problems"]
        request = _settled(request, prepared, explicit=arguments.engine != ALL)
        if workers.leads:
            _make(location, request)
        kind = filesystem_of(location) if isinstance(location, Path) else location.store.in_words
        before = machine() | {"filesystem": kind}
        samples = Replay(request, workers, location, f"{key}/{name}", _report if workers.leads else _ignore).run()
    if not workers.leads:
        return None
    kept = str(location) if request.keep else None
    figures = analyse(request, samples, left_out, before) | {"directory": request.directory, "kept": kept}
    figures["verdict"] = None if arguments.no_verdict else sentence(figures)
    return figures


def _settled(request: Request, prepared: dict[str, Any], *, explicit: bool) -> Request:
    """The request, completed with what `prepare` found. Raises ReplayError if this machine cannot carry it out."""
    problems = prepared["problems"]
    if explicit and problems:
        raise ReplayError("; ".join(problems.values()))
    engines = tuple(name for name in request.engines if name not in problems)
    if not engines:
        raise ReplayError("--engine all: none can run here: " + "; ".join(problems.values()))
    largest = max(prepared["bytes"])
    storage = request.storage_bytes or min(largest, _MOST_STORAGE_BYTES)
    request = replace(request, engines=engines, storage_bytes=storage)
    _check_room(request, largest)
    return request


def _check_directories(request: Request) -> None:
    """Create --dir and --trace-dir if they do not exist; check that a bucket can be written.

    Raises ReplayError if one cannot be written, or if its parent does not exist, as with a mistyped path.
    """
    for flag, name in (("--dir", request.directory), ("--trace-dir", request.trace_dir)):
        if name is None:
            continue
        if is_uri(str(name)):
            if flag != "--dir":
                raise ReplayError(f"{flag} {name}: a trace is written to files; give a directory")
            uri = location_of(request.directory)
            assert isinstance(uri, ObjectUri)
            check_writable(uri)
            continue
        try:
            if not Path(name).parent.is_dir():
                raise ReplayError(
                    f"{flag} {name}: {Path(name).parent} is not a directory; create it first, or correct the path"
                )
            Path(name).mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=name):
                pass
        except OSError as exc:
            raise ReplayError(f"{flag} {name}: cannot be written: {exc.strerror}; give another") from exc


def _check_room(request: Request, largest: int) -> None:
    """Raises ReplayError if --dir has less space than the files that exist there at the same time, naming both."""
    ranks, directory = len(set(request.share.ranks)), request.directory
    if request.in_object_storage:
        return
    checkpoint = int(largest * ranks * _ROOM) + _ROOM_BYTES
    kept = checkpoint * request.checkpoints * (len(request.engines) if request.keep else 1)
    kept += checkpoint * len(request.engines) * (request.readers > 0)  # what readers load
    needed = max(kept, request.storage_bytes * ranks if request.measure_storage else 0)
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ReplayError(
            f"--dir {directory}: {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed ({ranks} ranks of "
            f"{largest / 1e9:.2f} GB{f', {request.checkpoints} checkpoints' * (request.checkpoints > 1)}"
            f"{', kept for every engine' * request.keep}); give another, or --limit-bytes"
        )


@contextlib.contextmanager
def _own_location(parent: Location, name: str, removed: bool) -> Iterator[Location]:
    """A new directory, or prefix, of this replay below `parent`; `removed`: with its contents at the end."""
    location = below(parent, f"ckpt_replay_{name}")
    try:
        yield location
    finally:
        if removed:
            remove(location)


def _make(location: Location, request: Request) -> None:
    if isinstance(location, Path):
        location.mkdir()
        if request.striping is not None:
            set_striping(request.striping, location)


def _report(text: str) -> None:
    print(text, file=sys.stderr)


def _ignore(text: str) -> None:
    """Ignores progress: another process reports it."""
