"""Is the training that was struck the training that was not? Losses of all iterations, to the last bit."""

from __future__ import annotations

import json
import re
from pathlib import Path

from megatron.restart_trace.schema import RANK_FILE_REGEX


def losses_of(trace_dir: Path) -> dict[int, dict[int, float]]:
    """Cycle -> iteration -> loss, of the lowest rank that recorded one. A line that a killed rank tore is left out."""
    found: dict[int, dict[int, float]] = {}
    for path in sorted(trace_dir.iterdir()):
        match = re.match(RANK_FILE_REGEX, path.name)
        if match is None:
            continue
        for line in path.read_bytes().split(b"\n")[:-1]:
            if b'"iteration"' not in line:
                continue
            record = json.loads(line)
            if record["type"] == "iteration" and "loss" in record:
                found.setdefault(record["cycle"], {}).setdefault(record["step"], record["loss"])
    return found


def differences(struck: Path, reference: Path) -> dict[int, list[str]]:
    """Cycle -> what is not as in the reference run; empty lists where all is. Every cycle with a loss is there."""
    expected = losses_of(reference).get(0, {})
    found: dict[int, list[str]] = {}
    for cycle, losses in losses_of(struck).items():
        found[cycle] = [
            f"iteration {step}: loss {loss!r}, and {expected.get(step)!r} in the reference run"
            for step, loss in losses.items()
            if expected.get(step) != loss
        ]
    return found
