"""Writes the plots of a page as SVG and PDF files."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...common.errors import CouldNotRunError
from ..content import Plot
from .axes import arrange, axis_of, colour_of
from .marks import Stacks, draw_bars, draw_lines, draw_map

SUFFIXES = ("svg", "pdf")
_WIDTH = 9.0  # inches
_PIXELS = 110  # of the page's height, for an inch
_STYLE: dict[Any, Any] = {
    "font.size": 8, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e3e7eb", "axes.edgecolor": "#888888",
    "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none", "pdf.fonttype": 42,
    "svg.hashsalt": "ckpt-analysis", "legend.frameon": False,
    "text.parse_math": False,  # a name may hold "$"
}  # fmt: skip


def require_matplotlib(directory: Path) -> None:
    """Raises CouldNotRunError if there is nothing to draw `--figures directory` with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise CouldNotRunError(
            f"--figures {directory}: needs matplotlib, which is not installed: `pip install matplotlib`, or the extra "
            "`figures` of this package"
        )


def write_figures(plots: dict[str, Plot], directory: Path) -> list[Path]:
    """Write each plot's first arrangement as NAME.svg and NAME.pdf. Returns the paths.

    Raises CouldNotRunError without matplotlib, or if a file cannot be written.
    """
    require_matplotlib(directory)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(_STYLE):
            for name, plot in plots.items():
                layout = plot.variants[0].layout
                figure = Figure(figsize=(_WIDTH, layout["height"] / _PIXELS), layout="constrained")
                _draw(figure.subplots(), plot.variants[0].data, layout)
                for suffix in SUFFIXES:
                    path = directory / f"{name}.{suffix}"
                    date = {"Date": None} if suffix == "svg" else {"CreationDate": None}
                    figure.savefig(path, metadata={"Title": plot.title, **date})
                    written.append(path)
    except OSError as exc:
        raise CouldNotRunError(f"--figures {directory}: cannot be written: {exc.strerror or exc}") from exc
    return written


def _draw(axes: Any, data: list[dict[str, Any]], layout: dict[str, Any]) -> None:
    x, y = axis_of(layout, "x", data), axis_of(layout, "y", data)
    mode = layout.get("barmode")
    bars = [trace for trace in data if trace["type"] == "bar"]
    stacks = Stacks() if mode == "stack" else None
    lines = [trace for trace in data if trace["type"] == "scatter" and "yaxis" not in trace]
    beside = len(lines) if layout.get("scattermode") == "group" else 1
    before: dict[str, Any] | None = None
    for trace in data:
        if trace["type"] == "bar":
            group = (bars.index(trace), len(bars)) if mode == "group" else (0, 1)
            draw_bars(axes, trace, x, y, group, stacks)
        elif trace["type"] == "heatmap":
            image = draw_map(axes, trace, x, y)
            if trace["showscale"]:
                shown = trace["colorbar"]
                bar = axes.figure.colorbar(image, ax=axes, pad=0.02, label=shown["title"]["text"])
                bar.set_ticks(shown["tickvals"], labels=shown["ticktext"])
        elif "yaxis" in trace:  # marks above the plot
            above = axes.get_xaxis_transform()
            marks = [1.01] * len(trace["x"])
            axes.plot(x.at(trace["x"]), marks, "v", color=trace["marker"]["color"], transform=above, clip_on=False)
        else:
            shift = (lines.index(trace) - (beside - 1) / 2) * 0.8 / beside if beside > 1 else 0.0
            draw_lines(axes, trace, x, y, shift)
            if trace.get("fill") == "tonexty" and before:
                band = {"color": colour_of(trace["fillcolor"]), "linewidth": 0}
                axes.fill_between(x.at(trace["x"]), y.at(trace["y"]), y.at(before["y"]), **band)
            before = trace
    arrange(axes, x, y, layout)
    _legend(axes, layout, any(trace["type"] == "heatmap" for trace in data))


def _legend(axes: Any, layout: dict[str, Any], is_map: bool) -> None:
    """Above the plot, one entry a name."""
    handles, labels = axes.get_legend_handles_labels()
    entries = dict(zip(labels, handles, strict=True))
    if is_map or (len(entries) < 2 and not layout.get("showlegend")):
        axes.grid(not is_map)
        return
    names = list(entries)
    if layout.get("legend", {}).get("traceorder") == "reversed":
        names.reverse()
    at = {"loc": "outside upper left", "ncols": min(len(names), 6)}
    axes.figure.legend([entries[name] for name in names], names, **at)


def plots_of(figures: Iterable[tuple[str, Iterable[Plot]]]) -> dict[str, Plot]:
    """File name -> plot: the figure's name, and a number from 1 where it has several."""
    named: dict[str, Plot] = {}
    for name, plots in figures:
        drawn = list(plots)
        for number, plot in enumerate(drawn, start=1):
            named[f"{name}_{number}" if len(drawn) > 1 else name] = plot
    return named
