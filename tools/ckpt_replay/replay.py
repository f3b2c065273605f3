"""The order of a replay: in every repeat each engine saves and loads once, and the storage is measured beside them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .launch import Crew, TaskError
from .plan import LOAD_COLD, LOAD_WARM, SAVE, STORAGE, Request, Task


@dataclass
class Samples:
    """All that was measured: engines[name][kind][repeat][process], storage[repeat][process]; the raw records.

    `failed`: engine -> what it said; it takes no part in later repeats.
    """

    engines: dict[str, dict[str, list[list[dict[str, Any]]]]] = field(default_factory=dict)
    storage: list[list[dict[str, Any]]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


class Replay:
    """Runs `request` with `crew` below `place`, a directory of its own. `launch_id` is new in every replay."""

    def __init__(
        self, request: Request, crew: Crew, place: Path, launch_id: str, progress: Callable[[str], None]
    ) -> None:
        self._request = request
        self._crew = crew
        self._place = place
        self._launch_id = launch_id
        self._progress = progress
        self._tasks = 0
        self.samples = Samples(engines={name: {} for name in request.engines})

    def run(self) -> Samples:
        """Raises TaskError if measuring the storage fails; an engine that fails is noted and left out from then on."""
        variants = [*self._request.engines, *([STORAGE] if self._request.measure_storage else [])]
        for repeat in range(self._request.repeat):
            first = repeat % len(variants)
            for variant in [*variants[first:], *variants[:first]]:
                self._progress(f"repeat {repeat + 1} of {self._request.repeat}: {variant}")
                if variant == STORAGE:
                    self._storage(repeat)
                elif variant not in self.samples.failed:
                    self._engine(variant, repeat)
        return self.samples

    def _storage(self, repeat: int) -> None:
        found = self._crew.run(self._task(STORAGE, repeat, None, self._place))
        if found is not None:
            self.samples.storage.append(found)

    def _engine(self, name: str, repeat: int) -> None:
        directory = self._place / name
        try:
            for kind in (SAVE, *([LOAD_COLD] if self._request.cold else []), LOAD_WARM):
                found = self._crew.run(self._task(kind, repeat, name, directory))
                if found is not None:
                    self.samples.engines[name].setdefault(kind, []).append(found)
        except TaskError as exc:
            self.samples.failed[name] = str(exc)
            self._progress(f"{name} failed: {exc}")
        last = repeat == self._request.repeat - 1
        if self._crew.leads and not (self._request.keep and last):
            shutil.rmtree(directory, ignore_errors=True)

    def _task(self, kind: str, repeat: int, engine: str | None, directory: Path) -> Task:
        self._tasks += 1
        return Task(
            kind=kind,
            index=self._tasks,
            repeat=repeat,
            engine=engine,
            directory=str(directory),
            first_step=1 + repeat * (self._request.warmup_saves + 1),
            launch_id=f"{self._launch_id}-{self._tasks}",
            notes=str(self._crew.notes),
            request=asdict(self._request),
        )
