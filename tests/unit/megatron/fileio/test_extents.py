"""Which byte ranges of a file are read at once, and what of them goes where."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron.fileio.extents import extents, file_plan, progressions

PATH = Path("file")


def test_regular_rows_are_one_pattern() -> None:
    """Else a row-parallel weight would cost a call for each of its rows."""
    source = np.concatenate([np.arange(100) * 64, 10_000 + np.arange(50) * 32, [90_000], [90_100]])
    target = np.concatenate([np.arange(100) * 16, 5000 + np.arange(50) * 16, [7000], [7016]])
    length = np.array([16] * 150 + [7] * 2)
    found = list(progressions(source, target, length, np.zeros(152, dtype=np.int64)))
    assert found == [(0, 100, 64, 16), (100, 50, 32, 16), (150, 2, 100, 16)]
    key = np.array([0] * 30 + [1] * 122)  # as where another stretch begins, or another tensor
    found = list(progressions(source, target, length, key))
    assert [(first, count) for first, count, *_ in found] == [(0, 30), (30, 70), (100, 50), (150, 2)]


def test_an_extent_stays_in_its_cell_and_takes_short_gaps_along() -> None:
    copies = [(0, 100, 0, 50), (1, 170, 0, 30), (2, 900, 7, 400)]
    found = extents(file_plan(PATH, copies, [(900, 400)], block=1000, gap=20))
    assert [(extent.start, extent.stop) for extent in found] == [(100, 200), (900, 1000), (1000, 1300)]
    assert [[rows.target for rows in extent.rows] for extent in found] == [[0, 1], [2], [2]]
    assert [extent.checks for extent in found] == [[], [(900, 100)], [(1000, 300)]]
    assert [rows.to for rows in found[2].rows] == [107]


def test_bytes_are_read_to_be_verified_where_nobody_wants_them() -> None:
    (found,) = extents(file_plan(PATH, [(0, 10, 0, 10)], [(0, 30)], block=1000))
    assert (found.start, found.stop, found.checks) == (0, 30, [(0, 30)])


def test_nothing_is_wanted_of_a_file() -> None:
    assert extents(file_plan(PATH, [], [])) == [] and extents(file_plan(PATH, [(0, 5, 0, 0)])) == []
