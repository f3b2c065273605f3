"""Stops one job again and again, each time started by a launcher that goes on from what the stop before has left."""

from __future__ import annotations

import itertools
import json
import random
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from megatron.checkpointing import discover
from restart_trace.cycles import newest_cycle

from .. import command as commands
from ..facts import facts_of
from ..injection_points import TraceTail, parse_injection_point, stage_begun_by, wait_for
from ..launch import GRACE_S, DrillError, Launch, launched
from ..plan import say
from ..reference import DIRECTORY, reference_of
from ..verify import check_losses
from .hosts import Hosts, private_tmpdir
from .launchers import LAUNCHERS, Training, split
from .stop_results import StopResult, stop_tables
from .stops import AT_ONCE, BESIDE, TAKE_OVER, Stop, drawn

RESULTS = "stops.json"
_KEPT = 3  # checkpoints
_SAVE_INTERVAL, _EVAL_INTERVAL, _EVAL_BATCHES = 2, 5, 20
_FLAGS = [
    "--save-interval", str(_SAVE_INTERVAL), "--eval-interval", str(_EVAL_INTERVAL), "--eval-iters", str(_EVAL_BATCHES),
    "--split", "900,100,0", "--distributed-timeout-minutes", "2",
]  # fmt: skip
_ASKED = ["--exit-signal-handler", "--exit-signal", "SIGTERM", "SIGUSR1", "--keep-last", str(_KEPT)]
_START_S = 8.0  # a start-up is stopped within this time
_WAITS_S = 90.0  # for the end of a stopped job: twice the launchers' 30 s, and a busy machine
_DELAYS_S = {"training": 0.02, "evaluation": 0.2, "save": 0.02}  # longest, from the record by which a moment is seen
_UNDISTURBED = 20  # iterations after which a job has survived a SIGKILL of a helper
_STAGES = ("mid-save-write", "mid-save-before-commit", "mid-save-commit")
_STOPPED = re.compile(r"stopping after iteration (\d+): (SIG\w+) was received")
_EVALUATED = re.compile(r"validation loss at iteration (\d+) \| lm loss value: (\S+)")
_CUT_SHORT = "the validation after iteration"
_POLL_S = 0.02


def run_stops(
    training: list[str], out: Path, number: int, chosen: Sequence[Stop], minutes: float | None, seed: int,
    limit_s: float, *, own_shm: bool,
) -> bool:  # fmt: skip
    """Carry out `number` stops, those of `chosen` in turn or drawn by `seed`. No stop begins after `minutes`.

    Writes and prints soak.md. Returns whether no check failed. Raises DrillError.
    """
    begin = time.monotonic()
    soak = StopSoak(training, out, seed, limit_s, own_shm=own_shm)
    until = float("inf") if minutes is None else begin + 60 * minutes
    soak.run(itertools.cycle(chosen) if chosen else drawn(seed), number, until)
    text = stop_tables(soak.results, soak.wrong, soak.compared, seed=seed, elapsed_s=time.monotonic() - begin)
    (out / "soak.md").write_text(text)
    print(text)
    return not soak.wrong and not any(result.wrong for result in soak.results)


