"""One sample: train, SIGKILL all ranks after a checkpoint, and see the first iteration after it.

The same for every variant: the clock runs from the first SIGKILL until the line of the first iteration after the
restart is in the launch's log, where it is looked for every two milliseconds. A relaunch begins as soon as no process
of the last launch is left.
"""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.launchers.variants import SAVE_INTERVAL, MeasurementError, Setting, command, restarts_in_place
from megatron.processes.rendezvous_store import PROCESS_NAME
from restart_trace.clock import now_ns
from tools.restart_drill.launch import DrillError, Launch, launched

STRIKE_AT = SAVE_INTERVAL + 3  # as the demonstration: three steps after the checkpoint
_POLL_S = 0.002
_GRACE_S = 20.0
_ITERATION = re.compile(rb"(?:^|\s)iteration\s+(\d+)/\s*\d+\s+\|")


class IterationLines:
    """Follows a log file; the iterations it reports, as they appear."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0

    def new(self) -> Iterator[int]:
        """Iterations in the whole lines that were added since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._position)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._position += len(whole)
        yield from (int(match[1]) for match in map(_ITERATION.search, whole.splitlines()) if match)

    def wait_for(self, wanted: Callable[[int], bool], launch: Launch, limit_s: float) -> int:
        """The first new iteration that is `wanted`. Raises MeasurementError if the launch ends or time passes first."""
        deadline = time.monotonic() + limit_s
        while True:
            ended = launch.exit_code is not None  # asked before the log is read
            for iteration in self.new():
                if wanted(iteration):
                    return iteration
            if ended:
                raise MeasurementError(f"it ended with exit code {launch.exit_code}: {self._last_words()}")
            if time.monotonic() > deadline:
                raise MeasurementError(f"not within {limit_s:g} s; raise --time-limit: {self._last_words()}")
            time.sleep(_POLL_S)

    def _last_words(self) -> str:
        return self.path.read_text(errors="replace")[-2000:] if self.path.exists() else "it printed nothing"


def sample(variant: str, setting: Setting, limit_s: float) -> float:
    """restart_s of one restart, seconds. Everything it leaves is removed. Raises MeasurementError."""
    place = setting.directory / "sample"
    place.mkdir()
    try:
        return _restart(variant, setting, place, limit_s)
    except (DrillError, MeasurementError) as error:
        raise MeasurementError(f"{variant}: {error}") from error
    finally:
        shutil.rmtree(place)


def _restart(variant: str, setting: Setting, place: Path, limit_s: float) -> float:
    argv = command(variant, setting, place / "checkpoints")
    first_log, second_log = IterationLines(place / "first.log"), IterationLines(place / "second.log")
    with launched(argv, first_log.path, echo=False) as launch:
        first_log.wait_for(lambda iteration: iteration >= STRIKE_AT, launch, limit_s)
        children = [child for launcher in launch.launcher() for child in launcher.children()]
        ranks = [child for child in children if child.name() != PROCESS_NAME]
        if len(ranks) != setting.world_size:
            raise MeasurementError(f"{len(ranks)} ranks were found, {setting.world_size} were expected")
        struck_ns = now_ns()
        launch.send(signal.SIGKILL, ranks)
        if restarts_in_place(variant):
            # Lines of later iterations may still be on their way.
            resumed = first_log.wait_for(lambda iteration: iteration <= STRIKE_AT, launch, limit_s)
            return _checked(_seconds_since(struck_ns), resumed)
        launch.wait(limit_s)
        launch.wait_until_gone(_GRACE_S)
    with launched(argv, second_log.path, echo=False) as launch:
        resumed = second_log.wait_for(lambda iteration: True, launch, limit_s)
        return _checked(_seconds_since(struck_ns), resumed)


def _checked(restart_s: float, resumed: int) -> float:
    """`restart_s`, if the restart was one. Raises MeasurementError if it did not go on from the checkpoint."""
    if resumed != SAVE_INTERVAL + 1:
        raise MeasurementError(f"it went on with iteration {resumed}, not from its checkpoint of {SAVE_INTERVAL}")
    return restart_s


def _seconds_since(moment_ns: int) -> float:
    return (now_ns() - moment_ns) / 1e9
