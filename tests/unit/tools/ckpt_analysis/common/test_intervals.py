"""Busy time and unions against a plain computation, whatever the order of the spans and however they are cut."""

from __future__ import annotations

import random

import polars as pl
import pytest

from tools.ckpt_analysis.common import intervals
from tools.ckpt_analysis.common.names import NAME
from tools.ckpt_analysis.metrics.phases import spread_over_ranks

Spans = list[tuple[int, int, int]]  # start, end, duration


def plain(spans: Spans) -> tuple[int, int]:
    """busy and union, one span after the other."""
    clusters: list[list[int]] = []
    for start, end, duration in sorted(spans):
        if clusters and start < clusters[-1][1]:
            clusters[-1][1] = max(clusters[-1][1], end)
            clusters[-1][2] += duration
        else:
            clusters.append([start, end, duration])
    return sum(min(e - s, d) for s, e, d in clusters), sum(e - s for s, e, _ in clusters)


@pytest.fixture(scope="module")
def spans() -> pl.DataFrame:
    chance = random.Random(5)
    rows = []
    for op in range(60):
        for _ in range(chance.randint(1, 12)):
            start, window = 1_700_000_000_000_000_000 + chance.randint(0, 60), chance.choice([0, 1, 5, 20])
            phase = chance.choice(["flush", "barrier", "collect"])
            detail = chance.choice(["write", "fsync"]) if phase == "flush" else None
            rows.append((op, op % 4, op, phase, detail, start, start + window, chance.randint(0, window)))
    schema = {
        "op": pl.UInt32, "group": pl.UInt32, "rank": pl.Int64, "phase": NAME, "detail": NAME,
        "start_ns": pl.Int64, "end_ns": pl.Int64, "duration_ns": pl.Int64,
    }  # fmt: skip
    return pl.DataFrame(rows, schema=schema, orient="row")


@pytest.mark.parametrize("by", [["group", "rank"], ["group", "rank", "phase"], ["group", "rank", "phase", "detail"]])
@pytest.mark.parametrize("order", ["as they come", "sorted", "shuffled", "without op"])
@pytest.mark.parametrize(("piece_rows", "line_ns"), [(1_000_000, 1 << 62), (7, 1 << 62), (1_000_000, 500)])
def test_busy(
    monkeypatch: pytest.MonkeyPatch, spans: pl.DataFrame, by: list[str], order: str, piece_rows: int, line_ns: int
) -> None:
    """Small pieces and a short number line are what large logs and long spans make of it."""
    monkeypatch.setattr(intervals, "_PIECE_ROWS", piece_rows)
    monkeypatch.setattr(intervals, "_LINE_NS", line_ns)
    expected = {
        key: plain(list(rows.select("start_ns", "end_ns", "duration_ns").iter_rows()))
        for key, rows in spans.group_by(by)
    }
    if order == "sorted":
        spans = intervals.sorted_by_op(spans)
    elif order == "shuffled":
        spans = spans.sample(fraction=1, shuffle=True, seed=1)
    elif order == "without op":
        spans = spans.drop("op")
    found = {row[:-2]: row[-2:] for row in intervals.busy(spans, by).iter_rows()}
    assert found == expected


def test_busy_of_nothing(spans: pl.DataFrame) -> None:
    empty = intervals.busy(spans.clear(), ["group", "rank"])
    assert empty.is_empty() and empty.columns == ["group", "rank", "busy_ns", "union_ns"]


def test_pieces_share_no_operation(monkeypatch: pytest.MonkeyPatch, spans: pl.DataFrame) -> None:
    monkeypatch.setattr(intervals, "_PIECE_ROWS", 20)
    ordered = intervals.sorted_by_op(spans)
    parts = list(intervals.pieces(ordered))
    assert len(parts) > 5 and pl.concat(parts).equals(ordered)
    assert sum(part["op"].n_unique() for part in parts) == 60


@pytest.mark.parametrize("present", [0, 1, 2, 3, 4, 5, 6])
def test_ranks_without_a_value_count_as_zero(present: int) -> None:
    members = pl.DataFrame({"group": [7] * 6, "rank": range(6), "critical": [2] * 6})
    durations = {rank: 10 * (rank + 1) for rank in range(present)}
    values = pl.DataFrame(
        {"group": [7] * present, "rank": list(durations), "busy_ns": list(durations.values())},
        schema={"group": pl.Int64, "rank": pl.Int64, "busy_ns": pl.Int64},
    )
    spreads = spread_over_ranks(values, members, ["group"])
    if not present:
        assert spreads == {}
        return
    every = sorted(durations.get(rank, 0) for rank in range(6))
    spread, with_value = spreads[7,]
    assert with_value == present
    assert spread.max_s == pytest.approx(every[-1] / 1e9) and spread.slowest_rank == present - 1
    assert spread.median_s == pytest.approx((every[2] + every[3]) / 2e9)
    assert spread.min_s == pytest.approx(every[0] / 1e9)
    assert spread.at_critical_s == pytest.approx(durations.get(2, 0) / 1e9)


def test_of_no_time_at_all_the_lowest_rank_is_slowest() -> None:
    members = pl.DataFrame(
        {"group": [1, 1], "rank": [4, 3], "critical": [None, None]}, schema_overrides={"critical": pl.Int64}
    )
    values = pl.DataFrame({"group": [1], "rank": [4], "busy_ns": [0]})
    spread, with_value = spread_over_ranks(values, members, ["group"])[1,]
    assert with_value == 1 and (spread.slowest_rank, spread.max_s, spread.at_critical_s) == (3, 0.0, None)
