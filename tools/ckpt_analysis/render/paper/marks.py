"""What a specification draws: bars, lines and points, maps."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from typing import Any

from .axes import Axis, colour_of, dash

_SYMBOLS = {
    "circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "triangle-down": "v", "cross": "P", "x": "X",
    "star": "*", "line-ns": "|",
}  # fmt: skip
_GAP = 0.2  # between the lanes of bars, as a share of a lane
_POINTS = 0.75  # of a pixel


class Stacks:
    """Where the next bar of each lane begins, if bars are stacked."""

    def __init__(self) -> None:
        self._ends: dict[float, float] = {}

    def begin(self, lane: float, length: float) -> float:
        begin = self._ends.get(lane, 0.0)
        self._ends[lane] = begin + length
        return begin


def draw_bars(
    axes: Any, trace: dict[str, Any], x: Axis, y: Axis, group: tuple[int, int], stacks: Stacks | None
) -> None:
    """Bars: side by side, as (number, of how many) in a lane; on top of those before, by `stacks`; or from `base`."""
    across = trace.get("orientation") == "h"
    lanes, lengths = (y.at(trace["y"]), x.at(trace["x"])) if across else (x.at(trace["x"]), y.at(trace["y"]))
    number, of = group
    room = (1 - _GAP) / of
    widths = _each(trace.get("width", room), len(lanes))
    places = [lane + (number - (of - 1) / 2) * room for lane in lanes]
    begins = list(trace.get("base", [0.0] * len(lanes)))
    if stacks is not None:
        begins = [stacks.begin(lane, length) for lane, length in zip(lanes, lengths, strict=True)]
    marker = trace["marker"]
    edge = marker.get("line", {})
    look: dict[str, Any] = {
        "color": [colour_of(one) for one in _each(marker["color"], len(lanes))],
        "edgecolor": colour_of(edge.get("color", "#777777")),
        "linewidth": _POINTS * edge.get("width", 0),
        "label": label_of(trace),
        "hatch": "///" if marker.get("pattern") else None,
        "zorder": 2,
    }
    if across:
        axes.barh(places, lengths, height=widths, left=begins, **look)
        if "error_x" in trace:
            ends = [trace["error_x"]["arrayminus"], trace["error_x"]["array"]]
            axes.errorbar(lengths, places, xerr=ends, fmt="none", ecolor="#777777", elinewidth=1.1, capsize=3, zorder=3)
    else:
        axes.bar(places, lengths, width=widths, bottom=begins, **look)
    for text, place, begin, length in zip(trace.get("text", []), places, begins, lengths, strict=False):
        middle = begin + length / 2
        axes.text(*((middle, place) if across else (place, middle)), text, ha="center", va="center", clip_on=True)


def draw_lines(axes: Any, trace: dict[str, Any], x: Axis, y: Axis, shift: float) -> None:
    """Lines, points and texts, with ranges; categories are shifted where runs stand beside one another."""
    mode = trace["mode"].split("+")
    xs, ys = [one + shift for one in x.at(trace["x"])], y.at(trace["y"])
    line, marker = trace.get("line", {}), trace.get("marker", {})
    colour = colour_of(
        line.get("color") or _first(marker.get("color")) or marker.get("line", {}).get("color", "#111111")
    )
    if "lines" in mode:
        width = _POINTS * line.get("width", 2)
        axes.plot(
            xs, ys, color=colour, linewidth=width, linestyle=dash(line.get("dash")), label=label_of(trace), zorder=3
        )
    if "markers" in mode:
        label = None if "lines" in mode else label_of(trace)
        _points(axes, xs, ys, marker, colour, label)
    if "error_y" in trace:
        ends = [trace["error_y"]["arrayminus"], trace["error_y"]["array"]]
        axes.errorbar(xs, ys, yerr=ends, fmt="none", ecolor=colour, elinewidth=1.1, capsize=3, zorder=3)
    if "text" in mode:
        side = trace.get("textposition", "middle center")
        place = {"ha": "right" if "left" in side else "left" if "right" in side else "center"}
        place["va"] = "bottom" if "top" in side else "center"
        for text, at, height in zip(trace["text"], xs, ys, strict=True):
            away = (3 if "right" in side else -3 if "left" in side else 0, 5 if "top" in side else 0)
            axes.annotate(text.strip(), (at, height), away, textcoords="offset points", **place)


def _points(
    axes: Any, xs: list[float], ys: list[float], marker: dict[str, Any], colour: Any, label: str | None
) -> None:
    """Points, with a symbol for each or one for all; `-open` leaves their inside empty."""
    size = (_POINTS * marker.get("size", 6)) ** 2
    for index, symbol in enumerate(dict.fromkeys(symbols := _each(marker.get("symbol", "circle"), len(xs)))):
        mine = [i for i, one in enumerate(symbols) if one == symbol]
        shape = _SYMBOLS[symbol.removesuffix("-open")]
        inside = "none" if symbol.endswith("-open") else colour
        look = {"color": colour} if shape == "|" else {"facecolors": inside, "edgecolors": colour}
        at = [xs[i] for i in mine], [ys[i] for i in mine]
        axes.scatter(*at, s=size, marker=shape, label=None if index else label, zorder=4, **look)


def draw_map(axes: Any, trace: dict[str, Any], x: Axis, y: Axis) -> Any:
    """Rows of coloured cells, with their values if the specification has a text for them."""
    rows = decoded(trace["z"])
    columns = x.at(trace["x"])
    colours = "cividis_r" if trace["reversescale"] else "cividis"
    for name, row in zip(trace["y"], rows, strict=True):
        place = y.at([name])[0]
        extent = (columns[0] - 0.5, columns[-1] + 0.5, place - 0.5, place + 0.5)
        limits = {"vmin": trace["zmin"], "vmax": trace["zmax"]}
        image = axes.imshow([row], aspect="auto", cmap=colours, interpolation="nearest", extent=extent, **limits)
        if "texttemplate" in trace:
            for column, value in zip(columns, row, strict=True):
                red, green, blue, _ = image.cmap(image.norm(value))
                ink = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
                axes.text(column, place, f"{value:.3f}", ha="center", va="center", color=ink, fontsize=7)
    return image


def decoded(spec: dict[str, Any]) -> list[list[float]]:
    """The rows of plots.matrix."""
    rows, columns = map(int, spec["shape"].split(","))
    flat = array("f", base64.b64decode(spec["bdata"]))
    return [list(flat[row * columns : (row + 1) * columns]) for row in range(rows)]


def label_of(trace: dict[str, Any]) -> str | None:
    """Its name in the legend; None if it has none there."""
    return trace.get("name") if trace.get("showlegend", True) else None


def _first(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else value[0]


def _each(value: Any, number: int) -> Sequence[Any]:
    """One value for each of so many."""
    return value if isinstance(value, list) else [value] * number
