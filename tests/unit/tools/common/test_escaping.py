"""Text that somebody planted in a trace does nothing where it is shown."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest

from restart_trace.schema import type_of
from tests.unit.tools.ckpt_analysis.trace_factory import write_trace
from tools.ckpt_analysis.cli import main
from tools.common.escaping import csv_cell, markdown, visible

# ESC (colour, title of the window), a C1 control, a bidi override, a new line, HTML, a column's end, a formula.
PLANTED = '=1+1\x1b[31m\x1b]0;title\x07\x9b2J\u202eevil\n# heading <img src=x onerror="alert(1)">|x'
FIELDS = ("tag", "engine", "engine_used", "engine_asked", "durability", "host", "file", "error", "thread")
HIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")  # without the newline


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace whose tags, hosts, engines, files, threads, versions and notices are PLANTED."""
    directory = write_trace(tmp_path_factory.mktemp("planted") / "logs")
    for path in directory.glob("*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            record |= {name: PLANTED for name in FIELDS if name in record}
            if type_of(record) == "event" and path.name.startswith("rank_"):
                record["detail"] = record["phase"] = PLANTED
            if type_of(record) == "process":
                record["versions"] = {PLANTED: PLANTED}
        records[-1] |= {"colour\x1b[31m": 1}  # what `validate` names
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory


COMMANDS = [
    (command, form)
    for command in ("report", "report --all", "validate", "summary", "summary --all", "compare")
    for form in ("table", "markdown", "csv")
    if form == "table" or command.startswith(("summary", "compare"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "form"), COMMANDS)
def test_nothing_planted_reaches_the_terminal(
    planted: Path, capsys: pytest.CaptureFixture[str], command: str, form: str
) -> None:
    name, *flags = command.split()
    flags += ["--format", form] if name in ("summary", "compare") else []
    several = [f"a\x1b[31m\n# heading|\u202e={planted}", str(planted)] if name == "compare" else [str(planted)]
    assert main([name, *several, *flags]) in (0, 1)
    shown = capsys.readouterr().out
    assert HIDDEN.search(shown) is None
    assert "\n# heading" not in shown
    if form == "markdown":
        assert "<img" not in shown
        tables = [line for line in shown.splitlines() if line.startswith("|")]
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in tables}
        assert len(widths) <= 3  # one for each table
    if form == "csv":
        cells = [cell for row in csv.reader(io.StringIO(shown)) for cell in row]
        assert any(cell.startswith("'=1+1") for cell in cells) or name == "compare"
        assert not [cell for cell in cells if cell.startswith(("=", "+", "@", "\t", "\r"))]


@pytest.mark.slow
def test_nothing_planted_reaches_a_csv_file(planted: Path, tmp_path: Path) -> None:
    for table in ("spans", "operations", "events"):
        path = tmp_path / f"{table}.csv"
        assert main(["export", str(planted), "-o", str(path), "--table", table, "--quiet"]) == 0
        text = path.read_bytes().decode()
        assert HIDDEN.search(text) is None and r"\x1b" in text
        rows = list(csv.reader(io.StringIO(text)))
        assert {len(row) for row in rows} == {len(rows[0])}
        assert not [cell for row in rows for cell in row if cell.startswith("=")]


def test_errors_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(tmp_path / "no\x1b[31msuch")]) == 2
    assert r"no\x1b[31msuch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "cell"),
    [("=A1", "'=A1"), ("+1", "+1"), ("-1.5e3", "-1.5e3"), ("-x", "'-x"), ("@sum", "'@sum"), ("\t=1", r"\t=1"),
     ("\r=1", r"\r=1"), ("plain", "plain"), (-1, -1), (None, None)],
)  # fmt: skip
def test_formulas_in_csv(text: object, cell: object) -> None:
    assert csv_cell(text) == cell


def test_what_is_escaped() -> None:
    assert visible("grün 5\N{MICRO SIGN}s 検査") == "grün 5\N{MICRO SIGN}s 検査"
    assert visible("\x1b\x00\x85\u202e\ud800") == r"\x1b\x00\x85\u202e\ud800"
    assert markdown("a|b\n<b>`c` [x](y)") == r"a\|b\n&lt;b&gt;\`c\` \[x\](y)"
