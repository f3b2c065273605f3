"""The engines that the suite is about, and how a test drives one: save, look at what was recorded, load."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.checkpointing.engines.base import (
    CheckpointEngine,
    EngineOptions,
    FileState,
    PendingSave,
    SavedCheckpoint,
    SavedFile,
)
from megatron.checkpointing.engines.registry import builtin_engines, create_engine
from restart_trace.reading import RecordContext
from restart_trace.recorder import Operation, Recorder
from restart_trace.schema import check_record, type_of
from tests.engines import EXPECTED

ENVIRONMENT = "CONFORMANCE_ENGINES"  # names, separated by commas, to run the suite for instead; plug-ins, too
SHARED = "lazy-in-shared-files"  # engine lazy with --checkpoint-files-per-node
COMPRESSED = "lazy-in-compressed-files"  # engine lazy with --checkpoint-compression zstd
WAIT_S = 300.0


def engines_under_test() -> tuple[str, ...]:
    chosen = os.environ.get(ENVIRONMENT)
    return tuple(chosen.split(",")) if chosen else EXPECTED


def subjects_under_test() -> tuple[str, ...]:
    """The names of Subjects: the engines, and lazy three times, since it writes files of three formats."""
    engines = engines_under_test()
    return (*engines, SHARED, COMPRESSED) if "lazy" in engines else engines


def all_engines() -> tuple[str, ...]:
    """Every engine of this project, in the order of the registry."""
    return tuple(builtin_engines())


class Records:
    """A sink that keeps what is recorded, completed."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.problems: list[str] = []  # of the records as they are written
        self._context = RecordContext()

    def write(self, record: dict[str, Any]) -> bool:
        if type_of(record) != "process":  # that of the tests' recorder says of no process what it is
            self.problems += check_record(record)
        self.all.append(self._context.complete(record))
        return True

    def close(self) -> None:
        return None

    def spans(self, phase: str | None = None, detail: str | None = None) -> list[dict[str, Any]]:
        found = [r for r in self.all if r["type"] == "span" and phase in (None, r["phase"])]
        return [r for r in found if detail in (None, r.get("detail"))]

    def bytes(self, phase: str, detail: str | None = None) -> int:
        return sum(span.get("bytes", 0) for span in self.spans(phase, detail))


@dataclass
class Traced:
    """An operation of its own, with what was recorded of it."""

    op: Operation
    records: Records


def traced(operation: str) -> Traced:
    sink = Records()
    return Traced(Recorder(sink, {}).begin(operation), sink)


@dataclass
class Saved:
    """What a save left behind."""

    directory: Path
    files: list[SavedFile]
    traced: Traced

    @property
    def manifest(self) -> dict[str, SavedFile]:
        return {file.name: file for file in self.files}

    def on_disk(self) -> dict[str, int]:
        """Name -> bytes of every file in the directory."""
        return sizes(self.directory)


def sizes(directory: Path) -> dict[str, int]:
    """Name within `directory` -> bytes of every file in it."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in found}


@dataclass
class Subject:
    """One engine under test. Two of its objects are kept, since some start processes: the usual and the last one."""

    name: str
    _engines: dict[EngineOptions, CheckpointEngine] = field(default_factory=dict)

    def engine(self, **options: Any) -> CheckpointEngine:
        usual = EngineOptions(fsync=False, host_cache_bytes=1 << 29)
        wanted = replace(usual, **options)
        if wanted not in self._engines:
            for other in self._engines.keys() - {usual}:
                self._engines.pop(other).close()
            if self.name == SHARED:
                made = _lazy_in_shared_files(wanted)
            elif self.name == COMPRESSED:
                made = create_engine("lazy", replace(wanted, compress_files=True))
            else:
                made = create_engine(self.name, wanted)
            self._engines[wanted] = made
        return self._engines[wanted]

    def save(self, states: Mapping[str, Any], directory: Path, **options: Any) -> Saved:
        """Save without hurry, as the trainer does: the state is released at once and the end waited for."""
        directory.mkdir(parents=True, exist_ok=True)
        trace = traced("save")
        pending = self.engine(**options).begin_save(file_states(states), directory, trace.op)
        pending.release_state()
        return Saved(directory, pending.wait(), trace)

    def load(
        self, names: Sequence[str], saved: Saved, *, manifest: Mapping[str, SavedFile] | None = None, **options: Any
    ) -> dict[str, Any]:
        expected = saved.manifest if manifest is None else manifest
        return self.engine(**options).load(names, SavedCheckpoint(saved.directory, expected), traced("load").op)

    def close(self) -> None:
        while self._engines:
            _, engine = self._engines.popitem()
            engine.close()


def _lazy_in_shared_files(options: EngineOptions) -> CheckpointEngine:
    from megatron.checkpointing.engines.lazy.engine import LazyEngine

    class Sharing(LazyEngine):
        """The only rank of its files, which hears from a thread where its part lies."""

        def begin_save(self, files: Sequence[FileState], directory: Path, op: Operation) -> PendingSave:
            pending = super().begin_save(files, directory, op)

            def place() -> None:
                if (part := pending.shared_part()) is not None:
                    pending.take_place(self.place_parts([part])[0])

            threading.Thread(target=place, name="placing", daemon=True).start()
            return pending

    return Sharing(replace(options, files_per_node=1))


def file_states(states: Mapping[str, Any]) -> list[FileState]:
    return [FileState(name, state) for name, state in states.items()]


def wait_in_thread(pending: PendingSave) -> tuple[threading.Thread, list[Any]]:
    """Wait for a save on another thread, as the trainer does; the list gets its result or its exception."""
    outcome: list[Any] = []

    def wait() -> None:
        try:
            outcome.append(pending.wait())
        except BaseException as exc:  # handed to the test, which judges it
            outcome.append(exc)

    thread = threading.Thread(target=wait, name="waiting-for-save")
    thread.start()
    return thread, outcome
