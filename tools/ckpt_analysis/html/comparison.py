"""Figure 10: several runs side by side."""

from __future__ import annotations

from typing import Any

from tools.ckpt_analysis.compare.render import METHOD, metric_lines
from tools.ckpt_analysis.compare.results import Comparison
from tools.ckpt_analysis.formatting import NOT_RECORDED, count, size
from tools.ckpt_analysis.html.content import Cell, Content, Plot, Table, number, plot
from tools.ckpt_analysis.html.plots import LINE, SECOND_LINE, THIRD_LINE, layout
from tools.ckpt_analysis.run_comparison import METRICS, ComparedRun, Metric, median_of, speed_up

_COLOURS = (LINE, SECOND_LINE, THIRD_LINE, "#AA3377", "#999933", "#66CCEE", "#888888")
_PATTERNS = ("", "/", "\\", "x", "-", "|", "+")

CAPTION = (
    "Medians over what each run did (every save, load, restart), with a line from the smallest to the "
    "largest. The speed-up is against the first run. The second table says which differences exceed the noise: "
    "the one of `ckpt-analysis compare`."
)
TERMS = (
    "speed-up",
    "blocked share",
    "blocked_s",
    "durable_s",
    "io_GBps",
    "blocked_GBps",
    "load_s",
    "restart_s",
)


def draw(runs: list[ComparedRun], differences: Comparison) -> Content:
    """Tables of the runs, of their numbers and of what exceeds the noise; plots of the times and throughputs."""
    times = [metric for metric in METRICS if metric.unit == "s"]
    speeds = [metric for metric in METRICS if metric.unit == "GB/s"]
    plots = [
        drawn
        for drawn in (
            _bars("Times: less is better", times, runs),
            _bars("Throughput: more is better", speeds, runs),
        )
        if drawn
    ]
    notes = [*_notes(runs), *differences.notes, METHOD]
    return Content(plots, [_numbers(runs), _noise(runs, differences), _runs(runs)], notes)


def _notes(runs: list[ComparedRun]) -> list[str]:
    notes = []
    for run in runs:
        if run.blocked_share is not None:
            notes.append(f"{run.name}: saves blocked training for {run.blocked_share:.2%} of its time.")
    return notes


def _bars(title: str, metrics: list[Metric], runs: list[ComparedRun]) -> Plot | None:
    """Grouped bars on a logarithmic axis: times of saves and of restarts are far apart."""
    shown = [metric for metric in metrics if any(run.samples[metric.name] for run in runs)]
    if not shown:
        return None
    data: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        mine = [metric for metric in shown if run.samples[metric.name]]
        medians = [median_of(run, metric) or 0.0 for metric in mine]
        above = [max(run.samples[m.name]) - value for m, value in zip(mine, medians, strict=True)]
        below = [value - min(run.samples[m.name]) for m, value in zip(mine, medians, strict=True)]
        data.append(
            {
                "type": "bar",
                "name": run.name,
                "x": [metric.title for metric in mine],
                "y": medians,
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": above,
                    "arrayminus": below,
                    "thickness": 1.2,
                },
                "marker": {
                    "color": _COLOURS[index % len(_COLOURS)],
                    "pattern": {"shape": _PATTERNS[index % len(_PATTERNS)], "size": 6},
                },
                "text": [f"{value:.3g}" for value in medians],
                "textposition": "inside",
                "hovertemplate": "%{x}: %{y:.4g}<extra>%{fullData.name}</extra>",
            }
        )
    arranged = layout(
        380, x="", y=shown[0].unit, barmode="group", xaxis={"type": "category"}, yaxis={"type": "log"}
    )
    description = (
        f"{title}. Grouped bars of {', '.join(metric.name for metric in shown)} for {len(runs)} runs."
    )
    return plot(title, data, arranged, description)


def _numbers(runs: list[ComparedRun]) -> Table:
    header = ["run", "engine", *(f"{metric.name} ({metric.unit})" for metric in METRICS), "training blocked"]
    rows = []
    for run in runs:
        cells = [Cell(run.name), Cell(run.engine)]
        for metric in METRICS:
            value, ratio = median_of(run, metric), speed_up(run, runs[0], metric)
            times = f" ({ratio:.2f}×)" if ratio is not None and run is not runs[0] else ""
            cells.append(number(value, NOT_RECORDED if value is None else f"{value:.4g}{times}"))
        share = run.blocked_share
        cells.append(number(share, NOT_RECORDED if share is None else f"{share:.2%}"))
        rows.append(cells)
    return Table("Numbers of the runs; in brackets the speed-up over the first", header, rows)


def _noise(runs: list[ComparedRun], differences: Comparison) -> Table:
    """A row per metric and run after the first, as `ckpt-analysis compare` prints them."""
    names = {variant.label: run.name for variant, run in zip(differences.variants, runs, strict=True)}
    header, lines = metric_lines(differences, show_all=False)
    of = header.index("of")
    rows = [
        [Cell(names[text] if column == of else text) for column, text in enumerate(line)] for line in lines
    ]
    shown = [f"{runs[0].name} (n)" if text == "A (n)" else text for text in header]
    return Table("Which differences exceed the noise; ratios are to the first run", shown, rows)


def _runs(runs: list[ComparedRun]) -> Table:
    header = ["run", "engine", "layout", "model", "ranks", "hosts", "checkpoint", "saves", "restarts"]
    rows = [
        [
            Cell(run.name),
            Cell(run.engine),
            Cell(run.layout),
            Cell(run.model),
            number(run.ranks, str(run.ranks)),
            number(run.hosts, str(run.hosts)),
            number(run.checkpoint_bytes, size(run.checkpoint_bytes)),
            number(len(run.samples["blocked_s"]), count(len(run.samples["blocked_s"]))),
            number(len(run.samples["restart_s"]), count(len(run.samples["restart_s"]))),
        ]
        for run in runs
    ]
    return Table("Runs compared", header, rows)
