"""Stops of a job: a signal, the processes that it reaches, the moment, and the launcher. Drawn by a seed."""

from __future__ import annotations

import dataclasses
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from .launchers import LAUNCHERS

ASKS = ("SIGTERM", "SIGUSR1")  # both are given by --exit-signal: the ranks save, and end
SIGNALS = (*ASKS, "SIGKILL")
TARGETS = ("launcher", "rank", "helper", "all")
MOMENTS = ("start-up", "load", "training", "evaluation", "save")
TRAINS = ("training", "evaluation", "save")  # the moments at which a rank obeys --exit-signal-handler
WORKERS = (0, 2, 4)  # values of --num-workers
ENGINES = ("torch", "lazy", "fastpersist-decoupled", "torchsnapshot", "dcp-async")
WITH_A_WRITER = ("fastpersist-decoupled",)  # writes files in a process of its own
# When the next launch starts: once nothing of the job is left; right after the signal, while processes of the job may
# be left; or before the signal, beside the job: it must be refused or, with --take-over, end the job.
LATER, AT_ONCE, BESIDE, TAKE_OVER = NEXT = ("later", "at-once", "beside", "take-over")


@dataclass(frozen=True)
class Stop:
    launcher: str
    workers: int
    engine: str
    signal: str
    target: str
    moment: str
    next: str = LATER

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self))

    @property
    def number(self) -> signal.Signals:
        return signal.Signals[self.signal]

    @property
    def saves(self) -> bool:
        """Whether --exit-signal-handler promises a save of the iteration at which the job stops."""
        return self.signal in ASKS and self.moment in TRAINS

    def refusal(self) -> str | None:
        """Why this is no stop; None if it is one."""
        values = {"launcher": LAUNCHERS, "workers": WORKERS, "engine": ENGINES, "signal": SIGNALS, "target": TARGETS,
                  "moment": MOMENTS, "next": NEXT}  # fmt: skip
        for name, valid in values.items():
            if getattr(self, name) not in valid:
                return f"{name}={getattr(self, name)} is none of {', '.join(map(str, valid))}"
        if self.target == "launcher" and not LAUNCHERS[self.launcher].watches:
            return f"launcher={self.launcher} has no launcher that lives as long as its ranks"
        if self.target == "rank" and self.moment == "start-up" and not LAUNCHERS[self.launcher].watches:
            return "nobody tells the other ranks that it has ended before the rendezvous: they wait for its deadline"
        has_helpers = self.workers > 0 or (self.engine in WITH_A_WRITER and self.next == AT_ONCE)
        if self.target == "helper" and (not has_helpers or self.moment not in TRAINS):
            return "target=helper is a data worker, which exists while a job with workers trains"
        if self.target == "helper" and self.signal in ASKS:
            return "target=helper ignores the signals that ask a job to end; they reach it with target=all"
        return self._refusal_of_next()

    def _refusal_of_next(self) -> str | None:
        if self.next == LATER:
            return None
        launcher = LAUNCHERS[self.launcher]
        if launcher.in_place or not launcher.watches:
            return f"next={self.next} needs a launcher that ends with its ranks; launcher={self.launcher} does not"
        if self.moment not in ("training", "save"):
            return f"next={self.next} needs a job that saves: moment=training or moment=save"
        if self.next == AT_ONCE:
            return None if self.signal == "SIGKILL" else "next=at-once needs signal=SIGKILL: others wait for the save"
        if (self.signal, self.target) != ("SIGTERM", "all"):
            return f"next={self.next} needs signal=SIGTERM,target=all, by which the job that goes on is ended"
        return None


def parse_stop(text: str) -> Stop:
    """The stop that `str` has shown as `text`. Raises ValueError."""
    pairs = {"next": LATER, **{name: value for name, _, value in (part.partition("=") for part in text.split(","))}}
    names = [field.name for field in dataclasses.fields(Stop)]
    if sorted(pairs) != sorted(names) or not pairs["workers"].isdigit():
        raise ValueError(f"{text}: give {','.join(f'{name}=...' for name in names)}, of which workers is a number")
    stop = Stop(**pairs | {"workers": int(pairs["workers"])})  # type: ignore[arg-type]
    wrong = stop.refusal()
    if wrong is not None:
        raise ValueError(f"{text}: {wrong}")
    return stop


def drawn(seed: int) -> Iterator[Stop]:
    """An endless sequence. Each signal, target, moment and next launch comes once before any comes again.

    The rest is drawn.
    """
    rng = random.Random(seed)
    by_kind: dict[tuple[str, ...], list[Stop]] = {}
    for values in product(LAUNCHERS, WORKERS, ENGINES, SIGNALS, TARGETS, MOMENTS, NEXT):
        stop = Stop(*values)
        if stop.refusal() is None:
            by_kind.setdefault((stop.signal, stop.target, stop.moment, stop.next), []).append(stop)
    while True:
        for kind in rng.sample(sorted(by_kind), len(by_kind)):
            launchers = sorted({stop.launcher for stop in by_kind[kind]})
            launcher = rng.choice(launchers)
            yield rng.choice([stop for stop in by_kind[kind] if stop.launcher == launcher])
