"""One sample: train, SIGKILL all ranks after a checkpoint, and see the first iteration after it.

The same for every variant: the clock runs from the first SIGKILL until the line of the first iteration after the
restart is in the launch's log, where it is looked for every two milliseconds. A relaunch begins as soon as no process
of the last launch is left. With standby ranks the failure comes when they wait for it, which
may be after a later checkpoint.
"""

from __future__ import annotations

import functools
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from benchmarks.common.ranks import MeasurementError
from benchmarks.launchers.variants import SAVE_INTERVAL, STANDBY, Setting, command, restarts_in_place
from megatron.launch.rendezvous_store import PROCESS_NAME
from megatron.processes.standby import WAITS
from restart_trace.clock import now_ns
from tools.restart_drill.launch import DrillError, Launch, launched, named

FAULT_AFTER = 3  # steps after a checkpoint, as the demonstration
POLL_S = 0.002
GRACE_S = 20.0
_ITERATION = re.compile(rb"(?:^|\s)iteration\s+(\d+)/\s*\d+\s+\|(?:.*?lm loss: ([-+.\deE]+|nan|inf))?")


class IterationLines:
    """Follows a log file; the iterations it reports, as they appear. `losses`: of each, with its loss as it is told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.losses: list[tuple[int, str]] = []
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
        for match in filter(None, map(_ITERATION.search, whole.splitlines())):
            if match[2] is not None:
                self.losses.append((int(match[1]), match[2].decode()))
            yield int(match[1])

    def wait_for(self, wanted: Callable[[int], bool], launch: Launch, limit_s: float) -> int:
        """The first new iteration that is `wanted`. Raises MeasurementError if the launch ends or time passes first."""
        deadline = time.monotonic() + limit_s
        while True:
            ended = launch.exit_code is not None  # asked before the log is read
            for iteration in self.new():
                if wanted(iteration):
                    return iteration
            if ended:
                raise MeasurementError(f"it ended with exit code {launch.exit_code}: {self.last_words()}")
            if time.monotonic() > deadline:
                raise MeasurementError(f"not within {limit_s:g} s; raise --time-limit: {self.last_words()}")
            time.sleep(POLL_S)

    def last_words(self) -> str:
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
        failed_at = first_log.wait_for(
            functools.partial(_is_injection_point, variant, setting, launch), launch, limit_s
        )
        ranks = [child for child, name in named(children(launch)) if name not in (PROCESS_NAME, WAITS)]
        if len(ranks) != setting.world_size:
            raise MeasurementError(f"{len(ranks)} ranks were found, {setting.world_size} were expected")
        injected_ns = now_ns()
        launch.send(signal.SIGKILL, ranks)
        if restarts_in_place(variant):
            # Lines of later iterations may still be on their way.
            resumed = first_log.wait_for(lambda iteration: iteration <= failed_at, launch, limit_s)
            return _checked(_seconds_since(injected_ns), resumed, failed_at)
        launch.wait(limit_s)
        launch.wait_until_gone(GRACE_S)
    with launched(argv, second_log.path, echo=False) as launch:
        resumed = second_log.wait_for(lambda iteration: True, launch, limit_s)
        return _checked(_seconds_since(injected_ns), resumed, failed_at)


def _is_injection_point(variant: str, setting: Setting, launch: Launch, iteration: int) -> bool:
    """Whether the fault is injected after this iteration."""
    if iteration < SAVE_INTERVAL or iteration % SAVE_INTERVAL != FAULT_AFTER:
        return False
    return variant not in STANDBY or sum(name == WAITS for _, name in named(children(launch))) == setting.world_size


def children(launch: Launch) -> list[psutil.Process]:
    """What the launcher has started."""
    return [child for launcher in launch.launcher() for child in launcher.children()]


def _checked(restart_s: float, resumed: int, failed_at: int) -> float:
    """`restart_s`, if the restart was one. Raises MeasurementError if it did not go on from the checkpoint."""
    saved = failed_at - FAULT_AFTER
    if resumed != saved + 1:
        raise MeasurementError(f"it went on with iteration {resumed}, not from its checkpoint of {saved}")
    return restart_s


def _seconds_since(since_ns: int) -> float:
    return (now_ns() - since_ns) / 1e9
