"""Figure 10: several runs side by side, drawn from the comparison that `ckpt-analysis compare` prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from math import floor, log10
from typing import Any

from ....common.formatting import NOT_RECORDED, number, percent, plural, size
from ....common.tables import Cell, Column, numbers
from ...compare import results
from ...compare.grid import Grid, grid_of, rows_of
from ...compare.results import Comparison, MetricRow, SpeedUp, VariantFacts
from ...compare.variants import short_name
from ..comparison import (
    ALIKE,
    GRID_TITLE,
    MEDIAN,
    METHOD,
    METRIC,
    RATIO,
    TEST,
    Result,
    by_storage,
    compared,
    interval_text,
    verdict_text,
)
from ..content import Content, Figure, Plot, Table, plot, table
from .colours import NEUTRAL, SERIES
from .plots import lanes, layout

_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
_SHARE = "blocked_share"
_LANE, _POINT = 24, 12  # pixels: the least of a lane, and of a point in it
# Decades of a logarithmic axis that has ticks at 2 and 5, too: of one that stands, and of one that lies.
_DENSE, _DENSE_LYING = 4, 2
_NARROW = (1, 1.5, 2, 3, 5, 7)  # ticks of an axis of less than one
_BESIDE = ("middle left", "middle right")  # values of two runs; of more there is no room for them
_TIMES = {
    "blocked_s": "save:<br>training<br>blocked",
    "durable_s": "save:<br>until<br>durable",
    "in_memory_s": "save:<br>agreed on<br>in memory",
    "load_s": "load",
    "load_cold_s": "load,<br>cold<br>files",
    "load_warm_s": "load,<br>warm<br>files",
    "launch_s": "launch:<br>process to<br>first step",
    "time_to_first_step_s": "restart:<br>process to<br>first step",
    "restart_s": "restart:<br>failure to<br>first step",
}
_SPEEDS = {
    "blocked_GBps": "save:<br>as training<br>sees it",
    "save_io_GBps": "save:<br>to storage",
    "load_io_GBps": "load:<br>from storage",
}
_IN_GRID = ("blocked_s", "durable_s", "load_s", "restart_s", _SHARE, "save_bytes")
_FACTS = ("engine", "layout", "model", "ranks", "hosts")
_CAPTION = (
    "Medians over what each run did (every save, load, restart; the first save of a cycle is left out where the notes "
    "say so), with a line from the smallest to the largest. A speed-up is against the first run, A, with its 95 % "
    "interval where there are enough repeats for one; whether it exceeds the noise is its verdict. All numbers are "
    "those of `ckpt-analysis compare`."
)
_TERMS = (
    "speed-up",
    "blocked share",
    "blocked time",
    "durable",
    "I/O throughput",
    "wall time",
    "time to first step",
    "restart",
)


def draw(comparison: Comparison) -> Content:
    """Plots of times, throughputs, blocked shares and speed-ups, or of engines by storage; tables of the same."""
    grid = grid_of(comparison)
    of_runs = [
        _values("Times: less is better", _TIMES, comparison),
        _values("Throughput: more is better", _SPEEDS, comparison),
        _speed_ups(comparison),
        _shares(comparison),
    ]
    plots = [_by_storage(comparison, grid)] if grid else of_runs
    tables = [_runs(comparison), *_grid(comparison), *_differences(comparison)]
    if grid:
        header, rows = by_storage(comparison, grid)
        tables.insert(0, Table(GRID_TITLE, header, [[Cell(text) for text in row] for row in rows]))
    method = [*comparison.notes, METHOD]
    return Content([drawn for drawn in plots if drawn], tables, _left_out(comparison), method)


def name_of(variant: VariantFacts) -> str:
    """Label and short name of a variant."""
    return f"{variant.label} {short_name(variant)}"


def _rows(names: dict[str, str], comparison: Comparison) -> dict[str, MetricRow]:
    """Title -> row, of those that some variant has."""
    return {title: row for name, title in names.items() if (row := comparison.row(name))}


def _values(title: str, names: dict[str, str], comparison: Comparison) -> Plot | None:
    """A point per metric and run on a logarithmic axis: times of saves and of restarts are far apart."""
    rows = _rows(names, comparison)
    if not rows:
        return None
    data = []
    for index, variant in enumerate(comparison.variants):
        mine = {name: cell for name, row in rows.items() if (cell := row.cells[index]).values}
        points = {name: (cell.median or 0.0, min(cell.values), max(cell.values)) for name, cell in mine.items()}
        drawn = _points(index, name_of(variant), points)
        if len(comparison.variants) <= len(_BESIDE):  # above the points are the lines to the largest value
            values = {"text": [f"{at:.3g}" for at, _, _ in points.values()], "textposition": _BESIDE[index]}
            drawn |= {"mode": "markers+text"} | values
        data.append(drawn)
    arranged = _arranged(rows, next(iter(rows.values())).unit)
    arranged["yaxis"] |= _logarithmic(_values_of(rows))
    measured = ", ".join(row.name for row in rows.values())
    description = f"{title}. Points of {measured} for {len(comparison.variants)} runs."
    return plot(title, data, arranged, description)


def _by_storage(comparison: Comparison, grid: Grid) -> Plot:
    """A lane per metric and storage, a point in it per engine: a long list of storages is a long figure."""
    rows = {
        f"{_TIMES[row.name].replace('<br>', ' ')}, {escape(storage)}": (row, storage)
        for row in rows_of(comparison)
        for storage in grid.storages
    }
    data = []
    for index, engine in enumerate(grid.engines):
        found = {title: grid.cell(row, engine, storage) for title, (row, storage) in rows.items()}
        mine = {title: cell for title, cell in found.items() if cell}
        points = {title: (cell.median or 0.0, min(cell.values), max(cell.values)) for title, cell in mine.items()}
        data.append(_lying(_points(index, engine, points)))
    lane = max(_LANE, _POINT * len(grid.engines))
    arranged = lanes(list(rows), lane, 100, x="seconds", scattermode="group", showlegend=True)
    arranged["yaxis"] |= {"range": [-0.5, len(rows) - 0.5], "dtick": 1}
    arranged["xaxis"] |= {"type": "log"} | _logarithmic(
        _values_of({title: row for title, (row, _) in rows.items()}), _DENSE_LYING
    )
    title = "Times by storage: less is better"
    description = f"{title}. Points of {len(grid.engines)} engines on {len(grid.storages)} storages."
    return plot(title, data, arranged, description)


def _lying(points: dict[str, Any]) -> dict[str, Any]:
    """`_points` whose values are drawn from left to right."""
    swapped = {"x": points["y"], "y": points["x"], "error_x": points["error_y"], "orientation": "h"}
    kept = {name: value for name, value in points.items() if name != "error_y"}
    return kept | swapped | {"hovertemplate": "%{y}: %{x:.4g}<extra>%{fullData.name}</extra>"}


def _values_of(rows: dict[str, MetricRow]) -> list[float]:
    return [value for row in rows.values() for cell in row.cells for value in cell.values]


def _logarithmic(values: Sequence[float], dense: int = _DENSE) -> dict[str, Any]:
    """A range of the logarithmic axis, in powers of ten, that labels above the highest point lie within; its ticks.

    Ticks are whole numbers: plotly's own show the first digit alone, so that 0.5 and 5 look the same.
    """
    values = [value for value in values if value > 0]
    if not values:
        return {}
    least, most = log10(min(values)) - 0.15, log10(max(values)) + 0.3
    digits = _NARROW if most - least <= 1 else (1, 2, 5) if most - least <= dense else (1,)
    ticks = [digit * 10.0**power for power in range(floor(least), floor(most) + 1) for digit in digits]
    shown = {"tickmode": "array", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    return {"range": [least, most]} | shown


def _speed_ups(comparison: Comparison) -> Plot | None:
    """A point per metric and run after the first: filled if it exceeds the noise, with its interval if it has one."""
    rows = _rows(_TIMES | _SPEEDS, comparison)
    data = []
    for index, variant in list(enumerate(comparison.variants))[1:]:
        gains = {title: gain for title, row in rows.items() if (gain := row.speed_up(row.cells[index]))}
        verdicts = [verdict_text(rows[title], rows[title].cells[index]) for title in gains]
        points = {title: (gain.times, gain.low or gain.times, gain.high or gain.times) for title, gain in gains.items()}
        drawn = _points(index, name_of(variant), points)
        drawn["marker"]["symbol"] = [
            _symbol(index) + ("" if verdict.startswith(results.DIFFERS) else "-open") for verdict in verdicts
        ]
        hover = "%{x}: %{y:.3g} times, %{text}<extra>%{fullData.name}</extra>"
        data.append(drawn | {"text": verdicts, "hovertemplate": hover})
    if not any(drawn["x"] for drawn in data):
        return None
    one = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "layer": "below"}
    arranged = _arranged(rows, "times as fast as A")
    arranged["shapes"] = [one | {"line": {"color": NEUTRAL, "width": 1.5, "dash": "dash"}}]
    ends = [value for drawn in data for value in _ends(drawn)]
    arranged["yaxis"] |= _logarithmic([*ends, 1.0])
    title = "Speed-up over A: filled where it exceeds the noise"
    return plot(title, data, arranged, f"{title}. Points of {len(rows)} metrics with their 95 % intervals.")


def _points(index: int, name: str, points: dict[str, tuple[float, float, float]]) -> dict[str, Any]:
    """The points of one run or engine: category -> (value, lowest, highest)."""
    colour = SERIES[index % len(SERIES)]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": list(points),
        "y": [at for at, _, _ in points.values()],
        "error_y": {"type": "data", "symmetric": False, "thickness": 1.5}
        | {"array": [high - at for at, _, high in points.values()]}
        | {"arrayminus": [at - low for at, low, _ in points.values()]},
        "marker": {"color": colour, "size": 10, "symbol": _symbol(index), "line": {"color": colour, "width": 2}},
        "hovertemplate": "%{x}: %{y:.4g}<extra>%{fullData.name}</extra>",
    }


def _ends(points: dict[str, Any]) -> list[float]:
    """The lowest and the highest value of each of `_points`."""
    bars = points["error_y"]
    lows = [at - below for at, below in zip(points["y"], bars["arrayminus"], strict=True)]
    return [*lows, *(at + above for at, above in zip(points["y"], bars["array"], strict=True))]


def _symbol(index: int) -> str:
    """Where colours come again, symbols are others."""
    return _SYMBOLS[(index + index // len(SERIES)) % len(_SYMBOLS)]


def _arranged(rows: dict[str, MetricRow], unit: str) -> dict[str, Any]:
    """Runs beside each other within each metric; metrics in the order of `rows`, whatever the first run lacks."""
    categories = {"type": "category", "categoryorder": "array", "categoryarray": list(rows)}
    xaxis = categories | {"range": [-0.7, len(rows) - 0.3], "tickfont": {"size": 11}}  # with room for values
    yaxis = {"type": "log", "exponentformat": "none"}
    unit = {"s": "seconds"}.get(unit, unit)
    return layout(380, x="", y=unit, xaxis=xaxis, yaxis=yaxis, scattermode="group", showlegend=True)


def _shares(comparison: Comparison) -> Plot | None:
    row = comparison.row(_SHARE)
    if row is None:
        return None
    known = {index: cell.median for index, cell in enumerate(row.cells) if cell.median is not None}
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": [100 * share for share in known.values()],
        "y": [name_of(comparison.variants[index]) for index in known],
        "marker": {"color": [SERIES[index % len(SERIES)] for index in known]},
        "text": [percent(share) for share in known.values()],
        "textposition": "auto",
        "insidetextanchor": "end",
        "hoverinfo": "skip",
    }
    axes = {"xaxis": {"rangemode": "tozero"}, "yaxis": {"type": "category", "autorange": "reversed"}}
    arranged = layout(110 + 34 * len(known), x="% of the training time", y="", **axes)
    title = "Training time that saves block: less is better"
    return plot(title, [bars], arranged, f"{title}. A bar for each of {len(known)} runs.")


def _runs(comparison: Comparison) -> Table:
    """What each run was: engine, layout, model, checkpoint, and whatever else is not the same in all."""
    facts = [*_FACTS, *(name for name in comparison.differing if name not in _FACTS)]

    def median(title: str, metric: str, show: Callable[[Any], str]) -> Column[int]:
        row = comparison.row(metric)
        return numbers(title, lambda index: row.cells[index].median if row else None, show)

    def fact(name: str) -> Column[int]:
        return Column(name, lambda index: variants[index].facts.get(name) or NOT_RECORDED)

    variants = comparison.variants
    columns: list[Column[int]] = [
        Column("run", lambda index: name_of(variants[index])),
        numbers("runs", lambda index: len(variants[index].directories)),
        *map(fact, facts),
        median("checkpoint", "save_bytes", lambda value: size(None if value is None else round(value))),
        median("files", "save_files", partial(number, spec=".10g")),
        median("training blocked", _SHARE, percent),
    ]
    return table("Runs compared", columns, range(len(variants)))


def _grid(comparison: Comparison) -> list[Table]:
    """Metrics by model and layout, an engine a column; nothing unless engines and one of these vary."""
    kept = ("model", "layout", "engine")
    facts = [tuple(variant.facts.get(name) or NOT_RECORDED for name in kept) for variant in comparison.variants]
    engines = list(dict.fromkeys(engine for *_, engine in facts))
    places = list(dict.fromkeys(place[:2] for place in facts))
    if len(engines) < 2 or len(places) < 2:
        return []
    rows = [
        [*map(Cell, (row.name, *place)), *(_grid_cell(comparison, row, facts, (*place, engine)) for engine in engines)]
        for name in _IN_GRID
        if (row := comparison.row(name))
        for place in places
    ]
    header = ["metric", "model", "layout", *engines]
    return [Table("Engines by model and layout: medians, and the speed-up over A", header, rows)]


def _grid_cell(comparison: Comparison, row: MetricRow, facts: list[tuple[str, ...]], wanted: tuple[str, ...]) -> Cell:
    """All variants whose `facts` are those wanted: more than one if they differ in something else."""
    texts, medians = [], []
    for variant, cell, of_variant in zip(comparison.variants, row.cells, facts, strict=True):
        if of_variant == wanted and cell.median is not None:
            gain = row.speed_up(cell)
            times = f", {gain.times:.3g}×" if gain else ""
            texts.append(f"{_value(row, cell.median)} ({variant.label}{times})")
            medians.append(cell.median)
    return Cell("; ".join(texts) or NOT_RECORDED, medians[0] if medians else None)


def _value(row: MetricRow, median: float) -> str:
    if row.unit == "bytes":
        return size(round(median))
    return percent(median) if row.name == _SHARE else f"{median:.4g} {row.unit}"


_DIFFERENCES: tuple[Column[Result], ...] = (
    *METRIC,
    Column("run", lambda r: name_of(r.variant)),
    MEDIAN,
    RATIO,
    numbers("speed-up", lambda r: gain.times if (gain := _gain(r)) else None, partial(number, spec=".3f")),
    Column("its 95 % interval", lambda r: interval_text(g.low, g.high) if (g := _gain(r)) else NOT_RECORDED),
    *TEST,
)


def _gain(result: Result) -> SpeedUp | None:
    return result.row.speed_up(result.cell)


def _differences(comparison: Comparison) -> list[Table]:
    """A row per metric and run after the first, with the numbers and verdicts that `ckpt-analysis compare` prints.

    Those that show no difference are in a table of their own, which is folded; where one run lacks the number is none.
    """
    found = compared(comparison, headline_only=True)
    found = [result for result in found if result.cell.verdict != results.NOT_RECORDED]
    captions = {False: "Which differences exceed the noise", True: "No difference from A shown"}
    tables = []
    for alike, caption in captions.items():
        rows = [result for result in found if (result.cell.verdict in ALIKE) == alike]
        title = f"{caption}; ratios are to A, n counts {comparison.repeats}"
        tables += [table(title, _DIFFERENCES, rows, folded=alike)] if rows else []
    return tables


def _left_out(comparison: Comparison) -> list[str]:
    """A sentence on the differences that cannot be had."""
    found = [result.cell.verdict for result in compared(comparison, headline_only=True)]
    missing = found.count(results.NOT_RECORDED)
    if not missing:
        return []
    return [f"{missing} of {plural(len(found), 'metric')} cannot be compared: A or the other run lacks them."]


FIGURE = Figure("comparison", "Comparison", "The runs side by side", draw, _CAPTION, _TERMS)
