"""Figure 8: training steps around checkpoints, and by how much a background save slows them down."""

from __future__ import annotations

from typing import Any

import polars as pl

from ....common.formatting import NOT_RECORDED, plural
from ....common.tables import Column, numbers, times
from ..content import Content, Plot, Table, folded, missing, plot, table
from .colours import MARK
from .plots import BAND, LINE, layout, line, vertical
from .run_data import RunData, worst_of_neighbours

_MOST_POINTS = 4000  # per line
_MOST_BANDS = 300


def draw(run: RunData) -> Content:
    """Time of every step on its slowest rank, with the saves, and steps during saves against the others."""
    steps = _steps(run)
    if steps.is_empty():
        if run.report.steps:
            return Content([_times_alone(run)], [], ["Which steps ran beside a save is not recorded."])
        return missing("No training step was recorded.")
    notes, by_cause, cost_s = _interference(steps)
    if steps.group_by("cycle").len().filter(pl.col("len") > _MOST_POINTS).height:
        notes.append("Of neighbouring steps the slowest is drawn: the run has more steps than the plot has points.")
    content = Content([_plot(run, steps)], [by_cause], notes)
    return folded(content) if run.is_small(cost_s) else content


def _steps(run: RunData) -> pl.DataFrame:
    """cycle, step, slowest_s, median_s, slowest (rank), first, during: by cycle and step.

    `during`: on some rank a save was under way for some of the step. `first`: the first of its cycle.
    """
    took = (pl.col("end_ns") - pl.col("start_ns")) / 1e9
    return (
        _with_saves(run)
        .with_columns(took.alias("took"))
        .group_by("cycle", "step")
        .agg(
            pl.col("took").max().alias("slowest_s"),
            pl.col("took").median().alias("median_s"),
            pl.col("rank").get(pl.col("took").arg_max()).alias("slowest"),
            pl.col("during").any(),
        )
        .sort("cycle", "step")
        .with_columns((pl.col("step") == pl.col("step").min().over("cycle")).alias("first"))
    )


def _times_alone(run: RunData) -> Plot:
    """Step times of a run of which nothing else is known about steps (an imported log)."""
    steps = run.report.steps[-_MOST_POINTS:]
    times_s = [step.seconds for step in steps]
    data = [line("step time", LINE, x=[step.step for step in steps], y=times_s, marker={"size": 5})]
    arranged = layout(320, x="training step", y="seconds", yaxis={"rangemode": "tozero"})
    return plot("Step time", data, arranged, f"Line of the time of {len(steps)} training steps.")


def _with_saves(run: RunData) -> pl.DataFrame:
    """Iterations with `during`: whether the rank's save that began last before their end went on in them.

    Each rank's own records are compared, on its own clock.
    """
    saves = run.frames.operations.filter((pl.col("operation") == "save") & pl.col("end_ns").is_not_null())
    saves = saves.select("cycle", "rank", from_ns="start_ns", until_ns="end_ns")
    iterations = run.frames.iterations.select("cycle", "rank", "step", "start_ns", "end_ns").sort("end_ns")
    under_way = (pl.col("from_ns") < pl.col("end_ns")) & (pl.col("until_ns") > pl.col("start_ns"))
    return iterations.join_asof(
        saves.sort("from_ns"),
        left_on="end_ns",
        right_on="from_ns",
        by=["cycle", "rank"],
        strategy="backward",
        check_sortedness=False,
    ).with_columns(under_way.fill_null(False).alias("during"))


def _plot(run: RunData, steps: pl.DataFrame) -> Plot:
    data: list[dict[str, Any]] = []
    dashes = ("solid", "dot", "dash", "dashdot")
    for index, cycle in enumerate(sorted(steps["cycle"].unique())):
        mine = steps.filter(pl.col("cycle") == cycle)
        mine, _ = worst_of_neighbours(mine, _MOST_POINTS, pl.col("slowest_s"))
        dashed = {"color": LINE, "width": 1.5, "dash": dashes[index % len(dashes)]}
        text = [
            f"step {row['step']}, cycle {cycle}: slowest rank {row['slowest']} {row['slowest_s']:.4f} s, median "
            f"{row['median_s']:.4f} s{', during a save' if row['during'] else ''}"
            for row in mine.iter_rows(named=True)
        ]
        hover = {"text": text, "hovertemplate": "%{text}<extra></extra>"}
        x, y = mine["step"].to_list(), [round(value, 6) for value in mine["slowest_s"]]
        data.append(line(f"cycle {cycle}, slowest rank", LINE, x=x, y=y, line=dashed, marker={"size": 5}, **hover))
        during = mine.filter("during")
        data.append(
            line(
                "step during a save",
                MARK,
                x=during["step"].to_list(),
                y=[round(value, 6) for value in during["slowest_s"]],
                mode="markers",
                marker={"size": 9, "symbol": "circle-open", "color": MARK, "line": {"width": 2}},
                hoverinfo="skip",
                showlegend=index == 0,
            )
        )
    saves = run.frames.operations.filter((pl.col("operation") == "save") & pl.col("step").is_not_null())
    after = sorted(saves["step"].unique().to_list())[-_MOST_BANDS:]
    shapes = [vertical(step + 0.5, layer="below") | {"line": {"color": BAND, "width": 5}} for step in after]
    arranged = layout(340, x="training step", y="seconds", yaxis={"rangemode": "tozero"}, shapes=shapes)
    description = (
        f"Line of the time of {steps.height} training steps on their slowest rank; saves after step "
        f"{', '.join(map(str, after[:8]))}{' and more' if len(after) > 8 else ''} are marked by vertical bands."
    )
    return plot("Step time; a vertical band is a save", data, arranged, description)


def _interference(steps: pl.DataFrame) -> tuple[list[str], Table, float | None]:
    """Steps during a save against the others, without the first step of each cycle; and what these cost, if known."""
    later = steps.filter(~pl.col("first"))
    during, quiet = later.filter("during"), later.filter(~pl.col("during"))
    parts = [
        ("step during a save", during["slowest_s"]),
        ("no save under way", quiet["slowest_s"]),
        ("first of a cycle", steps.filter("first")["slowest_s"]),
    ]
    by_cause = table("Training steps by what went on beside them", _COLUMNS, parts)
    cost_s: float | None = None
    if during.is_empty():
        cost_s = 0.0
        note = "No training step ran during a save: saves blocked training until they were complete."
    elif quiet.is_empty():
        note = "Every step ran during a save, so there is none to compare with."
    else:
        slow, median = (float(str(part["slowest_s"].median())) for part in (during, quiet))
        cost_s = max(slow - median, 0.0) * during.height
        ratio = f"{slow / median:.2f} times" if median else NOT_RECORDED
        note = (
            f"{plural(during.height, 'step')} during saves took {slow:.4f} s in the median, {ratio} the {median:.4f} s "
            f"of the {quiet.height} others: what background saving costs beside blocked time."
        )
    return [note], by_cause, cost_s


def _float(value: object) -> float | None:
    return None if value is None else float(str(value))


_COLUMNS: tuple[Column[tuple[str, pl.Series]], ...] = (
    Column("steps", lambda part: part[0]),
    numbers("number", lambda part: len(part[1])),
    times("median s", lambda part: _float(part[1].median())),
    times("fastest s", lambda part: _float(part[1].min())),
    times("slowest s", lambda part: _float(part[1].max())),
)
