"""Rounds of kills and concurrent launches that all save to one directory: is a committed checkpoint ever lost?

A round waits until the running launch has committed a few more checkpoints. Then it does one of these, drawn by the
seed: it kills processes of the launch and starts the next launch at once, while others may still run; or it starts a
second, concurrent launch, which must be refused; or one with --take-over, to which the first launch must yield.
After each round every checkpoint that a launch reported as committed must exist with all its files. At the end every
loss of every launch must be that of a run without a fault.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron.checkpointing.store.commit import discover
from megatron.processes.free_port import free_port

from ..common.escaping import markdown as escaped
from ..common.tables import markdown_table
from . import command as commands
from .facts import facts_of
from .injection_points import TraceTail, stage_begun_by
from .launch import DrillError, Launch
from .plan import say
from .reference import reference_of

KILLS = ("launcher", "all", "rank-0", "one-rank", "writer")  # writer: the process in which an engine writes files
CONCURRENT, TAKE_OVER = "concurrent", "take-over"
_WITH_A_WRITER = ("fastpersist-decoupled",)
_PORT = ("--master_port", "--master-port")


@dataclass
class Tally:
    """Results of the rounds with one engine."""

    engine: str
    rounds: Counter[str] = field(default_factory=Counter)  # number of rounds by action
    launches: int = 0
    refused: int = 0  # launches that were refused because an earlier one was still alive
    committed: int = 0
    lost: list[str] = field(default_factory=list)  # checkpoints that are missing, or lack a file
    wrong: list[str] = field(default_factory=list)  # all other errors
    different_losses: int = 0
    steps: int = 0

    @property
    def sound(self) -> bool:
        return not (self.lost or self.wrong or self.different_losses)


class EngineRounds:
    """Rounds with one engine over one directory."""

    def __init__(self, training: list[str], engine: str, out: Path, rng: random.Random, limit_s: float) -> None:
        self.tally = Tally(engine)
        self._training = training
        self._engine = engine
        self._out = out
        self._rng = rng
        self._limit_s = limit_s
        self._save, self._trace = out / "checkpoints", out / "trace"
        self._command = commands.completed(training, self._save, self._trace, engine)
        if not commands.repeats_exactly(self._command):
            raise DrillError(
                "rounds compare losses to the last bit, but this training on GPUs need not repeat them; remove "
                "--deterministic off, or give a command that shows its flags"
            )
        self._all: list[Launch] = []
        self._tails: list[TraceTail] = []
        self._commits: list[tuple[int, int]] = []
        out.mkdir(parents=True)

    def run(self, rounds: int) -> Tally:
        try:
            current = self._start()
            for number in range(rounds):
                current = self._round(current, self._action())
                self._check(number)
            current.clean_up()
            self._finish()
        finally:
            for launch in self._all:
                launch.clean_up()
        return self.tally

    def _action(self) -> str:
        kills = [kill for kill in KILLS if kill != "writer" or self._engine in _WITH_A_WRITER]
        return self._rng.choice([*kills, CONCURRENT, TAKE_OVER])

    def _round(self, current: Launch, action: str) -> Launch:
        """Carry out a round. Returns the launch that runs after it."""
        self.tally.rounds[action] += 1
        self._await_commits(current, self._rng.randint(1, 3))
        self._find_ranks(current)
        time.sleep(self._rng.uniform(0.0, 0.05))
        if action == CONCURRENT:
            self._expect_refusal(current)
            return current
        if action == TAKE_OVER:
            successor = self._start("--take-over")
            if current.wait(self._limit_s) == 0:
                self.tally.wrong.append(f"{self._log_of(current)}: ended with 0 though it was superseded")
            elif "has superseded this one" not in self._log_of(current).read_text(errors="replace"):
                self.tally.wrong.append(f"{self._log_of(current)}: does not name its successor")
            return successor
        current.send(signal.SIGKILL, self._victims(current, action))
        if action == "writer":  # training may continue without saving, or with another writer
            if current.exit_code is None:
                second = self._start()
                second.wait(self._limit_s)
                second.clean_up()
            current.kill(Launch.everything)
        return self._start_until_accepted()

    def _find_ranks(self, launch: Launch) -> None:
        """Look in the newest cycle that has a rank of this launch; refused launches may have cycles, too."""
        for cycle in reversed(range(self.tally.launches)):
            launch.find_ranks(self._trace, cycle)
            if launch.ranks():
                return

    def _victims(self, launch: Launch, kill: str) -> list[psutil.Process]:
        ranks = launch.ranks()
        if kill == "launcher":
            return launch.launcher()
        if kill == "all":
            everything = launch.everything()
            return self._rng.sample(everything, len(everything))
        if kill == "rank-0":
            return ranks[:1]
        if kill == "writer":
            writers = [process for process in launch.of_ranks() if process not in ranks]
            return self._rng.sample(writers, min(1, len(writers)))
        return self._rng.sample(ranks, min(1, len(ranks)))

    def _start(self, *flags: str) -> Launch:
        log = self._out / f"launch_{self.tally.launches:03d}.log"
        self.tally.launches += 1
        launch = Launch([*_on_free_port(self._command), *flags], log, echo=False)
        self._all.append(launch)
        return launch

    def _log_of(self, launch: Launch) -> Path:
        return self._out / f"launch_{self._all.index(launch):03d}.log"

    def _start_until_accepted(self) -> Launch:
        """Start the next launch, again and again while it is refused because rank 0 of the one before is alive."""
        while True:
            launch = self._start()
            before = len(self._committed())
            deadline = time.monotonic() + self._limit_s
            while launch.exit_code is None and len(self._committed()) == before:
                self._check_deadline(deadline, launch)
                time.sleep(0.05)
            if launch.exit_code is None:
                return launch
            if not self._was_refused(launch):
                raise DrillError(f"a launch ended with exit code {launch.exit_code}; see {self._log_of(launch)}")
            self.tally.refused += 1

    def _was_refused(self, launch: Launch) -> bool:
        return "--take-over: it then stops saving" in self._log_of(launch).read_text(errors="replace")

    def _expect_refusal(self, current: Launch) -> None:
        second = self._start()
        code = second.wait(self._limit_s)
        if current.exit_code is not None:
            raise DrillError(f"a launch was disturbed by a concurrent one; see {self._log_of(current)}")
        if code == 0 or not self._was_refused(second):
            self.tally.wrong.append(f"{self._log_of(second)}: was not refused though another launch is running")
        self.tally.refused += 1
        second.wait_until_gone(self._limit_s)

    def _await_commits(self, launch: Launch, number: int) -> None:
        before = len(self._committed())
        deadline = time.monotonic() + self._limit_s
        while len(self._committed()) < before + number:
            if launch.exit_code is not None:
                raise DrillError(f"a launch ended with exit code {launch.exit_code}; see {self._log_of(launch)}")
            self._check_deadline(deadline, launch)
            time.sleep(0.02)

    def _check_deadline(self, deadline: float, launch: Launch) -> None:
        if time.monotonic() > deadline:
            raise DrillError(f"no checkpoint was committed for {self._limit_s:g} s; see {self._log_of(launch)}")

    def _committed(self) -> list[tuple[int, int]]:
        """(cycle, step) of every save that rank 0 has recorded as committed."""
        for cycle in range(len(self._tails), self.tally.launches):
            self._tails.append(TraceTail(self._trace, cycle))
        for cycle, tail in enumerate(self._tails):
            for record in tail.new_records():
                if stage_begun_by(record) == "after-commit":
                    self._commits.append((cycle, record["step"]))
        return self._commits

    def _check(self, number: int) -> None:
        """Check that every committed checkpoint exists. Repeated, since one may be being replaced at this instant."""
        for attempt in range(3):
            expected = {step for _, step in self._committed()}
            candidates, problems = discover(self._save, None)
            missing = expected - {candidate.step for candidate in candidates}
            if not (missing or problems):
                break
            time.sleep(0.2 * (attempt + 1))
        else:
            self.tally.lost += [f"round {number}: global_step{step}" for step in sorted(missing)]
            self.tally.lost += [f"round {number}: {problem}" for problem in problems]

    def _finish(self) -> None:
        """Do a reference run, without a fault, and compare all losses with it."""
        cycles = facts_of(self._trace)
        self.tally.committed = len(self._committed())
        self.tally.steps = max(step for facts in cycles.values() for step in facts.losses)
        training = _on_free_port(self._training)
        expected = reference_of(training, self._out, self.tally.steps, self._limit_s).facts.losses
        for facts in cycles.values():
            self.tally.different_losses += sum(expected.get(step) != loss for step, loss in facts.losses.items())


def _on_free_port(command: list[str]) -> list[str]:
    """Give concurrent launches a port each; a command without the option chooses its port itself."""
    if commands.option(command, _PORT) is None:
        return command
    return commands.with_launcher_option(command, _PORT, free_port())


def markdown(tallies: list[Tally], elapsed_s: float) -> str:
    """The results as a table."""
    actions = (*KILLS, CONCURRENT, TAKE_OVER)
    figures = ("launches", "refused", "steps", "committed", "lost", "different losses")
    rows = []
    for tally in tallies:
        counts = [tally.rounds[action] for action in actions]
        counts += [tally.launches, tally.refused, tally.steps, tally.committed]
        counts += [len(tally.lost), tally.different_losses]
        verdict = "verified" if tally.sound else "NOT VERIFIED: " + "; ".join([*tally.lost, *tally.wrong][:3])
        rows.append([tally.engine, *map(str, counts), escaped(verdict)])
    lines = markdown_table(("engine", *actions, *figures, ""), rows)
    rounds = sum(tally.rounds.total() for tally in tallies)
    return "\n".join([*lines, "", f"{rounds} rounds in {elapsed_s / 60:.1f} minutes.", ""])


def run_rounds(training: list[str], out: Path, engines: Sequence[str], rounds: int, seed: int, limit_s: float) -> bool:
    """Divide `rounds` among the engines; write rounds.md, and print it. Returns whether nothing was lost or wrong."""
    begin = time.monotonic()
    tallies: list[Tally] = []
    for i, engine in enumerate(engines):
        mine = rounds // len(engines) + (i < rounds % len(engines))
        say(f"{mine} rounds with engine {engine}")
        rng = random.Random(f"{seed}/{engine}")
        tallies.append(EngineRounds(training, engine, out.absolute() / engine, rng, limit_s).run(mine))
        # Written after each engine, so that its results are kept even if a later engine fails.
        (out / "rounds.md").write_text(markdown(tallies, time.monotonic() - begin))
    print(markdown(tallies, time.monotonic() - begin))
    return all(tally.sound for tally in tallies)
