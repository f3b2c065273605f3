"""Many saves and restarts with every engine, and what they leave: files, shared memory, processes, descriptors, memory.

    python -m tools.restart_drill.soak --out runs/soak --minutes 10
    python -m tools.restart_drill.soak --out runs/soak --saves 200 --restarts 50

Each engine gets a leg of its own: megatron.launch trains a tiny model that saves at every iteration and keeps the
newest checkpoints. A fault ends its ranks, over and over, and the launcher starts them again in place, so that whatever
it does not give back adds up in it. Then the last ranks train on undisturbed, and are asked to end.
docs/restart_drill.md says what is looked at. Called again with the same options, it does the legs that are left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from megatron.startup.injected_faults import EXCEPTION_SIGNAL
from restart_trace.command_line import CommandParser

from ..common.escaping import markdown as escaped
from ..common.tables import markdown_table
from . import command as commands
from .checkpoints import Checkpoints
from .cli import COULD_NOT_RUN, NOT_VERIFIED, VERIFIED, catch_stop_signals
from .facts import facts_of
from .faults import DAMAGE
from .growth import Usage, grown
from .injection_points import TraceTail, stage_begun_by
from .launch import GRACE_S, POLL_S, DrillError, Launch
from .own_shm import in_own_shm, left_in_shm, may_mount
from .plan import say
from .preset import expanded
from .rounds import ENGINES, SMALL
from .verify import check_losses

FAULTS = ("sigkill-all", "sigkill-one", "exception", *DAMAGE)
KEPT = 3  # checkpoints: the newest may be damaged, and the one before it half removed
SETTLED = 4  # commits that the last ranks make before what they use is compared
UNDISTURBED = 16  # commits of the last ranks, at least
_PRESET = "tiny_tp2_pp2_dp2"
_RESTARTS = ("--max-restarts", "--max_restarts")
_NO_LIMIT = 1_000_000
_BESIDE = {"latest", "latest_checkpointed_iteration.txt", ".generations"}  # what a training leaves beside checkpoints


@dataclass(frozen=True)
class Goal:
    """When a leg's faults end: after so many restarts, or so many seconds; and how many saves it makes at least."""

    restarts: int | None = None
    seconds: float | None = None
    saves: int = 0


@dataclass
class Leg:
    """What came of one engine. `wrong`: everything that must not be; `leaked`: what was left or grew."""

    engine: str
    saves: int = 0
    restarts: int = 0
    restored: int = 0  # restarts whose every rank compared its state with what was saved
    repeated: int = 0  # iterations trained again, whose losses are compared
    faults: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAULTS, 0))
    growth: dict[str, float] = field(default_factory=dict)
    used: dict[str, list[list[int]]] = field(default_factory=dict)  # all samples: the fields of Usage
    shared_memory: str = ""
    leaked: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        return not (self.leaked or self.lost or self.wrong)


