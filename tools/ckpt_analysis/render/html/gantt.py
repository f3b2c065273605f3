"""Figure 4: time line of one checkpoint: threads of three ranks, and the training steps at the same time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from ....common.formatting import plural
from ...metrics.phases import PHASE_NAME
from ...metrics.results import OperationStats
from ..content import Content, folded, missing, plot
from .colours import STEP, colour
from .plots import bar, layout
from .run_data import RunData, title_of, wall_of

_SHOW_ALL_UP_TO = 4  # ranks
_MOST_BARS = 1500  # of a thread; more are drawn together where they are too close to be told apart
_STEPS_AROUND = 1
_MARGIN = 0.15  # of the save's length, shown before and after it


@dataclass(frozen=True)
class _Bar:
    lane: int
    place: float  # of the lane's height, from -0.5 to 0.5
    height: float
    phase: str
    start_s: float
    end_s: float
    text: str


def draw(run: RunData) -> Content:
    """The shown save on at most four ranks."""
    save = run.save
    if save is None or (spans := run.spans_of(save)).is_empty():
        return missing("No save was recorded span by span to its end on any rank, so there is no timeline of one.")
    ranks = [(f"rank {rank} ({word})", rank) for word, rank in run.three_ranks(save)]
    present = sorted(spans["rank"].unique())
    if len(present) <= _SHOW_ALL_UP_TO:
        ranks = [(f"rank {rank}", rank) for rank in present]
    begin = spans.select(pl.col("operation_start_ns").min()).item()
    steps = _steps_and_save(run, save)
    lanes: list[str] = []
    bars: list[_Bar] = []
    merged = 0
    for name, rank in ranks:
        mine = spans.filter(pl.col("rank") == rank).with_columns(pl.col("thread").cast(pl.String))
        threads = mine.group_by("thread").agg(pl.col("blocking").any(), pl.col("start_ns").min())
        for thread, blocking, _ in threads.sort("blocking", "start_ns", descending=[True, False]).iter_rows():
            word = "blocking" if blocking else "background"
            lanes.append(f"{name}: {thread}, {word}")
            rows = _thin(mine.filter(pl.col("thread") == thread), begin)
            merged += int(rows["merged"].sum())
            bars += _lane_bars(rows, len(lanes) - 1)
        lanes.append(f"{name}: training steps")
        bars += _steps(steps.filter(pl.col("rank") == rank), len(lanes) - 1)
    y = {"tickmode": "array", "tickvals": list(range(len(lanes))), "ticktext": lanes}
    y |= {"range": [len(lanes) - 0.5, -0.5], "showgrid": False}
    wall = wall_of(save)
    description = (
        f"Timeline of {title_of(save)} on {', '.join(name for name, _ in ranks)}: a lane per thread and one of the "
        f"training steps. It lasts {wall.max_s:.3f} s; rank {save.critical_rank} was waited for."
    )
    longest = max(one.end_s for one in bars if one.phase != STEP) - begin / 1e9
    arranged = layout(
        30 * len(lanes) + 140,
        x="seconds since the first rank began the save",
        y="",
        barmode="overlay",
        # Steps may be far longer than the save: the plot opens on the save, and zooms out.
        xaxis={"range": [-_MARGIN * longest, (1 + _MARGIN) * longest]},
        yaxis=y,
    )
    notes = [_overlap(steps, save)]
    if merged:
        notes.append(f"{merged} spans too short to be told apart were drawn as one with their neighbours.")
    content = Content([plot(title_of(save), _traces(bars, begin), arranged, description)], [], notes)
    return folded(content) if run.has_small(save) else content


def _thin(spans: pl.DataFrame, begin: int) -> pl.DataFrame:
    """Spans of one thread, in order, with column `merged`: how many were joined to the one before.

    Only of very many: those of one phase whose gap is below a two-thousandth of the whole.
    """
    ordered = spans.sort("start_ns", "end_ns").with_columns(pl.lit(0).alias("merged"), PHASE_NAME.alias("name"))
    if ordered.height <= _MOST_BARS:
        return ordered
    least = (ordered.select(pl.col("end_ns").max()).item() - begin) // 2000
    gap = pl.col("start_ns") - pl.col("end_ns").cum_max().shift(1).over("name")
    starts = (gap > least).fill_null(True)
    return (
        ordered.with_columns(starts.cum_sum().over("name").alias("run"))
        .group_by("name", "run")
        .agg(
            pl.col("start_ns").min(),
            pl.col("end_ns").max(),
            pl.col("duration_ns").sum(),
            pl.lit(None, pl.Categorical).alias("file"),
            (pl.len() - 1).alias("merged"),
        )
        .sort("start_ns", "end_ns")
    )


def _lane_bars(rows: pl.DataFrame, lane: int) -> list[_Bar]:
    """Bars of a lane. Spans that share a window alternate within it: they share its height."""
    shared = rows.with_columns(
        pl.len().over("start_ns", "end_ns").alias("sharing"),
        pl.int_range(pl.len()).over("start_ns", "end_ns").alias("nth"),
    )
    bars = []
    for row in shared.iter_rows(named=True):
        height = 0.8 / row["sharing"]
        window = (row["end_ns"] - row["start_ns"]) / 1e9
        text = f"{row['name']}: {row['duration_ns'] / 1e9:.4f} s"
        if row["duration_ns"] < row["end_ns"] - row["start_ns"]:
            text += f" busy of a window of {window:.4f} s"
        text += f"<br>{row['file']}" if row["file"] else ""
        text += f"<br>{row['merged'] + 1} spans" if row["merged"] else ""
        place = -0.4 + height * (row["nth"] + 0.5)
        bars.append(_Bar(lane, place, height, row["name"], row["start_ns"] / 1e9, row["end_ns"] / 1e9, text))
    return bars


def _steps(mine: pl.DataFrame, lane: int) -> list[_Bar]:
    """Training steps of a rank that overlap its part of the save, and those just before and after."""
    mine = mine.sort("start_ns")
    before = mine.filter(pl.col("end_ns") <= pl.col("from_ns")).tail(_STEPS_AROUND)
    after = mine.filter(pl.col("start_ns") >= pl.col("until_ns")).head(_STEPS_AROUND)
    bars = []
    for row in pl.concat([before, mine.filter("during"), after]).iter_rows(named=True):
        text = f"step {row['step']}: {(row['end_ns'] - row['start_ns']) / 1e9:.4f} s"
        bars.append(_Bar(lane, 0.0, 0.5, STEP, row["start_ns"] / 1e9, row["end_ns"] / 1e9, text))
    return bars


def _steps_and_save(run: RunData, save: OperationStats) -> pl.DataFrame:
    """Iterations of the cycle of the save, with its window on the same rank and whether they overlap (`during`)."""
    window = run.frames.operations.filter(pl.col("group") == save.group).select(
        "rank",
        pl.col("start_ns").alias("from_ns"),
        pl.col("end_ns").fill_null(pl.col("end_ns").max()).alias("until_ns"),
    )
    during = (pl.col("start_ns") < pl.col("until_ns")) & (pl.col("end_ns") > pl.col("from_ns"))
    iterations = run.frames.iterations.filter(pl.col("cycle") == save.cycle)
    return iterations.join(window, on="rank").with_columns(during.alias("during"))


def _traces(bars: list[_Bar], begin: int) -> list[dict[str, Any]]:
    """One trace per phase, so that the legend has each once."""
    of_phases: dict[str, list[_Bar]] = {}
    for one in bars:
        of_phases.setdefault(one.phase, []).append(one)
    return [
        bar(
            phase,
            colour(phase),
            x=[round(one.end_s - one.start_s, 7) for one in mine],
            y=[round(one.lane + one.place, 4) for one in mine],
            base=[round(one.start_s - begin / 1e9, 7) for one in mine],
            width=[round(one.height, 4) for one in mine],
            hover=[one.text for one in mine],
        )
        for phase, mine in of_phases.items()
    ]


def _overlap(steps: pl.DataFrame, save: OperationStats) -> str:
    """How much training went on while it was saved, in words."""
    during = steps.filter("during")["step"].n_unique()
    if during:
        return f"{plural(during, 'training step')} ran, in whole or in part, while it was saved."
    if save.drain_s:
        return "No training step ran while it was saved: training was over, and its end waited for this save."
    return "No training step ran while it was saved: training stood still until the save was complete."
