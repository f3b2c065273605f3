"""Records of operations that contradict other records of their process: each is sound by itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from ..common.names import FILE, WHO
from ..common.problems import Problem
from .decode import NAMED_FAULTS, describe_invalid
from .head import Head

# What tells an operation of one process from all others.
OPERATION_KEY = [FILE, *WHO, "op_id"]
_OF_OPERATIONS = ("operation_begin", "operation_end", "span", "probe")

Frames = dict[str, pl.DataFrame]


@dataclass
class _Left:
    """What is left out: (file, reason) of each record."""

    out: list[tuple[int, str]] = field(default_factory=list)

    def drop(self, frame: pl.DataFrame, bad: pl.Series, reason: str) -> pl.DataFrame:
        """The frame without the `bad` rows; `reason` may name op_id and operation."""
        for row in frame.filter(bad).iter_rows(named=True):
            self.out.append((row[FILE], reason.format(**row)))
        return frame.filter(~bad)


def drop_contradictions(frames: Frames, gaps: set[int], heads: list[Head]) -> tuple[Frames, list[Problem]]:
    """(frames without them, problems). `frames` have the columns OPERATION_KEY; `gaps`: files that lack records.

    An op_id is of the operation that most of its records name. It begins once and ends once, both with the same
    start. A span of an operation that has neither begun nor ended is believed only where records are missing.
    """
    left = _Left()
    found = dict(frames)
    voted = _voted({name: frames[name] for name in _OF_OPERATIONS})
    for name in _OF_OPERATIONS:
        other = found[name].join(voted, on=OPERATION_KEY, how="left", maintain_order="left")
        bad = other["operation"].cast(pl.String) != other["voted"]
        found[name] = left.drop(found[name], bad, f"{name} of {{operation}} {{op_id}}, which is another operation")
    for name in ("operation_begin", "operation_end"):
        again = ~found[name].select(pl.struct(OPERATION_KEY).is_first_distinct()).to_series()
        found[name] = left.drop(found[name], again, f"{name} of {{operation}} {{op_id}} a second time")
    begins, ends = found["operation_begin"], found["operation_end"]
    both = begins.join(ends, on=OPERATION_KEY, how="inner").filter(pl.col("start_ns") != pl.col("start_ns_right"))
    if not both.is_empty():  # which of them is right cannot be told
        for name in ("operation_begin", "operation_end"):
            found[name] = left.drop(
                found[name], _is_in(found[name], both), f"{name} of {{operation}} {{op_id}} has another start_ns than "
                "the other record of it"
            )  # fmt: skip
    marked = pl.concat([begins.select(OPERATION_KEY), ends.select(OPERATION_KEY)])
    spans = found["span"]
    stray = ~_is_in(spans, marked) & ~spans[FILE].is_in(sorted(gaps))
    found["span"] = left.drop(spans, stray, "span of {operation} {op_id}, which has no operation_begin")
    return found, _problems(left.out, heads)


def _voted(frames: Frames) -> pl.DataFrame:
    """OPERATION_KEY and `voted`, the operation that most records of it name; of equals the begin's."""
    operation = pl.col("operation").cast(pl.String).alias("voted")
    named = [frame.select(*OPERATION_KEY, operation) for frame in frames.values()]
    return (
        pl.concat(named)
        .group_by(*OPERATION_KEY, "voted", maintain_order=True)
        .agg(pl.len().alias("count"))
        .sort("count", descending=True, maintain_order=True)
        .unique(OPERATION_KEY, keep="first", maintain_order=True)
        .drop("count")
    )


def _is_in(frame: pl.DataFrame, others: pl.DataFrame) -> pl.Series:
    """Whether each row's operation is one of those of `others`."""
    wanted = others.select(OPERATION_KEY).unique().with_columns(pl.lit(True).alias("found"))
    rows = frame.select(OPERATION_KEY).join(wanted, on=OPERATION_KEY, how="left", maintain_order="left")
    return rows["found"].fill_null(False)


def _problems(out: list[tuple[int, str]], heads: list[Head]) -> list[Problem]:
    by_file: dict[int, list[str]] = {}
    for index, reason in out:
        by_file.setdefault(index, []).append(reason)
    return [
        describe_invalid(heads[index].file.path.name, len(reasons), reasons[:NAMED_FAULTS])
        for index, reasons in sorted(by_file.items())
    ]
