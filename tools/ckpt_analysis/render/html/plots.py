"""Parts of plotly figures as plain data. Importing plotly's own classes takes longer than the rest of the page."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .colours import SERIES, colour

MARGIN = {"l": 8, "r": 16, "t": 16, "b": 8}
LINE, SECOND_LINE, THIRD_LINE = SERIES[:3]
BAND = "rgba(0,114,178,0.22)"  # of LINE
FILLED: dict[str, Any] = {"fill": "tonexty", "fillcolor": BAND}  # up to the line that was drawn before


def layout(height: int, *, x: str, y: str, **more: Any) -> dict[str, Any]:
    """A layout with titled axes. `xaxis` and `yaxis` in `more` are merged into the titled ones."""
    xaxis = axis(x) | more.pop("xaxis", {})
    yaxis = axis(y) | more.pop("yaxis", {})
    return {
        "height": height,
        "margin": MARGIN,
        "xaxis": xaxis,
        "yaxis": yaxis,
        "legend": {
            "orientation": "h",
            "yanchor": "bottom",
            "y": 1.02,
            "x": 0,
            "traceorder": "normal",
            "maxheight": 0.9,
        },
        "hovermode": "closest",
    } | more


def lanes(names: Sequence[str], row: int, rest: int, *, x: str, **more: Any) -> dict[str, Any]:
    """A layout of horizontal bars: a lane of `row` pixels per name, from the top, and `rest` around them."""
    return layout(row * len(names) + rest, x=x, y="", yaxis=categories(names), **more)


def axis(title: str) -> dict[str, Any]:
    return {"title": {"text": title, "font": {"size": 12.5}}, "automargin": True, "zeroline": False}


def categories(names: Sequence[str]) -> dict[str, Any]:
    """What makes an axis one of these categories, in this order from the top or the right."""
    return {"categoryorder": "array", "categoryarray": list(names)[::-1], "type": "category"}


def bar(
    name: str, colour: str, *, x: Iterable[Any], y: Iterable[Any], hover: Iterable[str], **more: Any
) -> dict[str, Any]:
    """Horizontal bars of one colour; `hover` is the text of each."""
    marker = {"color": colour, "line": {"width": 0.5, "color": "rgba(90,90,90,0.7)"}} | more.pop("marker", {})
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": list(x),
        "y": list(y),
        "marker": marker,
        "hovertext": list(hover),
        "hoverinfo": "text",
    } | more


def phase_bars(series: Mapping[str, Mapping[str, float]], phases: Iterable[str], digits: int) -> list[dict[str, Any]]:
    """Horizontal bars of each phase in its colour; `series`: phase -> lane -> seconds."""
    return [
        bar(
            phase,
            colour(phase),
            x=list(series[phase].values()),
            y=list(series[phase]),
            hover=[f"{phase}, {lane}: {took:.{digits}f} s" for lane, took in series[phase].items()],
        )
        for phase in phases
    ]


def columns(name: str, colour: str, *, x: Iterable[Any], y: Iterable[Any], **more: Any) -> dict[str, Any]:
    """Vertical bars of one colour."""
    return {"type": "bar", "name": name, "x": list(x), "y": list(y), "marker": {"color": colour}} | more


def line(name: str, colour: str, *, x: Iterable[Any], y: Iterable[Any], **more: Any) -> dict[str, Any]:
    """A line with markers."""
    look = {"mode": "lines+markers", "line": {"color": colour, "width": 2}, "marker": {"size": 6}}
    return {"type": "scatter", "name": name, "x": list(x), "y": list(y)} | look | more


def vertical(x: float, **more: Any) -> dict[str, Any]:
    """A vertical line at `x` over the height of the plot."""
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper"} | more


def first_step_mark(done_s: float) -> dict[str, Any]:
    """A dotted line at the end of the last first step, for a layout, named in its legend."""
    name = {"name": f"first step done: {done_s:.3f} s", "showlegend": True}
    return {"shapes": [vertical(done_s, line={"color": THIRD_LINE, "width": 1.5, "dash": "dot"}) | name]}


def matrix(rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    """A matrix as plotly's typed array of 32-bit floats: a quarter of the size of its decimals.

    NaN is drawn as a hole. Raises ValueError if rows differ in length.
    """
    columns = len(rows[0])
    if any(len(row) != columns for row in rows):
        raise ValueError("the rows of a matrix differ in length")
    flat = array("f", (value for row in rows for value in row))
    if sys.byteorder == "big":
        flat.byteswap()
    data = base64.b64encode(flat.tobytes()).decode("ascii")
    return {"dtype": "f4", "bdata": data, "shape": f"{len(rows)}, {columns}"}
