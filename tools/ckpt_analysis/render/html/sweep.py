"""Figures of a sweep over all its cells, as in a study of checkpoints and restarts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....common.formatting import NOT_RECORDED, percent, plural, rate, seconds, size
from ....common.tables import Column
from ...sweeps.groups import NO_ENGINE
from .. import sweep as tables
from ..content import Content, Figure, Plot, missing, plot, table
from ..sweep import Ceiling, Line, View
from .colours import NEUTRAL, SERIES
from .plots import bar, lanes, layout, line


def facts(view: View) -> list[tuple[str, str]]:
    """What the sweep was made on: of its first start, and how often it was started."""
    cells = view.sweep.cells
    done = sum(one.ok for one in cells)
    found = [("Cells", f"{done} of {len(cells)} measured, in {plural(view.sweep.repeats, 'repeat')}")]
    if not view.sweep.sessions:
        return found
    first = view.sweep.sessions[0]
    machine = first["machine"]
    loads = [one.result["load_average_1_min_before"] for one in cells if one.result is not None]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    return [
        *found,
        ("Started", f"{plural(len(view.sweep.sessions), 'time')}"),
        ("Machine", f"{machine['processors']} processors, {size(machine['memory_bytes'])}, kernel {machine['kernel']}"),
        ("File system", first["filesystem"]),
        ("Load before cells", f"{min(loads):.1f} to {max(loads):.1f} (1-minute average)" if loads else NOT_RECORDED),
        ("Versions", f"{first['program']}, {versions}"),
    ]


def _files(view: View) -> Content:
    lines = view.lines
    if not lines:
        return missing("No cell has been measured.")
    saving = [one for one in lines if one.engine != NO_ENGINE]
    drawn = [
        _bars(
            view, "Files of a checkpoint at full size", "files", saving, lambda one: _planned(view, one, "num_files")
        ),
        _bars(view, "Bytes of a checkpoint at full size", "GB", saving, lambda one: _gigabytes(view, one)),
    ]
    notes = [_files_result(view)]
    if not any(drawn):
        notes.append("There is no plan of these checkpoints, so nothing is known of them at full size.")
    return Content([one for one in drawn if one], [table("Files and sizes", tables.files_columns(view), lines)], notes)


def _files_result(view: View) -> str:
    """Whether the cells wrote as many files as planned."""
    known = [(one.median("save_files"), tables.expected_files(view, one)) for one in view.lines]
    planned = [written == expected for written, expected in known if written is not None and expected is not None]
    if not planned:
        return "There are no files with a plan to compare them with."
    return f"{sum(planned)} of {plural(len(planned), 'engine')} in a configuration wrote as many files as planned."


def _saves(view: View) -> Content:
    return _times(view, tables.SAVES, "Saves", {
        tables.BLOCKED: "Training blocked by a save", tables.DURABLE: "Start of a save until it is durable",
    }, "No save was measured: no cell has an engine that saves.")  # fmt: skip


def _restarts(view: View) -> Content:
    content = _times(view, tables.RESTARTS, "Loads and restarts", {
        tables.COLD_LOAD: "Load, files not in the page cache (replay)",
        tables.WARM_LOAD: "Load, files in the page cache (replay)",
        tables.FIRST_STEP: "Restart: process start to first step", tables.RESTART: "Restart: failure to first step",
    }, "No load and no restart was measured: the sweep has neither a replay nor a fault.")  # fmt: skip
    if content.plots and not view.having(tables.RESTART):
        content.notes.append("No restart was measured: the sweep has no fault.")
    if content.plots and not view.having(tables.COLD_LOAD):
        content.notes.append("No cold load was measured by a replay.")
    return content


def _speed_ups(view: View) -> Content:
    found = view.sped_up()
    if not found:
        return missing("No speed-up: there are no two engines that save in one configuration.")
    return Content(tables=[table("Times of each engine against the first", tables.SPEED_UPS, found)])


def _throughput(view: View) -> Content:
    lines = view.having("save_bytes")
    if not lines:
        return missing("No throughput: no save was measured.")
    drawn = [
        _bars(view, "Until durable, per host", "GB/s", lines, lambda one: one.each(tables.DURABLE, one.hosts)),
        _bars(view, "Until durable, per rank", "GB/s", lines, lambda one: one.each(tables.DURABLE, one.ranks)),
    ]
    fastest = max(lines, key=lambda one: one.rate(tables.DURABLE) or 0.0)
    most = fastest.rate(tables.DURABLE)
    result = (
        "No save is known to be durable."
        if most is None
        else f"The most until durable: {rate(most)} GB/s, of {fastest.engine} in {fastest.group.title}."
    )
    content = Content([one for one in drawn if one], [table("Throughput of saves", tables.THROUGHPUT, lines)], [result])
    if view.ceiling:
        rows = [Ceiling(name, values) for name, values in view.ceiling.items()]
        content.tables.append(table("What the storage itself does", tables.CEILING, rows))
    else:
        content.notes.append("The storage itself was not measured: storage_bytes of the sweep is none.")
    return content


def _frequency(view: View) -> Content:
    lines = [one for one in view.having(tables.SHARE) if one.group.cell.mode == "train"]
    series: dict[str, list[tuple[int, float]]] = {}
    for one in lines:
        share, interval = one.median(tables.SHARE), one.group.cell.save_interval
        if share is not None and interval is not None and one.engine != NO_ENGINE:
            name = f"{one.engine}, {one.group.cell.mode} {one.group.cell.model} {one.group.cell.layout}"
            series.setdefault(name, []).append((interval, 100 * share))
    series = {name: points for name, points in series.items() if len(points) > 1}
    if not series:
        return missing("The save interval was not varied: no training has two values of save_interval.")
    shares = [share / 100 for points in series.values() for _, share in points]
    data = [
        line(name, SERIES[index % len(SERIES)], x=[x for x, _ in sorted(points)], y=[y for _, y in sorted(points)])
        for index, (name, points) in enumerate(series.items())
    ]
    title = "Share of training that saves block"
    drawn = plot(title, data, layout(360, x="iterations between saves", y="% of training time"), _said(title, lines))
    result = f"Saves block {percent(min(shares))} to {percent(max(shares))} of the training time."
    return Content([drawn], [table("Blocked share by save interval", tables.FREQUENCY, lines)], [result])


def _iterations(view: View) -> Content:
    lines = view.having(tables.STEP)
    if not lines:
        return missing("No iteration was measured: the sweep trains nothing.")
    drawn = _bars(view, "Time of an iteration", "s", lines, lambda one: one.median(tables.STEP))
    took = [value for one in lines if (value := one.median(tables.STEP)) is not None]
    notes = [f"A step takes {seconds(min(took))} to {seconds(max(took))} s."]
    if not any(one.engine == NO_ENGINE for one in lines):
        notes.append("Iterations without saves were not measured: the sweep has no engine `none`.")
    return Content([drawn] if drawn else [], [table("Iteration time", tables.ITERATIONS, lines)], notes)


def _cells(view: View) -> Content:
    if not view.failures:
        return Content(notes=["All cells of the sweep were measured."])
    failed = len(view.failures) - view.not_ended
    result = f"{plural(failed, 'cell')} failed; {view.not_ended} without a result yet."
    return Content(tables=[table("Cells without a result", tables.FAILED, view.failures)], notes=[result])


def _times(view: View, shown: Sequence[Column[Line]], caption: str, metrics: dict[str, str], otherwise: str) -> Content:
    """A plot for each metric that was measured, and the table of all; `otherwise` if none was."""
    lines = view.having(*metrics)
    if not lines:
        return missing(otherwise)
    drawn = [
        _bars(view, title, "s", view.having(metric), lambda one, metric=metric: one.median(metric), metric)
        for metric, title in metrics.items()
    ]
    return Content([one for one in drawn if one], [table(caption, shown, lines)])


def _bars(
    view: View,
    title: str,
    unit: str,
    lines: Sequence[Line],
    value: Callable[[Line], float | None],
    metric: str | None = None,
) -> Plot | None:
    """A bar for each engine in each group, with the range of the values of `metric`; None without a value."""
    engines = list(dict.fromkeys(one.engine for one in view.lines))
    data: list[dict[str, Any]] = []
    for index, engine in enumerate(engines):
        shown = [one for one in lines if one.engine == engine and value(one) is not None]
        if shown:
            y, x = [one.group.title for one in shown], [value(one) or 0.0 for one in shown]
            hover = [f"{engine}, {name}: {found:.4g} {unit}" for name, found in zip(y, x, strict=True)]
            ranges = {} if metric is None else {"error_x": _ranges(shown, metric)}
            # Bars of a group are drawn from below: the first engine comes last, in the legend first.
            data.insert(0, bar(engine, SERIES[index % len(SERIES)], x=x, y=y, hover=hover, **ranges))
    if not data:
        return None
    names = list(dict.fromkeys(one.group.title for one in lines if value(one) is not None))
    drawn = lanes(names, 14 * len(data) + 14, 105, x={"s": "seconds"}.get(unit, unit), barmode="group")
    drawn["legend"] |= {"traceorder": "reversed"}
    return plot(title, data, drawn, _said(title, lines))


def _ranges(lines: Sequence[Line], metric: str) -> dict[str, Any]:
    """From the median of each line to the least and the most of its values."""
    found = [cell for one in lines if (cell := one.group.value(one.engine, metric)) is not None]
    medians = [cell.median or 0.0 for cell in found]
    return {
        "type": "data",
        "symmetric": False,
        "array": [max(cell.values) - median for cell, median in zip(found, medians, strict=True)],
        "arrayminus": [median - min(cell.values) for cell, median in zip(found, medians, strict=True)],
        "color": NEUTRAL,
        "thickness": 1.5,
        "width": 4,
    }


def _said(title: str, lines: Sequence[Line]) -> str:
    """The text alternative."""
    groups = list(dict.fromkeys(one.group.title for one in lines))
    return f"{title}: {plural(len(lines), 'value')} over {', '.join(groups[:6])}; the table below has the numbers"


def _planned(view: View, one: Line, name: str) -> int | None:
    plan = view.sweep.plan_of(one.group.variants[one.engine][0].cell.cell)
    return None if plan is None else int(plan[name])


def _gigabytes(view: View, one: Line) -> float | None:
    planned = _planned(view, one, "total_bytes")
    return None if planned is None else planned / 1e9


FIGURES: tuple[Figure, ...] = (
    Figure(
        "sweep-saves", "Saves", "Time to save, by engine and model", _saves,
        "Medians over the repeats, each repeat's own median; n is the number of repeats. The first save of a process "
        "is left out: of a replay always, of a training where at least three are left.",
        ("blocked time", "durable"),
    ),
    Figure(
        "sweep-restarts", "Restarts", "Time to load and to restart, by engine and model", _restarts,
        "Medians over the repeats. A replay loads in a new process, cold and warm apart; a restart is that of all "
        "ranks after the fault, and its load is as warm as the configuration says.",
        ("wall time", "time to first step", "restart", "lost work"),
    ),
    Figure(
        "sweep-speedups", "Speed-ups", "Speed-ups", _speed_ups,
        "Against the first engine of the configuration that saves anything; above 1 is faster. Whether it exceeds the "
        "noise is the verdict, as in docs/comparing.md.",
        ("speed-up",),
    ),
    Figure(
        "sweep-throughput", "Throughput", "Throughput per host and per rank", _throughput,
        "Bytes of a save over the time until it is durable, both medians, in all and for each host and rank; beside "
        "it what the storage itself does with direct and buffered files.",
        ("durable", "I/O throughput"), folded=True,
    ),
    Figure(
        "sweep-files", "Files", "Files and sizes by layout", _files,
        "At full size: what ckpt-plan works out for the layout and the engine, all ranks. Written: the median save of "
        "the cells. A replay writes its ranks' files alone, its bytes limited; a scaled preset writes all files with "
        "narrow tensors; a cell with a fault also writes a file of hashes for each rank.",
        ("operation",), folded=True,
    ),
    Figure(
        "sweep-frequency", "Save interval", "Blocked share by save interval", _frequency,
        "Share of the training time that all saves of a run block, for each number of iterations between saves.",
        ("blocked share",), folded=True,
    ),
    Figure(
        "sweep-iterations", "Iterations", "Iteration time with and without saves", _iterations,
        "Time of a training step on its slowest rank; saves between steps are not in it. Engine none saves nothing: "
        "what the others take above it is the price of saving in the background.",
        ("step",), folded=True,
    ),
    Figure(
        "sweep-cells", "Cells", "What was not measured", _cells,
        "Cells that failed, with the end of their logs, and cells that have not ended.",
        ("operation",), folded=True,
    ),
)  # fmt: skip
