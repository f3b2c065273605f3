"""Time that spans account for, without counting any moment twice."""

from __future__ import annotations

from collections.abc import Iterator

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
    overlap = ~pl.col("first") & (pl.col("start_ns") < pl.col("end_ns").shift(1))
    if ordered.select(overlap.any()).item():
        return _busy_of_clusters(ordered, by)
    last = pl.col("first").shift(-1, fill_value=True)
    window_ns = pl.col("end_ns") - pl.col("start_ns")
    sums = ordered.select(
        pl.col("duration_ns").cum_sum().filter(last).alias("busy_ns"),
        window_ns.cum_sum().filter(last).alias("union_ns"),
    )
    return ordered.filter("first").select(by).hstack(sums.select(pl.all() - pl.all().shift(1, fill_value=0)))


def _busy_of_clusters(ordered: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """`busy` of spans that are in order, some of which overlap.

    Each set of spans gets a stretch of one number line, as long as the longest set: then one running maximum
    over all rows serves as the running maximum within each set.
    """
    begin = pl.when("first").then("start_ns").forward_fill()
    rows = (
        ordered.select(*by, "start_ns", "end_ns", "duration_ns", "first")
        .with_columns(
            (pl.col("first").cum_sum().cast(pl.Int64) - 1).alias("set"),
            (pl.col("start_ns") - begin).alias("start"),
            (pl.col("end_ns") - begin).alias("end"),
        )
        .drop("start_ns", "end_ns")
    )
    sets, longest = int(rows["set"][-1]) + 1, int(rows.select(pl.col("end").max()).item()) + 1
    if sets > 1 and sets * longest > _LINE_NS:
        middle = int(rows["set"].search_sorted(sets // 2))
        return pl.concat([_busy_of_clusters(half, by) for half in (ordered.slice(0, middle), ordered.slice(middle))])
    place = pl.col("set") * longest
    reached = (pl.col("end") + place).cum_max()
    rows = rows.with_columns((pl.col("start") + place).alias("start"), reached.alias("reached"))
    opens = (pl.col("start") >= pl.col("reached").shift(1)).fill_null(True)
    closes = opens.shift(-1, fill_value=True)
    spent = pl.col("duration_ns").cum_sum().filter(closes)
    totals = (
        rows.select(
            pl.col("set").filter(opens),
            (pl.col("reached").filter(closes) - pl.col("start").filter(opens)).alias("union_ns"),
            (spent - spent.shift(1, fill_value=0)).alias("sum_ns"),
        )
        .with_columns(pl.col("set").set_sorted())
        .group_by("set", maintain_order=True)
        .agg(pl.min_horizontal("union_ns", "sum_ns").sum().alias("busy_ns"), pl.col("union_ns").sum())
    )
    return rows.filter("first").select(by).hstack(totals.drop("set"))
