"""Columns, and the three forms of a table."""

from __future__ import annotations

import csv
import io

import pytest

from tools.common.tables import (
    Column,
    csv_table,
    fitted_table,
    markdown_table,
    numbers,
    text_table,
    text_width,
    texts,
    times,
    titles,
    wrapped,
)

COLUMNS: tuple[Column[dict], ...] = (
    Column("name", lambda item: item["name"]),
    numbers("files", lambda item: item["files"]),
    times("took s", lambda item: item["took"], 2),
)
ITEMS = [{"name": "torch", "files": 12, "took": 1.5}, {"name": "lazy", "files": None, "took": None}]


def test_numbers_are_sorted_by_and_what_is_not_recorded_is_marked() -> None:
    assert titles(COLUMNS) == ["name", "files", "took s"]
    assert texts(COLUMNS, ITEMS) == [["torch", "12", "1.50"], ["lazy", "-", "-"]]
    assert [COLUMNS[2].cell(item).order for item in ITEMS] == [1.5, None]
    assert COLUMNS[0].cell(ITEMS[0]).order is None


def test_text_is_aligned() -> None:
    rows = texts(COLUMNS, ITEMS)
    expected = ["  name   files  took s", "  torch     12    1.50", "  lazy       -       -"]
    assert text_table(titles(COLUMNS), rows) == expected
    assert text_table(titles(COLUMNS), rows, indent="", left=0)[2] == " lazy      -       -"
    assert text_table(titles(COLUMNS), []) == ["  name  files  took s"]


def test_a_table_fits_the_terminal_and_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = text_table(titles(COLUMNS), texts(COLUMNS, ITEMS))
    monkeypatch.setenv("COLUMNS", str(max(map(len, whole))))
    assert fitted_table(COLUMNS, ITEMS, optional=("files", "took s")) == whole
    monkeypatch.setenv("COLUMNS", str(max(map(len, whole)) - 1))
    narrow = fitted_table(COLUMNS, ITEMS, optional=("files", "took s"))
    assert narrow == ["  name   took s", "  torch    1.50", "  lazy        -", "  (no room for: files)"]
    monkeypatch.setenv("COLUMNS", "1")
    assert fitted_table(COLUMNS, ITEMS, optional=("files", "took s"))[1:] == [
        "  torch", "  lazy", "  (no room for: files, took s)",
    ]  # fmt: skip
    assert text_width(30) == 1
    monkeypatch.delenv("COLUMNS")
    assert text_width(30) <= 30


def test_markdown_has_a_ruler_of_as_many_columns() -> None:
    lines = markdown_table(titles(COLUMNS), texts(COLUMNS, ITEMS), numbers=True)
    assert lines == ["| name | files | took s |", "| --- | ---: | ---: |", "| torch | 12 | 1.50 |", "| lazy | - | - |"]
    assert markdown_table(["a", "b"], [])[1] == "| --- | --- |"


def test_csv_holds_no_formula_and_nothing_for_none() -> None:
    rows = list(csv.reader(io.StringIO(csv_table(["a", "b"], [("=1+1", None), ("x,\n", -1.5)]))))
    assert rows == [["a", "b"], ["'=1+1", ""], ["x,\\n", "-1.5"]]


def test_a_number_stays_on_the_line_of_its_unit() -> None:
    assert wrapped("blocked for 0.1534 s of 12 s", 18) == ["blocked for", "0.1534 s of 12 s"]
    assert wrapped("of 2 seconds and 3 GB/s, 4 %", 11, begin="- ", rest="  ") == [
        "- of 2",
        "  seconds",
        "  and",
        "  3 GB/s,",
        "  4 %",
    ]
