"""The soak of all engines, one after the other. A call that was stopped is continued by the next one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.config.uris import below

from ..launch import DrillError
from ..plan import say
from .engine_soak import EngineSoak, SoakOptions
from .result import EngineResult, Goal, markdown
from .schedule import LEFT_OUT

_SAVES, _RESTARTS = 200, 50  # over all engines, if no duration is given


def goals(engines: int, faults: int, minutes: float | None, saves: int | None, restarts: int | None) -> list[Goal]:
    """The goal of each engine. An engine continues the sequence of `faults` where the engine before has ended."""
    if minutes is not None:
        return [Goal(seconds=minutes * 60 / engines, first=i * (faults // 2)) for i in range(engines)]
    saves, restarts = saves or _SAVES, restarts or _RESTARTS
    found, first = [], 0
    for i in range(engines):
        mine = restarts // engines + (i < restarts % engines)
        found.append(Goal(mine, None, -(-saves // engines), first))
        first += mine
    return found


def claim(out: Path, options: dict[str, Any]) -> None:
    """Create `out`, or accept that of an earlier call with the same options. Raises DrillError for any other."""
    file, text = out / "soak.json", json.dumps(options, default=str)
    if file.exists() and file.read_text() == text:
        return
    if out.exists() and any(out.iterdir()):
        raise DrillError(f"--out {out}: already exists and is not of a soak with these options; give a new directory")
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def run_soak(options: SoakOptions, goal_of: Mapping[str, Goal]) -> bool:
    """Write soak.md after each engine, and print it. Returns whether all engines passed. Raises DrillError."""
    results: list[EngineResult] = []
    for engine, goal in goal_of.items():
        results.append(_of_engine(options, engine, goal))
        (options.base.out / "soak.md").write_text(markdown(results, LEFT_OUT))
    print(markdown(results, LEFT_OUT))
    return all(result.passed for result in results)


def _of_engine(options: SoakOptions, engine: str, goal: Goal) -> EngineResult:
    """Run the soak of an engine, or read its result if it is finished."""
    base = options.base
    file = base.out / engine / "result.json"
    if file.exists():
        return EngineResult(**json.loads(file.read_text()))
    if file.parent.exists():  # an earlier call was stopped
        for place in (file.parent, below(base.checkpoints, engine)):
            shutil.rmtree(str(place), ignore_errors=True)
    say(f"engine {engine}")
    result = EngineSoak(options, engine, goal).run()
    file.write_text(json.dumps(asdict(result), indent=1))
    return result
