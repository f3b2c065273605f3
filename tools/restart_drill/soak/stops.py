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
ENGINES = ("lazy", "torch")  # one that saves beside training, and one that training waits for


@dataclass(frozen=True)
class Stop:
    launcher: str
    workers: int
    engine: str
    signal: str
    target: str
    moment: str

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
                  "moment": MOMENTS}  # fmt: skip
        for name, valid in values.items():
            if getattr(self, name) not in valid:
                return f"{name}={getattr(self, name)} is none of {', '.join(map(str, valid))}"
        if self.target == "launcher" and not LAUNCHERS[self.launcher].watches:
            return f"launcher={self.launcher} has no launcher that lives as long as its ranks"
        if self.target == "rank" and self.moment == "start-up" and not LAUNCHERS[self.launcher].watches:
            return "nobody tells the other ranks that it has ended before the rendezvous: they wait for its deadline"
        if self.target == "helper" and (self.workers == 0 or self.moment not in TRAINS):
            return "target=helper is a data worker, which exists while a job with workers trains"
        if self.target == "helper" and self.signal in ASKS:
            return "target=helper ignores the signals that ask a job to end; they reach it with target=all"
        return None


def parse_stop(text: str) -> Stop:
    """The stop that `str` has shown as `text`. Raises ValueError."""
    pairs = {name: value for name, _, value in (part.partition("=") for part in text.split(","))}
    names = [field.name for field in dataclasses.fields(Stop)]
    if sorted(pairs) != sorted(names) or not pairs["workers"].isdigit():
        raise ValueError(f"{text}: give {','.join(f'{name}=...' for name in names)}, of which workers is a number")
    stop = Stop(**pairs | {"workers": int(pairs["workers"])})  # type: ignore[arg-type]
    wrong = stop.refusal()
    if wrong is not None:
        raise ValueError(f"{text}: {wrong}")
    return stop


def drawn(seed: int) -> Iterator[Stop]:
    """An endless sequence. Each signal, target and moment comes once before any comes again; the rest is drawn."""
    rng = random.Random(seed)
    by_kind: dict[tuple[str, str, str], list[Stop]] = {}
    for values in product(LAUNCHERS, WORKERS, ENGINES, SIGNALS, TARGETS, MOMENTS):
        stop = Stop(*values)
        if stop.refusal() is None:
            by_kind.setdefault((stop.signal, stop.target, stop.moment), []).append(stop)
    while True:
        for kind in rng.sample(sorted(by_kind), len(by_kind)):
            launchers = sorted({stop.launcher for stop in by_kind[kind]})
            launcher = rng.choice(launchers)
            yield rng.choice([stop for stop in by_kind[kind] if stop.launcher == launcher])
