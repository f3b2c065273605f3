"""A ladder: parts for one loan of a device, the most important first, within a time after which nothing runs any more.

What is known of its parts is in OUT/ladder_N.json, and is written anew after each part, as are overview and archive. So
they are complete whenever the ladder is ended, by its own time or by whoever lends the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.gpu.files import write_json
from tests.gpu.parts import LADDERS, Part, Setting, part_named
from tests.gpu.runner import GRACE_S, KILL_S, UNKNOWN, device_problem, publish, run_part

BUDGET_S = 420.0
RESERVE_S = GRACE_S + KILL_S + 5.0  # before the end of the budget: what runs is ended, WORK removed, the archive packed
_LEAST_LIMIT_S = 120.0  # a machine's first import of a library may take a minute
_NEXT = "its turn has not come"


@dataclass(frozen=True)
class Limits:
    """When a ladder ends: `budget_s` after `began`, a value of time.monotonic()."""

    began: float
    budget_s: float

    @property
    def until(self) -> float:
        """Until when parts may run, a value of time.monotonic()."""
        return self.began + self.budget_s - RESERVE_S

    def left_s(self) -> float:
        return self.until - time.monotonic()


def ladder(number: int, rehearsal: bool) -> list[Part]:
    """Its parts. On a device each is ended after twice its expected time, but not before two minutes."""
    parts = [part_named(name) for name in LADDERS[number]]
    if rehearsal:
        return parts
    return [replace(part, limit_s=min(part.limit_s, max(2 * part.expected_s, _LEAST_LIMIT_S))) for part in parts]


def run_parts(
    parts: Sequence[Part], setting: Setting, limits: Limits | None = None, number: int | None = None
) -> list[str | None]:
    """Run parts in their order; the outcome of each. `limits`: None for no end. `number`: of the ladder they make.

    A part that is expected to take longer than what is left is passed over: a shorter one after it may still fit. Parts
    that did not run are UNKNOWN; what is in OUT of an earlier run of them stays. Raises OSError, TierError.
    """
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    outcomes: dict[str, str | None] = {part.name: UNKNOWN for part in parts}
    rest = {part.name: _NEXT for part in parts}
    setting.out.mkdir(parents=True, exist_ok=True)

    def tell() -> None:
        if number is not None:
            told = {name: {"outcome": outcome, "why": rest.get(name)} for name, outcome in outcomes.items()}
            record: dict[str, Any] = {"ladder": number, "began": began, "rehearsal": setting.rehearsal, "parts": told}
            record["budget_s"] = None if limits is None else limits.budget_s
            write_json(setting.out / f"ladder_{number}.json", record)
        publish(setting, rest)

    tell()
    for part in parts:
        reason = why_not(part, setting, limits)
        if reason is None:
            del rest[part.name]
            outcomes[part.name] = run_part(part, setting, math.inf if limits is None else limits.until)
        else:
            rest[part.name] = reason
        tell()
    return list(outcomes.values())


def why_not(part: Part, setting: Setting, limits: Limits | None) -> str | None:
    """Why a part is not run now; None if it is."""
    left_s = math.inf if limits is None else limits.left_s()
    if left_s < part.expected_s:
        return f"{max(left_s, 0):.0f} s were left of the ladder's time, and it is expected to take {part.expected_s} s"
    return device_problem(setting) if part.needs_device else None