class StopSoak:
    def __init__(self, training: list[str], out: Path, seed: int, limit_s: float, *, own_shm: bool) -> None:
        """`limit_s`: of each wait for a moment. Raises DrillError if the command is not one of megatron.launch."""
        self._training = [*training, *_FLAGS]
        self._out, self._limit_s, self._own_shm = out, limit_s, own_shm
        self._save, self._trace = out / "checkpoints", out / "trace"
        self._rng = random.Random(seed)
        self._split: dict[str, Training] = {}
        self._reported: set[str] = set()
        self._tails: dict[int, TraceTail] = {}
        self._commits: list[tuple[int, int]] = []
        self._before: tuple[Launch, ExitStack, StopResult] | None = None  # of its launch processes may be left
        self.results: list[StopResult] = []
        self.compared = 0  # losses
        self.wrong: list[str] = []  # what concerns no single stop

    def run(self, stops: Iterator[Stop], number: int, until: float) -> None:
        """Carry out `number` stops, or as many as there are before `until` (monotonic, s); then compare the losses."""
        (self._out / "logs").mkdir(parents=True)
        self._trace.mkdir()
        self._save.mkdir()
        with ExitStack() as stack:
            self._hosts = Hosts(stack.enter_context(private_tmpdir()), own_shm=self._own_shm)
            stack.callback(lambda: self._before and self._before[1].close())
            while len(self.results) < number and time.monotonic() < until:
                self._carry_out(next(stops))
                (self._out / RESULTS).write_text(json.dumps(self._as_dict(), indent=1))
            if self._before is not None:
                launch, _, result = self._before
                self._end_before()
                result.wrong += self._left_over(launch)
        self._compare_losses()
        (self._out / RESULTS).write_text(json.dumps(self._as_dict(), indent=1))

    def _as_dict(self) -> dict[str, Any]:
        return {"stops": [asdict(result) for result in self.results], "compared": self.compared, "wrong": self.wrong}

    # One stop

    def _carry_out(self, stop: Stop) -> None:
        log = self._out / "logs" / f"{len(self.results):03d}.log"
        result = StopResult(str(stop), str(log))
        begin, before = time.monotonic(), self._newest()
        with ExitStack() as stack:
            try:
                launch, cycle = self._start(stop, log, result, stack)
                if stop.next in (BESIDE, TAKE_OVER):
                    launch, cycle = self._start_beside(stop, launch, cycle, result, stack)
                launch.expect_failure()
                send(stop, launch, self._rng, self._limit_s)
                if stop.next == AT_ONCE:
                    if stop.target == "helper":  # training may continue, without its writer or with another one
                        launch.kill(Launch.everything)
                    self._before = launch, stack.pop_all(), result
                else:
                    self._await_end(stop, launch, cycle, result)
                    result.exit_code = launch.exit_code
                    launch.wait_until_gone(GRACE_S)
            except DrillError as error:
                result.wrong.append(str(error))
            if not result.wrong and self._before is None:
                result.wrong += self._left_over(launch)
        self._check(stop, result, before)
        result.seconds = time.monotonic() - begin
        self.results.append(result)
        outcome = "; ".join(result.wrong) or ("saved" if result.saved is not None else "ended")
        say(f"stop {len(self.results)}: {stop}: {outcome} ({result.seconds:.0f} s)")

    def _start(self, stop: Stop, log: Path, result: StopResult, stack: ExitStack) -> tuple[Launch, int]:
        """The launch and its cycle, at the moment of the stop.

        If processes of the launch before may be left, this one is refused while rank 0 of that one lives, and is then
        started again.
        """
        if stop.moment == "start-up":
            self._end_before()
        deadline = time.monotonic() + self._limit_s
        while True:
            cycle = self._next_cycle()
            launch = stack.enter_context(launched(self._command(stop), log, echo=False))
            try:
                self._reach(stop, launch, cycle)
                break
            except DrillError:
                _await_log(launch)
                if self._before is None or not _was_refused(log) or time.monotonic() > deadline:
                    raise
            result.refused += 1
        self._end_before()
        return launch, cycle

    def _end_before(self) -> None:
        """Wait until nothing is left of the launch that was not waited for. It is wrong of its stop if something is."""
        if self._before is not None:
            (before, stack, result), self._before = self._before, None
            with stack:
                try:
                    before.wait_until_gone(GRACE_S)
                except DrillError as error:
                    result.wrong.append(str(error))

    def _left_over(self, launch: Launch) -> list[str]:
        """What is new of that which a launch has left. Nothing else runs."""
        left = self._hosts.left_over(launch.id, GRACE_S)
        return self._new([line for line in left if "in TMPDIR" not in line])

    def _start_beside(
        self, stop: Stop, first: Launch, cycle: int, result: StopResult, stack: ExitStack
    ) -> tuple[Launch, int]:
        """Start a second launch, which must be refused or, with --take-over, end the first. Returns what then runs."""
        second_cycle, log = self._next_cycle(), Path(f"{result.log}.beside")
        flags = ["--take-over"] if stop.next == TAKE_OVER else []
        second = stack.enter_context(launched([*self._command(stop), *flags], log, echo=False))
        if stop.next == BESIDE:
            code = second.wait(self._limit_s)
            _await_log(second)
            if code == 0 or not _was_refused(log):
                result.wrong.append(f"{log}: was not refused though another launch is running")
            result.refused += 1
            if first.exit_code is not None:
                raise DrillError(f"the launch was disturbed by one beside it; see {log}")
            second.wait_until_gone(self._limit_s)
            return first, cycle
        code = first.wait(self._limit_s)
        _await_log(first)
        if code == 0:
            result.wrong.append("the launch ended with 0 though it was superseded")
        elif "has superseded this one" not in Path(result.log).read_text(errors="replace"):
            result.wrong.append("the launch that was superseded does not name its successor")
        first.wait_until_gone(GRACE_S)
        result.log = str(log)
        self._reach(stop, second, second_cycle)
        return second, second_cycle

    def _command(self, stop: Stop) -> list[str]:
        if stop.engine not in self._split:
            words = commands.completed(self._training, self._save, self._trace, stop.engine)
            self._split[stop.engine] = split([*words, *_ASKED])
        training = self._split[stop.engine]
        command = LAUNCHERS[stop.launcher].command(training)
        return [*command, "--num-workers", str(stop.workers)]

    def _reach(self, stop: Stop, launch: Launch, cycle: int) -> None:
        """Wait for the moment of the stop. Raises DrillError if it does not come."""
        if stop.moment == "start-up" and stop.target != "rank":
            until = time.monotonic() + self._rng.uniform(0.0, _START_S)
            while time.monotonic() < until and launch.exit_code is None:
                time.sleep(_POLL_S)
            return
        newest = self._newest()
        text = {
            "start-up": "mid-startup",
            "load": "mid-load",
            "training": f"iteration:{newest + self._rng.randint(1, 2 * _SAVE_INTERVAL)}",
            "evaluation": f"iteration:{(newest // _EVAL_INTERVAL + 1) * _EVAL_INTERVAL}",
            "save": self._rng.choice(_STAGES),
        }[stop.moment]
        wait_for(parse_injection_point(text), launch, self._trace, cycle, 0, self._limit_s)
        launch.find_ranks(self._trace, cycle)
        time.sleep(self._rng.uniform(0.0, _DELAYS_S.get(stop.moment, 0.0)))

    def _await_end(self, stop: Stop, launch: Launch, cycle: int, result: StopResult) -> None:
        """Wait until the launcher has ended. One that restarts the ranks is asked to end once they train again."""
        this, following = TraceTail(self._trace, cycle), TraceTail(self._trace, cycle + 1)
        trained = len(_iterations(this))
        went_on = 0
        deadline = time.monotonic() + _WAITS_S
        while launch.exit_code is None:
            went_on += len(_iterations(this))
            result.restarted = result.restarted or bool(_iterations(following))
            may_go_on = result.restarted or (stop.target == "helper" and went_on > _UNDISTURBED)
            if may_go_on and not result.asked and not stop.saves:
                result.asked, deadline = True, time.monotonic() + _WAITS_S
                launch.send(signal.SIGTERM, launch.launcher())
            if time.monotonic() > deadline:
                raise DrillError(
                    f"the job had not ended {_WAITS_S:g} s after the stop, at {trained + went_on} iterations"
                )
            time.sleep(_POLL_S)

    # Checks

    def _check(self, stop: Stop, result: StopResult, before: int) -> None:
        """`before`: the iteration of the newest checkpoint before the launch was started."""
        told = Path(result.log).read_text(errors="replace")
        newest = self._check_checkpoints(result)
        if newest < before:
            result.wrong.append(f"there was a checkpoint of iteration {before}, and the newest is {newest}")
        result.cut_short = _CUT_SHORT in told
        stopped = _STOPPED.search(told)
        if stopped is not None:
            result.saved = int(stopped[1])
            if newest != result.saved:
                result.wrong.append(f"it stopped after iteration {result.saved}, and the newest checkpoint is {newest}")
        if stop.saves:
            result.wrong += self._broken_promises(stop, result, told)
        elif result.asked and result.saved is None:
            result.wrong.append("the ranks did not save at the SIGTERM that ended the job")

    def _check_checkpoints(self, result: StopResult) -> int:
        """Check that the newest committed checkpoints exist, with all their files. Returns the iteration of the newest.

        Repeated, since a launch that was not waited for may be removing one at this instant.
        """
        # A commit that rank 0 could not record any more may have removed the oldest of those that are kept.
        committed = sorted({step for _, step in self._committed()})[1 - _KEPT :]
        for attempt in range(3):
            found, problems = discover(self._save, None)
            steps = {one.step for one in found}
            if not problems and set(committed) <= steps:
                break
            time.sleep(0.2 * (attempt + 1))
        else:
            missing = [step for step in committed if step not in steps]
            result.wrong += self._new([f"iteration {step} was committed, and is not there" for step in missing])
            result.wrong += self._new(problems)
        return max(steps, default=0)

    def _broken_promises(self, stop: Stop, result: StopResult, told: str) -> list[str]:
        found = [] if result.saved is not None else ["the ranks did not save at the stop"]
        if LAUNCHERS[stop.launcher].ends_well and result.exit_code != 0:
            found.append(f"exit code {result.exit_code} after a save at the stop")
        if "Traceback" in told and "torch" not in stop.launcher:  # torchrun shows one for each signal it gets
            found.append("it shows a traceback")
        return found

    def _new(self, lines: list[str]) -> list[str]:
        """Those not reported before: what is left stays."""
        new = [line for line in lines if line not in self._reported]
        self._reported.update(new)
        return new

    def _next_cycle(self) -> int:
        newest = newest_cycle(self._trace)
        return 0 if newest is None else newest[0] + 1

    def _committed(self) -> list[tuple[int, int]]:
        """(cycle, step) of every save that rank 0 has recorded as committed."""
        for cycle in range(self._next_cycle()):
            for record in self._tails.setdefault(cycle, TraceTail(self._trace, cycle)).new_records():
                if stage_begun_by(record) == "after-commit":
                    self._commits.append((cycle, record["step"]))
        return self._commits

    def _newest(self) -> int:
        """The iteration of the newest complete checkpoint; 0 if there is none."""
        return max((one.step for one in discover(self._save, None)[0]), default=0)

    def _compare_losses(self) -> None:
        """With those of a run that nothing stopped, in training and in evaluations, to the last digit."""
        cycles = facts_of(self._trace)
        steps = max((step for facts in cycles.values() for step in facts.losses), default=0)
        if steps == 0:
            self.wrong.append("no stop came after an iteration: there is no loss to compare")
            return
        say(f"a run without stops, to iteration {steps}")
        expected = reference_of(self._training, self._out, steps, self._limit_s)
        for cycle, check in check_losses(cycles, expected.facts, 0.0).items():
            self.compared += check.compared
            self.wrong += [f"cycle {cycle}: {line}" for line in check.different[:1]]
        evaluated = dict(_EVALUATED.findall((self._out / DIRECTORY / "launch.log").read_text(errors="replace")))
        for result in self.results:
            for step, loss in _EVALUATED.findall(Path(result.log).read_text(errors="replace")):
                self.compared += 1
                if evaluated.get(step) != loss:
                    result.wrong.append(
                        f"another validation loss at iteration {step}: {loss}, not {evaluated.get(step)}"
                    )


