"""One training of a contestant through faults: a rank, or all, get SIGKILL some steps after a checkpoint.

The clock of a fault runs from the SIGKILL until the line of the first iteration after it is in the log. If the launcher
ends, its command is run again at once, as a loop of the shell would.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.common.ranks import MeasurementError
from benchmarks.launchers.measure import FAULT_AFTER, GRACE_S, POLL_S, IterationLines, children
from benchmarks.launchers.variants import SAVE_INTERVAL, STANDBY, Setting
from benchmarks.restart_scoreboard.contestants import ALL, NODE, NODES, OURS, SPARES, Contestant
from megatron.launch.rendezvous_store import PROCESS_NAME
from megatron.processes.standby import WAITS
from restart_trace.clock import now_ns
from tools.restart_drill.launch import DrillError, launched, named


@dataclass(frozen=True)
class Fault:
    """What became of one fault.

    kind: of KINDS
    restart_s: seconds to the end of the first iteration after it
    lost_steps: iterations that were done, and had to be done again
    wasted_s: seconds until the first iteration that had not been done yet was, less those of an undisturbed iteration
    """

    kind: str
    restart_s: float
    lost_steps: int
    wasted_s: float


@dataclass(frozen=True)
class Trained:
    """A training: its faults, the loss of each iteration that it told, and the median seconds of an iteration."""

    faults: list[Fault]
    losses: list[tuple[int, str]]
    iteration_s: float


class Training:
    """A training of `contestant` under way, in a directory of its own."""

    def __init__(self, name: str, contestant: Contestant, setting: Setting, place: Path, limit_s: float) -> None:
        self._name, self._contestant, self._setting = name, contestant, setting
        self._save, self._limit_s = place / "checkpoints", limit_s
        self._logs = (IterationLines(place / f"{number}.log") for number in range(1, 1 << 20))
        self._held = ExitStack()
        self._losses: list[tuple[int, str]] = []
        self._durations: list[float] = []  # of undisturbed iterations, seconds
        self._nodes: list[list[psutil.Process]] = []  # that train: each an agent, and what it has started
        self._launch_again()

    def _launch_again(self) -> None:
        self._held.close()
        self._log = next(self._logs)
        argv = self._contestant.command(self._setting, self._save)
        self._launch = self._held.enter_context(launched(argv, self._log.path, echo=False))

    def close(self) -> None:
        """End it."""
        self._held.close()

    def _iterations(self) -> Iterator[int]:
        """Iterations as their lines come, over launches. Raises MeasurementError if there is none for a while."""
        since = time.monotonic()
        fruitless = 0
        while True:
            ended = self._launch.exit_code is not None  # asked before the log is read
            for iteration in self._log.new():
                since, fruitless = time.monotonic(), 0
                yield iteration
            self._losses += self._log.losses
            self._log.losses.clear()
            if ended:
                fruitless += 1
                if fruitless > 1 or self._launch.exit_code == 0:
                    raise MeasurementError(f"it ended with status {self._launch.exit_code}: {self._log.last_words()}")
                self._launch.wait_until_gone(GRACE_S)
                self._launch_again()
            elif time.monotonic() - since > self._limit_s:
                raise MeasurementError(f"no iteration within {self._limit_s:g} s: {self._log.last_words()}")
            else:
                time.sleep(POLL_S)

    def through(self, kinds: list[str], seed: int) -> Trained:
        """Inject a fault of each of `kinds`. Raises MeasurementError, DrillError."""
        drawn, faults = random.Random(seed), []
        iterations, last = self._iterations(), 0
        before = time.monotonic()
        for kind in kinds:
            for last in iterations:
                self._durations.append(time.monotonic() - before)
                before = time.monotonic()
                if last > SAVE_INTERVAL and last % SAVE_INTERVAL == FAULT_AFTER and self._is_ready():
                    break
            injected_ns = now_ns()
            self._kill(kind, drawn)
            first = self._first_after(iterations, last)
            restart_s = (now_ns() - injected_ns) / 1e9
            lost = max(0, last - first + 1)
            while first <= last:
                first = next(iterations)
            wasted_s = (now_ns() - injected_ns) / 1e9 - statistics.median(self._durations)
            faults.append(Fault(kind, restart_s, lost, wasted_s))
            before = time.monotonic()
        self._losses += self._log.losses
        return Trained(faults, self._losses, statistics.median(self._durations))

    def undisturbed(self, until: int) -> list[tuple[int, str]]:
        """The losses up to iteration `until`. Raises MeasurementError, DrillError."""
        for iteration in self._iterations():
            if iteration >= until:
                break
        return self._losses + self._log.losses

    def _first_after(self, iterations: Iterator[int], last: int) -> int:
        """The first iteration after a fault; lines of what was under way before it are passed over."""
        for iteration in iterations:
            if self._contestant.goes_on or iteration <= last:
                return iteration
        raise AssertionError("it goes on until it raises")

    def _is_ready(self) -> bool:
        """Whether a fault may come: standby ranks, if any, wait for it."""
        if NODE in self._contestant.kinds:
            return self._are_nodes_ready()
        waiting = sum(name == WAITS for _, name in named(children(self._launch)))
        return self._name not in STANDBY or waiting == self._setting.world_size

    def _are_nodes_ready(self) -> bool:
        """Whether a spare waits, and `_nodes` were found after an earlier save: that takes longer than some steps."""
        if self._nodes:
            return True
        # Others train: agents of torchrun that come at the same time keep replacing one another.
        self._launch.send(signal.SIGKILL, [one for one, name in named(self._children_of_loops()) if name == "sleep"])
        agents = self._agents()
        training = self._training(agents)
        if len(agents) == NODES + SPARES and len(training) == NODES:
            self._nodes = [[agent, *agent.children(recursive=True)] for agent in training]
        return False

    def _children_of_loops(self) -> list[psutil.Process]:
        """Of those of agents.sh."""
        return [child for loop in children(self._launch) for child in loop.children()]

    def _agents(self) -> list[psutil.Process]:
        """Of agents.sh, those that have joined: they are connected with what outlives them."""
        joined = []
        for agent in self._children_of_loops():
            with contextlib.suppress(psutil.Error):
                if any(one.status == psutil.CONN_ESTABLISHED for one in agent.net_connections("tcp")):
                    joined.append(agent)
        return joined

    def _training(self, agents: Sequence[psutil.Process]) -> list[psutil.Process]:
        """Those that have ranks."""
        wanted = self._setting.world_size // NODES
        return [
            agent
            for agent in agents
            if sum(name not in (PROCESS_NAME, WAITS) for _, name in named(agent.children())) >= wanted
        ]

    def _kill(self, kind: str, drawn: random.Random) -> None:
        if kind == NODE:
            self._launch.send(signal.SIGKILL, self._nodes[drawn.randrange(NODES)])
            self._nodes = []
            return
        ranks, wanted = self._ranks(), self._setting.world_size
        if not wanted <= len(ranks) <= wanted + self._contestant.reserves:
            raise MeasurementError(f"{len(ranks)} ranks were found, {wanted} were expected")
        one = drawn.randrange(wanted)  # the reserves come last
        self._launch.send(signal.SIGKILL, ranks if kind == ALL else [ranks[one]])

    def _ranks(self) -> list[psutil.Process]:
        """In the order of their ranks; those that megatron.launch has forked in that of their start."""
        if self._contestant.trainer == OURS and self._name != "torchrun":
            return [child for child, name in named(children(self._launch)) if name not in (PROCESS_NAME, WAITS)]
        found = []
        for process in self._launch.everything():
            with contextlib.suppress(psutil.Error, OSError):
                environment, words = process.environ(), process.cmdline()
                if process.cwd() == "/":  # a monitor that a rank of nvidia-resiliency-ext has forked
                    continue
                if "RANK" in environment and any(word.endswith(self._contestant.trainer) for word in words):
                    found.append((environment.get("REPLICA_GROUP_ID", ""), int(environment["RANK"]), process.pid))
        return [psutil.Process(pid) for _, _, pid in sorted(found)]


def train(name: str, contestant: Contestant, setting: Setting, kinds: list[str], seed: int, limit_s: float) -> Trained:
    """Train `contestant` through faults of these kinds, and leave nothing behind. Raises MeasurementError."""
    with _training(name, contestant, setting, limit_s) as training:
        return training.through(kinds, seed)


def undisturbed(name: str, contestant: Contestant, setting: Setting, until: int, limit_s: float) -> dict[int, str]:
    """The loss of each iteration up to `until` without a fault. Raises MeasurementError."""
    with _training(name, contestant, setting, limit_s) as training:
        return dict(training.undisturbed(until))


@contextlib.contextmanager
def _training(name: str, contestant: Contestant, setting: Setting, limit_s: float) -> Iterator[Training]:
    place = setting.directory / "training"
    place.mkdir()
    training = None
    try:
        training = Training(name, contestant, setting, place, limit_s)
        yield training
    except (DrillError, MeasurementError) as error:
        raise MeasurementError(f"{name}: {error}") from error
    finally:
        if training is not None:
            training.close()
        shutil.rmtree(place)
