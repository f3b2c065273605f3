"""Sums of the durations of spans in which no time counts twice: busy time, unions, and cutting to a window."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

_PIECE_ROWS = 500_000  # that are worked on at once: large enough for speed, small enough for memory
_LINE_NS = 1 << 62  # length of the number line that 64 bits hold


def clip(spans: pl.DataFrame, start: str, end: str) -> pl.DataFrame:
    """Cut spans to the window in the columns `start` and `end`; those wholly outside vanish.

    A null `end` is an open window. The duration shrinks with its span and never exceeds it.
    """
    start_ns = pl.max_horizontal("start_ns", start)
    end_ns = pl.min_horizontal("end_ns", end)  # ignores nulls
    return (
        spans.with_columns(start_ns.alias("start_ns"), end_ns.alias("end_ns"))
        .filter(pl.col("end_ns") >= pl.col("start_ns"))
        .with_columns(pl.min_horizontal("duration_ns", pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns"))
    )


def busy(spans: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """Time accounted for per group of the columns `by`: `busy_ns` and `union_ns`.

    Overlapping windows form clusters. union_ns sums the lengths of the clusters. busy_ns takes from each
    cluster the sum of its durations, but at most its length: phases that alternate within one window count
    what each really took, and parallel threads count a moment once.
    """
    op = ["op"] if "op" in spans.columns and "op" not in by else []
    spans = spans.select(*op, *by, "start_ns", "end_ns", "duration_ns")
    return pl.concat([_busy(_in_order(piece, by), by) for piece in pieces(spans)])


def pieces(spans: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Cut spans into pieces that share no operation of a rank (column `op`), if they are sorted by it."""
    height = spans.height
    if height <= _PIECE_ROWS or "op" not in spans.columns or not spans["op"].is_sorted():
        yield spans
        return
    start = 0
    while start < height:
        end = min(start + _PIECE_ROWS, height)
        if end < height:
            last = spans["op"][end - 1]
            end = int(spans["op"].search_sorted(last, side="right"))
        yield spans.slice(start, end - start)
        start = end


def _in_order(spans: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """Spans with those of each group of `by` together and sorted by start; `first` says where a group begins.

    Sorts no more than it must: where spans have the column `op` (which stands for group and rank) and are sorted by
    it and by start, a stable sort by one small number does.
    """
    if by[0] == "op" or ("op" in spans.columns and by[:2] == ["group", "rank"]):
        keyed = spans.with_columns(_key(by[1:] if by[0] == "op" else by[2:]).alias("key"))
        if not keyed["key"].is_sorted():
            keyed = keyed.sort("key", maintain_order=True)
        return _by_start(keyed, "key").with_columns(_differs("key").alias("first")).drop("key")
    return spans.sort(*by, "start_ns").with_columns(pl.any_horizontal(map(_differs, by)).alias("first"))


def _differs(name: str) -> pl.Expr:
    """Whether the value is not that of the row before; true in the first row."""
    return (pl.int_range(pl.len()) == 0) | pl.col(name).ne_missing(pl.col(name).shift(1))


def sorted_by_op(spans: pl.DataFrame) -> pl.DataFrame:
    """Spans sorted by `op` and start, as `busy` works on them fastest."""
    if not spans["op"].is_sorted():
        spans = spans.sort("op", maintain_order=True)
    return _by_start(spans, "op")


def _by_start(spans: pl.DataFrame, key: str) -> pl.DataFrame:
    """Spans that are sorted by `key`, sorted by start within each key too; mostly they are."""
    late = (pl.col("start_ns") < pl.col("start_ns").shift(1)) & (pl.col(key) == pl.col(key).shift(1))
    return spans.sort(key, "start_ns", maintain_order=True) if spans.select(late.any()).item() else spans


def _key(names: list[str]) -> pl.Expr:
    """`op` and the names of the phase and detail as one number."""
    key = pl.col("op").cast(pl.UInt64)
    for name in names:  # NAME has fewer than 255 words
        key = key * 256 + pl.col(name).to_physical().cast(pl.UInt64).fill_null(255)
    return key


def _busy(ordered: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """`busy` of spans that are in order."""
    start, end, duration = (ordered[name].to_numpy() for name in ("start_ns", "end_ns", "duration_ns"))
    first = ordered["first"].to_numpy()
    sets = np.flatnonzero(first)
    if (~first[1:] & (start[1:] < end[:-1])).any():
        busy_ns, union_ns = _clusters(start, end, duration, first)
    else:
        busy_ns, union_ns = _sums(duration, sets), _sums(end - start, sets)
    return ordered.filter("first").select(by).hstack(pl.DataFrame({"busy_ns": busy_ns, "union_ns": union_ns}))


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The sum of each stretch of `values`; `starts` says where they begin."""
    return np.add.reduceat(values, starts) if len(starts) else values


def _clusters(start: np.ndarray, end: np.ndarray, duration: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, ...]:
    """busy_ns and union_ns of each set of spans, some of which overlap; `first` is true where a set begins.

    Each set gets a stretch of one number line, as long as the longest set: then one running maximum over all rows
    serves as the running maximum within each set.
    """
    number = np.cumsum(first) - 1  # of each row's set
    begin = start[first][number]
    sets, longest = int(number[-1]) + 1, int((end - begin).max()) + 1
    if sets > 1 and sets * longest > _LINE_NS:
        middle = int(np.searchsorted(number, sets // 2))
        halves = (
            _clusters(*(a[part] for a in (start, end, duration, first))) for part in (np.s_[:middle], np.s_[middle:])
        )
        return tuple(np.concatenate(both) for both in zip(*halves, strict=True))
    shift = number * longest - begin
    start, reached = start + shift, np.maximum.accumulate(end + shift)
    opens = np.flatnonzero(np.concatenate([[True], start[1:] >= reached[:-1]]))  # where clusters begin
    closes = np.append(opens[1:], len(start)) - 1
    union = reached[closes] - start[opens]
    spent = np.minimum(union, _sums(duration, opens))
    clusters = np.flatnonzero(first[opens])  # the first one of each set
    return _sums(spent, clusters), _sums(union, clusters)
