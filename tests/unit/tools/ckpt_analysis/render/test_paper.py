"""Figures as files, for papers: what the pages draw, matplotlib draws, too."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.unit.tools.ckpt_analysis.trace_factory import Options, write_trace
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.render.content import Plot, plot
from tools.ckpt_analysis.render.html.page import run_contents
from tools.ckpt_analysis.render.html.plots import bar, lanes, line, matrix
from tools.ckpt_analysis.render.paper.files import SUFFIXES, plots_of, write_figures
from tools.ckpt_analysis.render.paper.marks import decoded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is in the extra dev"),
]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    where = tmp_path_factory.mktemp("traces")
    return write_trace(where / "a", Options(hosts=2)), write_trace(where / "b", Options(background_flush=True))


def texts(path: Path) -> list[str]:
    """All texts of an SVG file, which are texts there and no outlines."""
    names = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(one.itertext()).strip() for one in names]


def is_pdf(path: Path) -> bool:
    return path.read_bytes().startswith(b"%PDF")


def test_a_run_and_a_comparison_are_written(
    traces: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each plot of the page is an SVG and a PDF file, under the name of its section."""
    first, second = map(str, traces)
    assert main(["report", first, "--figures", str(tmp_path / "run")]) == 0
    names = {path.stem for path in (tmp_path / "run").iterdir()}
    assert f"run: {len(names)} figures as SVG and as PDF" in capsys.readouterr().err
    assert {"restart", "budget", "waterfall_1", "breakdown_1", "ranks_1", "timeline", "files_1", "steps"} <= names
    assert sorted(f"{name}.{suffix}" for name in names for suffix in SUFFIXES) == sorted(
        path.name for path in (tmp_path / "run").iterdir()
    )
    assert all(is_pdf(path) for path in (tmp_path / "run").glob("*.pdf"))
    shown = texts(tmp_path / "run" / "restart.svg")
    assert {"supervisor", "rank 5, node1", "imports", "critical path", "first step done: 18.970 s"} <= set(shown)
    assert "0.240" in texts(tmp_path / "run" / "ranks_1.svg")  # rank 5's fsync

    assert main(["compare", f"blocking={first}", f"background={second}", "--figures", str(tmp_path / "two")]) == 0
    assert {"A blocking", "B background"} <= set(texts(tmp_path / "two" / "comparison_1.svg"))
    assert {"1", "1.5"} <= set(texts(tmp_path / "two" / "comparison_3.svg"))  # a narrow logarithmic axis has ticks, too


def test_the_same_trace_gives_the_same_files(traces: tuple[Path, Path], tmp_path: Path) -> None:
    plots = {name: one for name, one in figures(traces[0]).items() if name in ("restart", "ranks_1")}
    for directory in ("one", "two"):
        write_figures(plots, tmp_path / directory)
    for path in (tmp_path / "one").glob("*"):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def figures(trace: Path) -> dict[str, Plot]:
    from tools.ckpt_analysis import open_trace

    return plots_of((figure.name, content.all_plots) for figure, content in run_contents(open_trace(trace).analysis))


def drawn(tmp_path: Path, data: list[dict[str, Any]], layout: dict[str, Any]) -> str:
    write_figures({"one": plot("One", data, layout, "a test")}, tmp_path)
    return (tmp_path / "one.svg").read_text()


def boxes(svg: str, colour: str) -> list[tuple[float, float]]:
    """(left, right) of the filled rectangles of a colour, without that of the legend, from the left."""
    paths = re.findall(rf'<path d="([^"]*)"[^>]*style="fill: {colour}', svg.partition('id="legend')[0])
    numbers = [[float(x) for x in re.findall(r"[ML] ([\d.]+) ", path)] for path in paths]
    return sorted((min(xs), max(xs)) for xs in numbers if len(xs) >= 4)


def share(parts: Iterable[tuple[float, float]]) -> list[float]:
    lengths = [right - left for left, right in parts]
    return [length / sum(lengths) for length in lengths]


def test_bars_are_as_long_as_their_numbers(tmp_path: Path) -> None:
    """Stacked bars follow one another; others begin at their base."""
    data = [
        bar("read", "#0077BB", x=[1.0, 3.0], y=["a", "b"], hover=["", ""]),
        bar("wait", "#999999", x=[3.0], y=["a"], hover=[""]),
    ]
    svg = drawn(tmp_path / "stacked", data, lanes(["a", "b"], 30, 100, x="s", barmode="stack"))
    read, waited = boxes(svg, "#0077bb"), boxes(svg, "#999999")
    assert share(read) == pytest.approx([0.25, 0.75], abs=0.01)
    assert waited[0] == pytest.approx((read[0][1], read[0][1] + 3 * (read[0][1] - read[0][0])), abs=0.2)
    based = [bar("late", "#0077BB", x=[1.0, 1.0], y=["a", "a"], base=[0.0, 3.0], hover=["", ""])]
    first, second = boxes(drawn(tmp_path / "based", based, lanes(["a"], 30, 100, x="s", barmode="overlay")), "#0077bb")
    assert second[0] - first[1] == pytest.approx(2 * (first[1] - first[0]), rel=0.01)


def test_numbers_survive_the_map_and_an_unknown_mark_is_no_silence(tmp_path: Path) -> None:
    assert decoded(matrix([[1.0, 2.5], [3.0, 4.0]])) == [[1.0, 2.5], [3.0, 4.0]]
    unknown = line("x", "#0077BB", x=[1], y=[1], marker={"symbol": "hexagram"})
    with pytest.raises(KeyError, match="hexagram"):
        drawn(tmp_path, [unknown], lanes(["a"], 30, 100, x="s"))


def test_without_matplotlib_it_is_named_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for command in (["report", "/no/trace"], ["compare", "/no/a", "/no/b"], ["sweep", "/no/sweep"]):
        assert main([*command, "--figures", str(tmp_path / "paper")]) == 2
        assert "needs matplotlib" in capsys.readouterr().err


def test_a_directory_that_cannot_be_written_is_named(
    traces: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert main(["report", str(traces[0]), "--figures", str(tmp_path / "file" / "sub")]) == 2
    error = capsys.readouterr().err
    assert f"--figures {tmp_path / 'file' / 'sub'}: cannot be written" in error and "Traceback" not in error
