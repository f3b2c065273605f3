"""Published figures are off by no more than their rows say, and the page shows what the command prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.published.__main__ import NAME, all_figures, main, render, status
from benchmarks.published.figure import CLOSE, DIFFERS, EQUAL, MISSED, WITHIN, Figure, Source
from tools.common.marked import between_markers

PAGE = Path(__file__).resolve().parents[3] / "docs" / "results" / "published.md"
SOURCE = Source("a paper", "https://example.org")


@pytest.fixture(scope="module")
def figures() -> list[Figure]:
    return all_figures()


def test_no_figure_is_off_by_more_than_its_limit_and_the_page_shows_them_all(
    figures: list[Figure], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.published.__main__.all_figures", lambda: figures)  # computed once
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert between_markers(PAGE.read_text(), NAME) == printed.rstrip("\n"), f"run it with --write {PAGE}"


def test_every_figure_has_a_source_and_its_reasons(figures: list[Figure]) -> None:
    assert len({figure.source.name for figure in figures}) >= 8
    for figure in figures:
        assert figure.source.url.startswith("https://") and figure.where and figure.inputs, figure.what
        assert figure.why or figure.verdict == EQUAL, f"{figure.what}: say why it is not equal"
        assert figure.verdict in (CLOSE, MISSED) or not figure.limit, f"{figure.what}: it is equal, and has a limit"


@pytest.mark.parametrize(
    ("predicted", "limit", "verdict"),
    [
        (10.04, 0.0, EQUAL),
        (10.06, 0.0, DIFFERS),
        (10.06, 0.01, CLOSE),
        (10.49, 0.5, CLOSE),
        (10.6, 0.5, MISSED),
        (36.5, 2.7, MISSED),
        (38.0, 2.7, DIFFERS),
        (10.06, -0.01, DIFFERS),  # in the other direction
        (9.94, -0.01, CLOSE),
        (8.6, -0.15, MISSED),
        (9.8, -0.01, DIFFERS),
        ((9.0, 11.0), 0.0, WITHIN),
        ((10.1, 11.0), 0.0, DIFFERS),
    ],
)
def test_verdicts(predicted: float | tuple[float, float], limit: float, verdict: str) -> None:
    figure = Figure("it", SOURCE, "table 1", 10.0, "GB", "inputs", predicted, digits=1, limit=limit)
    assert figure.verdict == verdict
    assert status([figure]) == (verdict == DIFFERS)


def test_a_unit_that_was_chosen_because_it_fits_is_marked(figures: list[Figure]) -> None:
    chosen = {number for number, figure in enumerate(figures, 1) if " fit" in figure.why and figure.unit[1:] == "iB"}
    rows = [line for line in render(figures) if line.startswith("| ")]
    marked = {number for number, row in enumerate(rows[2:], 1) if "iB † |" in row}
    assert len(marked) == 6 and chosen <= marked
    assert marked == {number for number, figure in enumerate(figures, 1) if figure.unit_chosen}


def test_a_prediction_that_changes_is_an_error(figures: list[Figure], capsys: pytest.CaptureFixture[str]) -> None:
    for number, figure in enumerate(figures):
        if isinstance(figure.predicted, float):
            changed = [*figures[:number], replace(figure, predicted=figure.predicted * 1.5), *figures[number + 1 :]]
            assert status(changed) == 1, figure.what
            assert figure.what in capsys.readouterr().err


@pytest.mark.slow
def test_writing_into_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- published: begin -->\nold\n<!-- published: end -->\nafter\n")
    assert main(["--write", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- published: begin -->\n|  | figure") and text.endswith("end -->\nafter\n")
    page.write_text("without markers\n")
    assert main(["--write", str(page)]) == 2
    assert "<!-- published: begin -->" in capsys.readouterr().err
