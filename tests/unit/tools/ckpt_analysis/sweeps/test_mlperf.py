"""Which rules of MLPerf Storage for checkpoints the cells of a sweep break."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.ckpt_analysis.sweeps.mlperf import deviations
from tools.ckpt_analysis.sweeps.read import CellResult, Sweep
from tools.ckpt_analysis.sweeps.samples import Measured
from tools.common.sweep_files import OK, REPLAY, Cell

SETTINGS = {"operations": "saves_then_loads", "saves": 10, "vocab_size": 128256, "limit_bytes": "none", "ranks": "0-7"}
FACTS = {"ranks": 8, "hosts": 1, "limited": False}


def found(
    directory: Path,
    writes: int = 10,
    reads: int = 10,
    facts: dict[str, Any] | None = None,
    by_flags: dict[str, Any] | None = None,
    **changes: Any,
) -> list[str]:
    """Of a sweep of one cell: 8B as the rules have it, but for the changes; `by_flags`: what its flags overruled."""
    asked: dict[str, Any] = {
        "index": 0, "repeat": 1, "mode": "replay", "model": "7b", "tp": 1, "pp": 1, "dp": 8, "engine": "torch",
        "cache": "cold+warm", "fault": "none", "save_interval": None, "settings": SETTINGS,
    }  # fmt: skip
    cell = Cell(**asked | changes)
    result = CellResult(cell, directory, {"status": OK})
    measured = {"durable_s": writes, "load_cold_s": reads}
    engine = {name: {"samples": [1.0] * count} if count else None for name, count in measured.items()}
    ran = {"model": cell.model, "layout": {"tp": cell.tp, "pp": cell.pp, "dp": cell.dp}}
    ran |= {name: cell.settings.get(name) for name in ("vocab_size", "operations")}
    (directory / REPLAY).write_text(json.dumps({"engines": {"torch": engine}} | ran | (by_flags or {})))
    sweep = Sweep(Path(), "mlperf", "", 1, [result], {}, [])
    return deviations(sweep, [Measured(result, None, {}, FACTS | (facts or {}))])


def test_a_cell_that_follows_the_rules(tmp_path: Path) -> None:
    assert found(tmp_path) == []
    whole = {"ranks": 512, "hosts": 64}
    assert found(tmp_path, model="405b", tp=8, pp=32, dp=2, facts=whole) == []
    assert found(tmp_path, model="mlperf70b", tp=8, pp=1, dp=8, facts={"ranks": 64, "hosts": 8}) == []


@pytest.mark.parametrize(
    ("changes", "rule", "said"),
    [
        ({"model": "13b"}, "4.3.3", "which is not in table 2"),
        ({"model": "70b", "tp": 8}, "4.3.3", "has 64 heads, and the 70B of table 2 has 128: give mlperf70b"),
        ({"dp": 4, "facts": {"ranks": 4}}, "4.3.3", "and 8B has 1x1x8"),
        ({"settings": SETTINGS | {"vocab_size": 50257}}, "4.3.3", "vocab_size: 128256"),
        ({"by_flags": {"model": "13b"}}, "4.3.3", "has model 13b"),
        ({"by_flags": {"layout": {"tp": 8, "pp": 1, "dp": 1}}}, "4.3.3", "has TP8 PP1 DP1, and 8B has 1x1x8"),
        ({"by_flags": {"vocab_size": 50257}}, "4.3.3", "vocab_size: 128256"),
        ({"by_flags": {"operations": "save_and_load"}}, "4.7.1", "operations: saves_then_loads"),
        ({"facts": {"limited": True}}, "4.3.3", "limit_bytes: none"),
        ({"mode": "train"}, "4.3.3", "is no replay"),
        ({"model": "405b", "tp": 8, "pp": 32, "dp": 2}, "4.6.1", "has 8 processes, and its layout 512"),
        ({"facts": {"hosts": 2}}, "4.6.2", "8 processes on 2 hosts"),
        ({"settings": {"vocab_size": 128256}}, "4.7.1", "operations: saves_then_loads"),
        ({"writes": 4}, "4.7.1", "has 4 writes, and not 10"),
        ({"reads": 9}, "4.7.1", "has 9 cold reads, and not 10"),
        ({"reads": 0}, "4.7.1", "has 0 cold reads"),  # some were not cold
    ],
)
def test_what_breaks_a_rule_is_told_with_its_number(
    tmp_path: Path, changes: dict[str, Any], rule: str, said: str
) -> None:
    told = found(tmp_path, **changes)
    assert any(line.startswith(f"{rule}: 0000_") and said in line for line in told), told


def test_a_sweep_that_measured_nothing_follows_no_rule() -> None:
    assert deviations(Sweep(Path(), "mlperf", "", 1, [], {}, []), []) == ["4.7.1: nothing was measured"]
