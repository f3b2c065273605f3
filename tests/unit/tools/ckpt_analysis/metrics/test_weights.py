"""A save of weights only is no checkpoint: what a report says of checkpoints is the same with it and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from restart_trace.schema import RANK_FILE_PATTERN
from tests.unit.tools.ckpt_analysis.analysis_helpers import kinds, result
from tests.unit.tools.ckpt_analysis.trace_factory import RANKS, Options, dump, rank_log, write_trace
from tools.ckpt_analysis import open_trace
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.project.inputs import Given, gather
from tools.ckpt_analysis.render.headline import headline
from tools.ckpt_analysis.render.questions import questions

OPTIONS = Options(instrument="hooks")
EXPORT_MS = 3000  # of the rank that writes; the others return at once


def exported(directory: Path, ranks: range) -> Path:
    """A trace in which these ranks save the weights last of all: rank 0 writes them."""
    write_trace(directory, OPTIONS)
    for rank in ranks:
        log = rank_log(OPTIONS, rank, 1)
        op = log.begin("save", "transformers", tag="export-12", step=12, weights_only=True)
        num_bytes = 7_000 if rank == 0 else 0
        op.span("library_call", None, EXPORT_MS if rank == 0 else 1, bytes=num_bytes)
        op.end(bytes=num_bytes, num_files=int(rank == 0))
        dump(directory / RANK_FILE_PATTERN.format(rank=rank, cycle=1), log.records)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [range(1), range(RANKS)])
def test_weights_are_no_checkpoint(tmp_path: Path, ranks: range) -> None:
    without, trace = write_trace(tmp_path / "without", OPTIONS), exported(tmp_path / "exported", ranks)
    report, expected = result(trace), result(without)
    (weights,) = report["weights"]
    assert (weights["tag"], weights["bytes"], weights["ranks"]) == ("export-12", 7_000, len(ranks))
    assert weights["blocked_s"] == pytest.approx(EXPORT_MS / 1000)
    assert report["saves"] == expected["saves"] and not expected["weights"]
    assert kinds(report) == kinds(expected)

    def said(found: dict[str, Any]) -> list[tuple[str, str]]:
        return [(finding["rule"], finding["title"]) for finding in found["findings"]]

    assert said(report) == said(expected)
    with_weights, plain = open_trace(trace).report, open_trace(without).report
    assert headline(with_weights)[1] == headline(plain)[1]
    assert questions(with_weights)[-1] == questions(plain)[-1]
    assert gather(with_weights, Given()) == gather(plain, Given())


def test_weights_of_one_rank_are_no_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = exported(tmp_path, range(1))
    assert main(["--strict", "--all", "--no-cache", str(trace)]) == 0
    text = capsys.readouterr().out
    assert "Save of weights export-12 in cycle 1 (1 rank, transformers)" in text and "Saves (2)" in text


def test_rows_of_weights_have_a_name_of_their_own(tmp_path: Path) -> None:
    run = open_trace(exported(tmp_path, range(1)))
    wholes = run.summary().filter(run.summary()["phase"].is_null())
    assert wholes["operation"].to_list() == ["launch", "restart", "load", "save", "save", "weights"]
    marked = run.operations().filter(run.operations()["weights_only"])
    assert marked.select("operation", "tag", "rank").rows() == [("save", "export-12", 0)]
