"""Which engines a soak leaves out; which faults it injects, in which order and where. The seed decides these."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from itertools import count
from pathlib import Path

from ..faults import DISK_FULL, ENDS_THE_LAUNCH, FAULTS, HOST, NODES
from ..injection_points import InjectionPoint, parse_injection_point
from ..matrix import cells
from ..plan import LAUNCH, RELAUNCH

LEFT_OUT = {"datastates": "it needs a CUDA device", "none": "it writes nothing"}  # engine -> why


def possible_faults(*, on_nodes: bool, fills_disk: bool) -> tuple[str, ...]:
    """`fills_disk`: whether the checkpoints are on a small file system of their own."""
    where = NODES if on_nodes else HOST
    return tuple(name for name, fault in FAULTS.items() if where in fault.soaks and (fills_disk or name != DISK_FULL))


def in_order(faults: Collection[str], seed: int, first: int) -> Iterator[str]:
    """An endless sequence, from its element number `first`: all faults in random order, then all again, and so on."""
    chosen = sorted(faults)
    for number in count(first // len(chosen)):
        shuffled = random.Random(f"{seed}/{number}").sample(chosen, len(chosen))
        yield from shuffled[first % len(chosen) :] if number == first // len(chosen) else shuffled


def random_injection_point(
    fault: str, rng: random.Random, *, on_nodes: bool, in_training: bool, supervisor: str = LAUNCH
) -> InjectionPoint:
    """A valid injection point for the fault. `in_training`: not one during a restart."""
    supervisor = RELAUNCH if fault in ENDS_THE_LAUNCH else supervisor
    valid = [
        parse_injection_point(cell.injection_point)
        for cell in cells((supervisor,), ("",), Path(), (fault,), on_nodes=on_nodes)
        if cell.injection_point not in FAULTS[fault].soaks_not_at
    ]
    point = rng.choice([one for one in valid if not (in_training and one.during_restart)])
    return point if point.seed is None else parse_injection_point(f"random:{rng.randrange(1000)}")
