"""Which rules for a valid run hold for cells that several allocations measured."""

from __future__ import annotations

from pathlib import Path

from tools.ckpt_analysis.sweeps.read import CellResult, Sweep
from tools.ckpt_analysis.sweeps.rules import RULES
from tools.ckpt_analysis.sweeps.samples import Measured
from tools.common.sweep_files import Cell


def cells(*results: tuple[str | None, float, str]) -> list[CellResult]:
    """Cells in their order: (allocation, begin, mode)."""
    return [
        CellResult(Cell(index, 1, mode, "tiny", 1, 1, 1, "lazy", "warm", "none", None, {}), Path(),
                   {"began_unix_s": begun, "allocation": allocation, "status": "ok"})
        for index, (allocation, begun, mode) in enumerate(results)
    ]  # fmt: skip


def broken(rule: str, results: list[CellResult]) -> list[str]:
    measured = [Measured(one, None, {}, {}) for one in results]
    return list(RULES[rule](Sweep(Path(), "", "", 1, results, {}, []), measured))


def test_each_allocation_has_an_order_of_its_own() -> None:
    one_after_the_other = [("1x0", 1.0, "replay"), ("2x8", 3.0, "train"), ("1x0", 2.0, "replay"), ("2x8", 4.0, "train")]
    assert broken("in order", cells(*one_after_the_other)) == []
    assert broken("in order", cells(*((None, begun, mode) for _, begun, mode in one_after_the_other))) == [
        "0002_r1_replay_tiny_tp1_pp1_dp1_lazy_warm was measured before the cell ahead of it"
    ]
    swapped = [*one_after_the_other[:3], ("2x8", 2.5, "train")]
    assert broken("in order", cells(*swapped)) == [
        "0003_r1_train_tiny_tp1_pp1_dp1_lazy was measured before the cell ahead of it"
    ]


def test_the_storage_is_that_of_the_allocation_that_measured_it() -> None:
    storage = ("1x0", 1.0, "storage")
    assert broken("storage", cells(storage, ("1x0", 2.0, "replay"))) == []
    assert broken("storage", cells(storage, ("1x0", 2.0, "replay"), ("2x8", 3.0, "train"))) == [
        "the storage itself was not measured in 2x8, but in another allocation (nodes x GPUs)"
    ]
