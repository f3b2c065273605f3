"""Axes of a plot's specification: categories, ranges, ticks, lines over the whole plot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_DENSE = 5  # of a logarithmic axis: the last over the first value, up to which it has the ticks of a linear one
_DASHES = {"dot": ":", "dash": "--", "dashdot": "-.", "solid": "-"}


@dataclass
class Axis:
    """One axis: `places` are the numbers that stand for its categories; empty for one of numbers."""

    spec: dict[str, Any]
    places: dict[str, int] = field(default_factory=dict)

    @property
    def is_log(self) -> bool:
        return self.spec.get("type") == "log"

    def at(self, values: Iterable[Any]) -> list[float]:
        """Values as numbers; nan where there is none."""
        if self.places:
            return [self.places[str(value)] for value in values]
        return [float("nan") if value is None else float(value) for value in values]


def axis_of(layout: dict[str, Any], letter: str, data: list[dict[str, Any]]) -> Axis:
    """The x or y axis of a layout, with categories in the order given there, or else as they come in `data`."""
    spec = layout.get(f"{letter}axis", {})
    values = [value for trace in data if "yaxis" not in trace for value in trace.get(letter, [])]
    if spec.get("type") != "category" and not any(isinstance(value, str) for value in values):
        return Axis(spec)
    known = dict.fromkeys(map(str, [*spec.get("categoryarray", []), *values]))
    return Axis(spec, {name: place for place, name in enumerate(known)})


def dash(name: str | None) -> str:
    """matplotlib's line style."""
    return _DASHES[name or "solid"]


def arrange(axes: Any, x: Axis, y: Axis, layout: dict[str, Any]) -> None:
    """Scales, ticks, titles and lines over the whole plot, after everything is drawn."""
    for letter, axis in (("x", x), ("y", y)):
        _ticks(axes, letter, axis)
        title = axis.spec.get("title", {}).get("text", "")
        getattr(axes, f"set_{letter}label")(title)
        limits = axis.spec.get("range")
        if limits is not None:
            getattr(axes, f"set_{letter}lim")([10**limit for limit in limits] if axis.is_log else limits)
        elif axis.places:
            getattr(axes, f"set_{letter}lim")(-0.5, len(axis.places) - 0.5)
        elif axis.spec.get("rangemode") == "tozero":
            getattr(axes, f"set_{letter}lim")(**{"left" if letter == "x" else "bottom": 0})
        if axis.spec.get("autorange") == "reversed":
            getattr(axes, f"invert_{letter}axis")()
    for shape in layout.get("shapes", []):
        _line(axes, x, shape)


def _ticks(axes: Any, letter: str, axis: Axis) -> None:
    if axis.is_log:
        getattr(axes, f"set_{letter}scale")("log")
    own = getattr(axes, f"{letter}axis")
    if "tickvals" in axis.spec:
        shown = axis.spec.get("ticktext", axis.spec["tickvals"])
        own.set_ticks(axis.at(axis.spec["tickvals"]), [_text(one) for one in shown])
        own.set_ticks([], minor=True)
    elif axis.places:
        own.set_ticks(list(axis.places.values()), [_text(one) for one in axis.places])
    elif axis.is_log:
        from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

        in_bytes = axis.spec.get("tickformat") == "~s"
        low, high = own.get_view_interval()
        own.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > _DENSE * low else MaxNLocator(6))
        own.set_major_formatter(EngFormatter(sep="") if in_bytes else FuncFormatter(lambda value, _: f"{value:g}"))
        own.set_minor_formatter(NullFormatter())


def _text(value: object) -> str:
    return str(value).replace("<br>", "\n")


def _line(axes: Any, x: Axis, shape: dict[str, Any]) -> None:
    """A line from one side of the plot to the other."""
    look = shape["line"]
    label = shape.get("name") if shape.get("showlegend") else None
    below = 0.5 if shape.get("layer") == "below" else 4
    kept = {"color": colour_of(look["color"]), "linewidth": 0.8 * look["width"], "linestyle": dash(look.get("dash"))}
    if shape.get("xref") == "paper":
        axes.axhline(shape["y0"], label=label, zorder=below, **kept)
    else:
        axes.axvline(x.at([shape["x0"]])[0], label=label, zorder=below, **kept)


def colour_of(text: str) -> Any:
    """A colour as matplotlib takes it: hexadecimal, or from `rgba(r,g,b,a)`."""
    if not text.startswith("rgba("):
        return text
    red, green, blue, alpha = (float(part) for part in text[5:-1].split(","))
    return red / 255, green / 255, blue / 255, alpha