class Course:
    """The leg of one engine, over one directory."""

    def __init__(self, training: list[str], engine: str, out: Path, rng: random.Random, limits: Limits) -> None:
        self.leg = Leg(engine)
        self._out, self._rng, self._limits = out, rng, limits
        self._save, self._trace = out / "checkpoints", out / "trace"
        for directory in (out, self._trace):
            directory.mkdir(parents=True)
        words = commands.completed(training, self._save, self._trace, engine)
        self._command = [*words, "--keep-last", str(KEPT), "--exit-signal-handler"]
        if not commands.repeats_exactly(self._command):
            raise DrillError("the soak compares losses to the last bit, and this training on GPUs need not repeat them")
        self._checkpoints = Checkpoints(self._save)
        self._cycle = 0
        self._committed: list[int] = []  # steps, in the order of their commits
        self._tail = TraceTail(self._trace, 0)
        self._settled = 0  # commits of this cycle
        self._ranks: list[Usage] = []  # of the ranks of this cycle
        self._agents: list[Usage] = []  # of the launcher, one of each cycle

    def run(self, goal: Goal) -> Leg:
        begin = time.monotonic()
        temporary = Path(tempfile.mkdtemp(prefix="soak-"))
        listing = self._out / "shared_memory"
        os.environ["TMPDIR"] = str(temporary)
        launch = Launch(in_own_shm(self._command, listing), self._out / "launch.log", echo=False)
        try:
            self._disturb(launch, goal, begin)
            self._commits(launch, max(UNDISTURBED, goal.saves - len(self._committed)))
            self._end(launch)
        finally:
            launch.clean_up()
            os.environ.pop("TMPDIR")
            self.leg.leaked += [f"in TMPDIR: {path.name}" for path in temporary.iterdir()]
            shutil.rmtree(temporary)
        self.leg.shared_memory = "looked at" if may_mount() else "not looked at: it takes root"
        self.leg.leaked += [f"in /dev/shm: {name}" for name in left_in_shm(listing)]
        self._look_at_files()
        self._look_at_growth()
        self._look_at_restarts()
        self.leg.seconds = time.monotonic() - begin
        return self.leg

    def _disturb(self, launch: Launch, goal: Goal, begin: float) -> None:
        """Fault after fault. The first launch commits one more, as a damaged checkpoint needs one before it."""
        restarts = goal.restarts if goal.restarts is not None else _NO_LIMIT
        each = max(2, (goal.saves - UNDISTURBED) // max(1, restarts)) if goal.restarts is not None else 3
        order: list[str] = []
        while self.leg.restarts < restarts:
            if goal.seconds is not None and time.monotonic() - begin > goal.seconds and self.leg.restarts > 0:
                return
            order = order or self._rng.sample(FAULTS, len(FAULTS))
            self._commits(launch, each)
            self._agents.append(Usage.of(self._agent(launch)))
            self._inject(launch, order.pop())

    def _agent(self, launch: Launch) -> psutil.Process:
        """The process of megatron.launch."""
        (started,) = launch.launcher() or [None]
        if started is None:
            raise DrillError(f"the launcher ended with exit code {launch.exit_code}; see {launch.log_path}")
        return started.children()[0] if may_mount() else started

    def _commits(self, launch: Launch, number: int) -> None:
        """Wait for so many commits, and note all the time what the ranks use."""
        wanted = len(self._committed) + number
        deadline = time.monotonic() + self._limits.time_s
        while len(self._committed) < wanted:
            if launch.exit_code is not None:
                raise DrillError(f"the launcher ended with exit code {launch.exit_code}; see {launch.log_path}")
            if time.monotonic() > deadline:
                raise DrillError(f"no checkpoint was committed for {self._limits.time_s:g} s; see {launch.log_path}")
            if self._look(launch):
                deadline = time.monotonic() + self._limits.time_s
            self._sample(launch)
            time.sleep(0.01)

    def _look(self, launch: Launch) -> bool:
        """Read on in the trace of rank 0; whether it has committed anything."""
        found = [record["step"] for record in self._tail.new_records() if stage_begun_by(record) == "after-commit"]
        self._committed += found
        self._settled += len(found)
        return bool(found)

    def _sample(self, launch: Launch) -> None:
        """Note what the ranks of this cycle use, once they have made SETTLED commits."""
        if self._settled < SETTLED or not launch.find_ranks(self._trace, self._cycle):
            return
        used = launch.of_ranks()
        with contextlib.suppress(psutil.Error, OSError):
            self._ranks.append(Usage.of(*used))

    def _inject(self, launch: Launch, fault: str) -> None:
        """Cause a fault, and return when the ranks of the next cycle are there.

        All ranks stand still at first, so that what they have committed can be looked at, and damaged.
        """
        launch.await_ranks(self._trace, self._cycle, self._limits.time_s, lambda: launch.exit_code is not None)
        time.sleep(self._rng.uniform(0.0, 0.1))
        stopped = launch.of_ranks()
        launch.send(signal.SIGSTOP, stopped)
        self._look(launch)
        self._check_nothing_is_lost()
        if fault in DAMAGE:
            self._checkpoints.damage(fault)
        if fault in ("sigkill-one", "exception"):
            launch.send(signal.SIGKILL if fault == "sigkill-one" else EXCEPTION_SIGNAL, launch.ranks()[-1:])
            launch.send(signal.SIGCONT, stopped)
        else:
            launch.send(signal.SIGKILL, stopped)
        self._await_next(launch, stopped)
        self.leg.faults[fault] += 1
        self.leg.restarts += 1

    def _await_next(self, launch: Launch, former: list[psutil.Process]) -> None:
        """An exception within a save fails that alone, and training goes on: then all ranks are killed, too."""
        before, killed, deadline = len(self._committed), False, time.monotonic() + self._limits.time_s
        following = TraceTail(self._trace, self._cycle + 1)
        while not following.new_records() and launch.exit_code is None:
            if not killed and self._goes_on(before, launch):
                launch.kill(Launch.of_ranks)
                killed = True
            self._check_deadline(deadline)
        while any(_lives(process) for process in former):
            self._check_deadline(deadline)
        self._cycle += 1
        self._tail, self._ranks, self._settled = TraceTail(self._trace, self._cycle), [], 0

    def _goes_on(self, before: int, launch: Launch) -> bool:
        self._look(launch)
        return len(self._committed) >= before + KEPT

    def _check_deadline(self, deadline: float) -> None:
        """Wait for POLL_S. Raises DrillError after the deadline."""
        if time.monotonic() > deadline:
            raise DrillError(f"no restart for {self._limits.time_s:g} s after a fault; see {self._out / 'launch.log'}")
        time.sleep(POLL_S)

    def _check_nothing_is_lost(self) -> None:
        complete = [candidate.step for candidate in self._checkpoints.complete()]
        newest = self._committed[-1]
        if not complete or max(complete) < newest:
            self.leg.lost.append(f"cycle {self._cycle}: global_step{newest} is not there; complete are {complete}")

    def _end(self, launch: Launch) -> None:
        """As a user ends a training: the ranks save once more and end well."""
        self._agents.append(Usage.of(self._agent(launch)))
        launch.send(signal.SIGTERM, [self._agent(launch)])
        code = launch.wait(self._limits.time_s)
        self._look(launch)
        if code != 0:
            self.leg.wrong.append(f"asked to end, the launcher ended with {code}")
        try:
            launch.wait_until_gone(GRACE_S)
        except DrillError as error:
            self.leg.leaked.append(str(error))
        self.leg.saves = len(self._committed)

    def _look_at_files(self) -> None:
        self.leg.leaked += left_files(self._checkpoints, KEPT)

    def _look_at_growth(self) -> None:
        limit = self._limits.memory_MiB
        for process, samples in (("rank", self._ranks), ("launcher", self._agents[1:])):
            self.leg.used[process] = [list(astuple(sample)) for sample in samples]
            found = grown(samples)
            self.leg.growth |= {f"{process} {name}": value for name, value in asdict(found).items()}
            self.leg.leaked += [f"{process}: {line}" for line in found.excess(limit)]

    def _look_at_restarts(self) -> None:
        cycles = facts_of(self._trace)
        for cycle, facts in list(cycles.items())[1:]:
            steps = set(facts.resumed.values())
            verified = len(steps) == 1 and len(facts.resumed) == len(facts.hashed) == facts.world_size
            self.leg.restored += verified
            if not verified:
                self.leg.wrong.append(
                    f"cycle {cycle}: {len(facts.hashed)} of {facts.world_size} ranks verified, from {steps}"
                )
        checks = check_losses(cycles, None, 0.0)
        self.leg.repeated = sum(check.compared for check in checks.values())
        self.leg.wrong += [line for check in checks.values() for line in check.different]
        if self.leg.restored != self.leg.restarts:
            self.leg.wrong.append(f"{self.leg.restored} restarts verified of {self.leg.restarts}")


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def left_files(checkpoints: Checkpoints, kept: int) -> list[str]:
    """What is in the directory of --save, and is neither one of the `kept` newest checkpoints nor names one."""
    complete = checkpoints.complete()
    found = [f"more than --keep-last {kept} checkpoints: {len(complete)}"] if len(complete) > kept else []
    known = {candidate.directory.name for candidate in complete} | _BESIDE
    found += [f"in --save: {path.name}" for path in sorted(checkpoints.directory.iterdir()) if path.name not in known]
    for candidate in complete:
        assert candidate.manifest is not None
        listed = {*candidate.manifest.files, "manifest.json"}
        there = {
            str(path.relative_to(candidate.directory)) for path in candidate.directory.rglob("*") if path.is_file()
        }
        found += [f"in {candidate.directory.name}: {name}" for name in sorted(there - listed)]
    return found


@dataclass(frozen=True)
class Limits:
    """`time_s` of each wait, `memory_MiB` by which the memory of a rank or of the launcher may grow."""

    time_s: float
    memory_MiB: float


def markdown(legs: list[Leg]) -> str:
    """The results as a table."""
    header = ("engine", "saves", "restarts", "restored, verified", "iterations repeated", *FAULTS, "lost", "leaked",
              "rank MiB", "launcher MiB", "minutes", "")  # fmt: skip
    rows = []
    for leg in legs:
        verdict = "verified" if leg.sound else "NOT VERIFIED: " + "; ".join([*leg.lost, *leg.leaked, *leg.wrong][:3])
        counts = [leg.saves, leg.restarts, leg.restored, leg.repeated, *(leg.faults[fault] for fault in FAULTS)]
        memory = [f"{leg.growth[f'{process} memory_MiB']:+.1f}" for process in ("rank", "launcher")]
        minutes = f"{leg.seconds / 60:.1f}"
        rows.append(
            [
                leg.engine,
                *map(str, counts),
                str(len(leg.lost)),
                str(len(leg.leaked)),
                *memory,
                minutes,
                escaped(verdict),
            ]
        )
    total = f"{sum(leg.saves for leg in legs)} saves, {sum(leg.restarts for leg in legs)} restarts"
    shared = ", ".join(sorted({leg.shared_memory for leg in legs}))
    return "\n".join([*markdown_table(header, rows), "", f"{total}. /dev/shm: {shared}.", ""])


_EXAMPLE = """examples:
  %(prog)s --out runs/soak --minutes 10
  %(prog)s --out runs/soak --saves 40 --restarts 10 --engines lazy

With an --out that an earlier call with the same options has left, it goes on with the engines that are not done.

exit status: 0 nothing was lost or left, 1 something was, 2 it could not be carried out
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m tools.restart_drill.soak",
        description="Save and restart over and over with every engine: is anything lost, left behind, or growing?",
        epilog=_EXAMPLE,
    )
    parser.add_argument("--out", type=Path, required=True, help="directory for everything that this leaves")
    parser.add_argument("--minutes", type=float, help="about how long, over all engines")
    parser.add_argument("--saves", type=int, help="over all engines, at least (default: 200, without --minutes)")
    parser.add_argument("--restarts", type=int, help="over all engines (default: 50, without --minutes)")
    parser.add_argument("--seed", type=int, default=1, help="of the order of faults and their instants")
    parser.add_argument("--engines", default=",".join(ENGINES), help="separated by commas")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds for each commit and restart")
    parser.add_argument("--memory-limit", type=float, default=32.0, metavar="MIB", help="by which a process may grow")
    parser.add_argument("command", nargs="*", help="after --: the training by megatron.launch (default: a tiny model)")
    args = parser.parse_args(argv)
    args.engines = args.engines.split(",")
    if args.minutes is not None and (args.saves is not None or args.restarts is not None):
        parser.error(f"--minutes {args.minutes:g}: says how long; drop it, or --saves and --restarts")
    for name in ("minutes", "saves", "restarts"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser.error(f"--{name} {value:g}: must be more than 0")
    if args.restarts is not None and args.restarts < len(args.engines):
        parser.error(f"--restarts {args.restarts}: must be at least 1 for each of the {len(args.engines)} engines")
    return args


def goals(args: argparse.Namespace) -> list[Goal]:
    """Of each engine."""
    number = len(args.engines)
    if args.minutes is not None:
        return [Goal(seconds=args.minutes * 60 / number)] * number
    saves, restarts = args.saves or 200, args.restarts or 50
    return [Goal(restarts // number + (i < restarts % number), None, -(-saves // number)) for i in range(number)]


def _training(words: list[str]) -> list[str]:
    if not words:
        os.environ.setdefault("EXTRA_ARGS", SMALL)
        os.environ["LAUNCHER"] = commands.FORK
        words = commands.on_layout(expanded([_PRESET]), commands.Sizes(1, 1, 2))
    launcher = commands.launcher_of(words)
    if launcher is None or launcher[0] != commands.FORK:
        raise DrillError(f"the soak restarts in place: give a command of megatron.launch, not {words[0]} ...")
    return commands.with_launcher_option(words, _RESTARTS, _NO_LIMIT)


def _claim(out: Path, options: dict[str, Any]) -> None:
    """A new directory, or the one of an earlier call with the same options. Raises DrillError for another's."""
    told = out / "soak.json"
    if told.exists() and json.loads(told.read_text()) == options:
        return
    if out.exists() and any(out.iterdir()):
        raise DrillError(f"--out {out}: is there already, and not of a soak with these options; give a new directory")
    out.mkdir(parents=True, exist_ok=True)
    told.write_text(json.dumps(options))


def _leg(training: list[str], engine: str, goal: Goal, args: argparse.Namespace) -> Leg:
    """The leg of an engine, from its file if it is done."""
    directory = args.out.absolute() / engine
    done = directory / "leg.json"
    if done.exists():
        return Leg(**json.loads(done.read_text()))
    shutil.rmtree(directory, ignore_errors=True)  # of a leg that was ended
    say(f"engine {engine}")
    rng = random.Random(f"{args.seed}/{engine}")
    leg = Course(training, engine, directory, rng, Limits(args.time_limit, args.memory_limit)).run(goal)
    done.write_text(json.dumps(asdict(leg), indent=1))
    return leg


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    catch_stop_signals()
    legs: list[Leg] = []
    try:
        _claim(args.out, {name: value for name, value in vars(args).items() if name != "out"})
        training = _training(args.command)
        for engine, goal in zip(args.engines, goals(args), strict=True):
            legs.append(_leg(training, engine, goal, args))
            (args.out / "soak.md").write_text(markdown(legs))
    except (DrillError, OSError) as error:
        say(f"error: {error}")
        return COULD_NOT_RUN
    print(markdown(legs))
    return VERIFIED if all(leg.sound for leg in legs) else NOT_VERIFIED


if __name__ == "__main__":
    sys.exit(main())
