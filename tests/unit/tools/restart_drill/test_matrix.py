"""Which cells the matrix has, how they become sequences of launches, and what an error costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.config.uris import ObjectUri
from tests.unit.tools.restart_drill.test_reference import TRAINING, drilled
from tools.common.stopping import StoppedBySignal
from tools.restart_drill import cli, matrix, output
from tools.restart_drill.facts import CycleFacts
from tools.restart_drill.faults import FAULTS, ON_NODES, STORAGE_FAULTS
from tools.restart_drill.launch import DrillError
from tools.restart_drill.matrix import INJECTION_POINTS, Cell, Result, cells, injections_of, markdown, sequences
from tools.restart_drill.options import ENGINES, MATRIX
from tools.restart_drill.plan import SUPERVISORS, Injection, Plan
from tools.restart_drill.reference import Reference

DISK, BUCKET = Path("/mnt/small"), ObjectUri("bucket", "prefix")


def test_only_what_makes_sense_is_drilled() -> None:
    every = [*cells(SUPERVISORS, ENGINES[MATRIX], DISK), *cells(SUPERVISORS, ENGINES[MATRIX], BUCKET, STORAGE_FAULTS)]
    assert len(set(every)) == len(every)
    assert {cell.fault for cell in every} == set(FAULTS) - set(ON_NODES) and {
        cell.injection_point for cell in every
    } == set(INJECTION_POINTS)
    assert Cell("relaunch", "lazy", "sigkill-node", "mid-load") in every
    assert Cell("launch", "lazy", "sigkill-all", "mid-load") in every
    for left_out in (
        Cell("torchrun", "lazy", "sigkill-node", "mid-load"),
        Cell("launch", "lazy", "sigkill-launcher", "mid-step"),
        Cell("relaunch", "lazy", "disk-full", "mid-startup"),
        Cell("relaunch", "torch", "bitflip", "mid-load"),
    ):
        assert left_out not in every
    without = {cell.fault for cell in cells(SUPERVISORS, ENGINES[MATRIX], None)}
    assert without == set(FAULTS) - set(ON_NODES) - {"disk-full", *STORAGE_FAULTS}
    in_bucket = {cell.fault for cell in cells(SUPERVISORS, ENGINES[MATRIX], BUCKET)}
    assert in_bucket == set(FAULTS) - set(ON_NODES) - {"disk-full"}


def test_courses_are_of_one_supervisor_and_engine() -> None:
    every = cells(SUPERVISORS, ENGINES[MATRIX], DISK)
    found = sequences(every)
    assert sorted(cell for sequence in found for cell in map(str, sequence)) == sorted(map(str, every))
    for sequence in found:
        assert len({(cell.supervisor, cell.engine) for cell in sequence}) == 1
        assert len(sequence) <= matrix.MAX_INJECTIONS


def test_a_course_loses_as_many_nodes_as_there_are_spares() -> None:
    every = cells(("launch",), ("lazy",), None, on_nodes=True)
    assert {cell.fault for cell in every} == {*ON_NODES, "sigkill-one"}
    for spares in (1, 3):
        found = sequences(every, spares)
        assert [cell for sequence in found for cell in sequence] == every
        lost = [sum(cell.fault in ("node-loss", "link-cut") for cell in sequence) for sequence in found]
        assert max(lost) == spares


def test_no_two_starts_in_turn_are_refused() -> None:
    """The launcher would not start a third one."""
    step, load = (Cell("in-process", "dcp", "storage-fault:500", point) for point in ("mid-step", "mid-load"))
    assert sequences([step, load, load, step, load]) == [[step, load], [load, step, load]]
    assert sequences([load, load]) == [[load], [load]]
    again = Cell("relaunch", "dcp", "storage-fault:500", "mid-load")
    assert sequences([again, again]) == [[again, again]]


def test_a_course_that_begins_in_a_restart_has_one_before() -> None:
    load, step = (Cell("relaunch", "lazy", "sigstop", point) for point in ("mid-load", "mid-step"))
    assert [planned.fault for planned in injections_of([load, step])] == ["sigkill-all", "sigstop", "sigstop"]
    lost = Cell("launch", "lazy", "node-loss", "mid-load")
    assert [planned.fault for planned in injections_of([lost])] == ["sigkill-one", "node-loss"]
    assert [planned.point.text for planned in injections_of([step, load])] == ["mid-step", "mid-load"]


SEQUENCE = [Cell("relaunch", "lazy", fault, "mid-step") for fault in ("sigstop", "sigterm", "exception", "sigkill-all")]


def run(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    injected: int,
    error: str | Exception | None,
    unverified: tuple[int, ...] = (),
    analysis: str | None = None,
) -> list[Result]:
    """One sequence whose drill ends with `error` after `injected` faults. The drill is a stand-in: what is looked at is
    what is made of its outcome."""

    def drill(plan: Plan, schedule: Any, done: list[Injection]) -> None:
        for number, fault in enumerate(plan.faults[:injected]):
            done.append(Injection(number, fault, "mid-step", 1, 1, 1, 5))
        if error is not None:
            raise DrillError(error) if isinstance(error, str) else error

    def content(plan: Plan, done: list[Injection], reference: Reference, report: object) -> dict[str, Any]:
        entry = {"different": [], "restart_s": 1.0, "accounted": 1.0, "lost_steps": 0}
        return {"cycles": [entry | {"verified": injection.cycle not in unverified} for injection in done]}

    monkeypatch.setattr(matrix, "run_drill", drill)
    monkeypatch.setattr(matrix, "content_of", content)
    if analysis is None:
        monkeypatch.setattr(matrix, "analysed", lambda trace: None)
    else:
        monkeypatch.setattr(output, "_ANALYSIS", analysis)
        monkeypatch.setattr(matrix, "analysed", output.analysed)
    out = tmp_path / f"{injected}_{error}"
    base = cli.base_plan(cli.parse_arguments(["--matrix", "--out", str(out)]), TRAINING)
    (out / "sequence_000" / "checkpoints").mkdir(parents=True)
    return matrix.run_sequence(base, 0, SEQUENCE, Reference(CycleFacts(), tmp_path))


def test_an_error_costs_one_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert [r.verified for r in run(monkeypatch, tmp_path, 4, None)] == [True] * 4
    found = run(monkeypatch, tmp_path, 2, "the injection point was not reached")
    assert [(r.cell, r.verified, r.wrong) for r in found] == [
        (SEQUENCE[0], True, ""), (SEQUENCE[1], True, ""), (SEQUENCE[2], None, "the injection point was not reached"),
    ]  # fmt: skip
    found = run(monkeypatch, tmp_path, 2, "the launch after it died", (1,))
    assert [(r.cell, r.verified) for r in found] == [(SEQUENCE[0], True), (SEQUENCE[1], None)]
    found = run(monkeypatch, tmp_path, 4, "the last launch did not end")
    assert [r.verified for r in found] == [True, True, True, None]
    assert len(run(monkeypatch, tmp_path, 0, "nothing came")) == 1
    (lost,) = run(monkeypatch, tmp_path, 3, None, analysis="a_module_that_is_not_there")
    assert (lost.cell, lost.verified) == (SEQUENCE[0], None)
    assert lost.wrong.endswith("No module named a_module_that_is_not_there")
    with pytest.raises(StoppedBySignal):
        run(monkeypatch, tmp_path, 1, StoppedBySignal())


def test_the_table_shows_what_failed() -> None:
    results = [
        Result(SEQUENCE[0], True, "", 4.25, 0.991, 3),
        Result(SEQUENCE[1], False, "iteration 3: loss 1.0"),
        Result(SEQUENCE[2], None, "the injection point was not reached"),
    ]
    text = markdown(results, 90.0)
    assert "| relaunch | lazy | `sigstop` | `mid-step` | 4.25 | 99.1% | 3 | verified |" in text
    assert "NOT VERIFIED: iteration 3" in text and "did not run: the injection point" in text
    assert "1 of 3 cells verified, in 1.5 minutes." in text


@pytest.mark.usefixtures("own_environment")
def test_the_reference_run_of_another_matrix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sequences are a stand-in: what is looked at is what they are compared with, and that it is not run again."""
    seen: list[Reference] = []

    def sequence(base: Plan, chosen: list[Cell], reference: Reference, spares: int) -> list[Result]:
        seen.append(reference)
        return [Result(cell, True) for cell in chosen]

    monkeypatch.setattr(matrix, "run_cells", sequence)
    monkeypatch.setattr(cli, "stop_on_signals", lambda: None)
    earlier = drilled(tmp_path / "earlier", TRAINING)
    argv = ["--matrix", "--sample", "2", "--reference", str(earlier), "--"]
    assert cli.main(["--out", str(tmp_path / "out"), *argv, *TRAINING]) == cli.VERIFIED
    assert [reference.directory for reference in seen] == [earlier / "reference"]
    assert cli.main(["--out", str(tmp_path / "other"), *argv, *TRAINING, "--seed", "7"]) == cli.COULD_NOT_RUN
    assert len(seen) == 1 and "--seed 1234 there, and 7 here" in capsys.readouterr().err
