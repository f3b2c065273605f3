"""The order of a replay: in every repeat each engine saves and loads once, and the storage itself is measured.

With SAVES_THEN_LOADS the storage is measured first, then each engine does all its saves, and then its loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.config.uris import Location, below
from restart_trace.clock import now_ns

from .launch import TaskError, WorkerGroup
from .locations import remove
from .plan import IN_MEMORY, LOAD, LOAD_BESIDE, LOAD_COLD, LOAD_WARM, SAVE, SAVES_THEN_LOADS, STORAGE, Request, Task


@dataclass
class Samples:
    """The raw records of all measurements: engines[name][kind][repeat][process], storage[repeat][process].

    Of LOAD_BESIDE engines[name][kind] has an item for each reader and repeat. `failed`: engine -> its error; it is left
    out of later repeats. `failures`: engine -> kind -> the error of each task that failed.
    """

    engines: dict[str, dict[str, list[list[dict[str, Any]]]]] = field(default_factory=dict)
    storage: list[list[dict[str, Any]]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    failures: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    # [name][kind][repeat]: seconds of a task, including the set-up of its processes; not of saves with readers.
    tasks_s: dict[str, dict[str, list[float]]] = field(default_factory=dict)


@dataclass
class Replay:
    """Runs `request` with `workers` in `location`, which no other replay uses. `launch_id`: new for every replay."""

    request: Request
    workers: WorkerGroup
    location: Location
    launch_id: str
    progress: Callable[[str], None]
    samples: Samples = field(default_factory=Samples)
    _tasks: int = 0
    _earlier: set[str] = field(default_factory=set)  # engines with a checkpoint for readers
    _unsaved: set[Location] = field(default_factory=set)  # directories without a checkpoint: the save there failed

    def run(self) -> Samples:
        """Raises TaskError if measuring the storage fails; an engine that fails is recorded and left out afterwards."""
        self.samples.engines = {name: {} for name in self.request.engines}
        if self.request.operations == SAVES_THEN_LOADS:
            self._saves_then_loads()
        else:
            self._interleaved()
        return self.samples

    def _interleaved(self) -> None:
        variants = [*self.request.engines, *([STORAGE] if self.request.measure_storage else [])]
        for repeat in range(self.request.repeat):
            first = repeat % len(variants)
            for variant in [*variants[first:], *variants[:first]]:
                self.progress(f"repeat {repeat + 1} of {self.request.repeat}: {variant}")
                if variant == STORAGE:
                    self._storage(repeat)
                elif variant not in self.samples.failed:
                    self._engine(variant, repeat)

    def _saves_then_loads(self) -> None:
        """Each save has a directory of its own, since a load reads the newest checkpoint of a directory."""
        repeats = range(self.request.repeat)
        for repeat in repeats if self.request.measure_storage else ():
            self.progress(f"repeat {repeat + 1} of {self.request.repeat}: {STORAGE}")
            self._storage(repeat)
        for name in self.request.engines:
            directory = below(self.location, name)
            for kind in [SAVE, *self._loads(name)]:
                for repeat in repeats:
                    place = below(directory, f"save_{repeat}")
                    if name not in self.samples.failed and place not in self._unsaved:
                        self.progress(f"{name}: {kind} {repeat + 1} of {self.request.repeat}")
                        self._measure(name, repeat, [kind], place)
            if self.workers.leads and not self.request.keep:
                remove(directory)

    def _storage(self, repeat: int) -> None:
        found = self.workers.run(self._task(STORAGE, repeat, None, self.location))
        if found is not None:
            self.samples.storage.append(found)

    def _engine(self, name: str, repeat: int) -> None:
        directory = below(self.location, name)
        self._measure(name, repeat, self._kinds(name, repeat), directory)
        last = repeat == self.request.repeat - 1
        is_needed = self.request.keep if last else self.request.operations == LOAD
        if self.workers.leads and not is_needed:
            remove(directory)

    def _measure(self, name: str, repeat: int, kinds: list[str], directory: Location) -> None:
        kind = kinds[0]
        try:
            for kind in kinds:
                if kind == SAVE and self.request.readers:
                    if not self._save_beside_readers(name, repeat, directory):
                        self._unsaved.add(directory)
                        return
                    continue  # not timed: its task ends with the last of the readers
                begun = now_ns()
                self._keep(name, kind, self.workers.run(self._task(kind, repeat, name, directory)))
                if self.workers.leads:
                    took = (now_ns() - begun) / 1e9
                    self.samples.tasks_s.setdefault(name, {}).setdefault(kind, []).append(took)
        except TaskError as exc:
            self.samples.failed[name] = str(exc)
            self._failed(name, kind, exc)

    def _failed(self, name: str, kind: str, error: TaskError) -> None:
        self.progress(f"{name} failed: {error}")
        self.samples.failures.setdefault(name, {}).setdefault(kind, []).append(str(error))

    def _keep(self, name: str, kind: str, found: list[dict[str, Any]] | None) -> None:
        if found is not None:
            self.samples.engines[name].setdefault(kind, []).append(found)

    def _save_beside_readers(self, name: str, repeat: int, directory: Location) -> bool:
        """Save while readers load a checkpoint that was saved before; whether the save succeeded.

        What fails is recorded, and the replay goes on. Raises TaskError if that earlier checkpoint cannot be saved.
        """
        earlier = below(self.location, f"{name}_earlier")
        if name not in self._earlier:
            self.workers.run(replace(self._task(SAVE, 0, name, earlier), measured=False))
            self._earlier.add(name)
        save = self._task(SAVE, repeat, name, directory)
        readers = [
            replace(self._task(LOAD_BESIDE, 0, name, earlier), beside=save.index) for _ in range(self.request.readers)
        ]
        save = replace(save, readers=tuple(reader.index for reader in readers))
        found = self.workers.run_beside([save, *readers])
        for kind, result in zip([SAVE, *[LOAD_BESIDE] * len(readers)], found, strict=True):
            if isinstance(result, TaskError):
                self._failed(name, kind, result)
            else:
                self._keep(name, kind, result)
        return not isinstance(found[0], TaskError)

    def _loads(self, engine: str) -> list[str]:
        if self.request.in_object_storage:  # no part of it is on the nodes
            return [LOAD_COLD]
        return [*([LOAD_COLD] if self.request.cold and engine not in IN_MEMORY else []), LOAD_WARM]

    def _kinds(self, engine: str, repeat: int) -> list[str]:
        saves = [SAVE] if repeat == 0 or self.request.operations != LOAD else []
        return saves if self.request.operations == SAVE else [*saves, *self._loads(engine)]

    def _task(self, kind: str, repeat: int, engine: str | None, directory: Location) -> Task:
        self._tasks += 1
        return Task(
            kind=kind,
            index=self._tasks,
            repeat=repeat,
            engine=engine,
            directory=str(directory),
            first_step=1 + repeat * (self.request.warmup_saves + 1),
            launch_id=f"{self.launch_id}-{self._tasks}",
            notes=self.workers.notes,
            request=self.request,
            measured=kind != SAVE or self.request.operations != LOAD,
        )