def send(stop: Stop, launch: Launch, rng: random.Random, limit_s: float) -> None:
    """Send the signal of the stop. A helper is waited for: there is none before the first batch or save.

    Raises DrillError if it reaches no process: the launch has ended, or no helper was there for `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    while launch.send(stop.number, _targets(stop, launch, rng)) == 0:
        if stop.target != "helper" or launch.exit_code is not None:
            raise DrillError(f"the launch ended before the stop, with exit code {launch.exit_code}")
        if time.monotonic() > deadline:
            raise DrillError(f"the stop reached nobody: the ranks had no helper process for {limit_s:g} s")
        time.sleep(_POLL_S)


def _targets(stop: Stop, launch: Launch, rng: random.Random) -> list[psutil.Process]:
    if stop.target == "launcher":
        return launch.launcher()
    if stop.target == "all":
        everything = launch.everything()
        return rng.sample(everything, len(everything))
    ranks = launch.ranks()
    if stop.target == "helper":
        ranks = [process for process in launch.of_ranks() if process not in ranks]
    return rng.sample(ranks, min(1, len(ranks)))


def _await_log(launch: Launch) -> None:
    """Wait until all that a launch that has ended has said is in its log."""
    if launch.exit_code is not None:
        with suppress(DrillError):  # what outlives it may say more
            launch.wait_until_gone(GRACE_S)


def _was_refused(log: Path) -> bool:
    return "--take-over: it then stops saving" in log.read_text(errors="replace")


def _iterations(tail: TraceTail) -> list[int]:
    return [record["step"] for record in tail.new_records() if record["type"] == "iteration"]
