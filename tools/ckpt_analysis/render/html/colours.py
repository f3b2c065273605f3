"""The colours of all figures: one for each phase and each part of the budget, and others for series that are neither.

The colours of a save and a load are Paul Tol's scheme "muted", those of a start-up his "light", those of a failure
from "vibrant", those of barriers his "discrete rainbow" (Colour Schemes, SRON technical note EPS/TN/09-002, 2021);
series have those of Okabe and Ito (Color Universal Design, 2008): within each, colours can be told apart with any of
the common forms of colour blindness. They read on white and on dark grey.
"""

from __future__ import annotations

UNATTRIBUTED = "unattributed"
STEP = "training step"

_COLOURS = {
    "wait_previous": "#882255",
    "make_directory": "#DDAA33",
    "collect": "#88CCEE",
    "device_to_host": "#4477AA",
    "serialize": "#DDCC77",
    "flush": "#CC6677",
    "write": "#CC6677",
    "fsync": "#AA4499",
    "upload": "#663333",
    "replicate": "#664400",
    "tag_validation": "#BBBBBB",
    "library_call": "#332288",
    "barrier": "#999999",
    "commit": "#117733",
    "manifest": "#117733",
    "publish": "#117733",
    "prune": "#66AA66",
    "remove": "#AADD88",
    "discover": "#44AA99",
    "load": "#0077BB",
    "read": "#0077BB",
    "download": "#003377",
    "verify": "#66CCEE",
    "deserialize": "#EE7733",
    "host_to_device": "#4477AA",
    "redistribute": "#999933",
    "reshard": "#999933",
    "broadcast": "#BBBB55",
    "all_gather": "#777711",
    "abort": "#661100",
    "return": "#CC99BB",
    "undo": "#CC99BB",
    "process_start": "#BBCC33",
    "imports": "#EE8866",
    "name_lookup": "#AA7788",
    "rendezvous": "#FFAABB",
    "cuda_context": "#997700",
    "communicators": "#AAAA00",
    "host_memory": "#EECC66",
    "compile": "#5522EE",
    "warmup": "#994455",
    "model_build": "#77AADD",
    "data_build": "#99DDFF",
    "data_skip": "#88BBCC",
    "engine_init": "#44BB99",
    "first_step": "#228833",
    "caught_up": "#CCBB44",
    "detect": "#B178A6",
    "stop": "#EE3377",
    "relaunch": "#AA3377",
    "launcher": "#EEDD88",
    "launching": "#BE8E2B",
    "restarting": "#A0522D",
    "training": "#B8C4D6",
    "blocked": "#6F4C9B",
    "wasted": "#CC3311",
    "other": "#C8C8C8",
    UNATTRIBUTED: "#C8C8C8",
    STEP: "#B8C4D6",
}


# Names of which each means the same as the others, or a part of it, so that they share a colour.
FAMILIES = (
    {"flush", "write"}, {"load", "read"}, {"device_to_host", "host_to_device"}, {"commit", "manifest", "publish"},
    {"redistribute", "reshard"}, {"return", "undo"}, {"other", UNATTRIBUTED}, {"training", STEP},
)  # fmt: skip
# Of lines, bars and points that stand for no phase.
SERIES = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8C7A00", "#56B4E9", "#7F7F7F", "#3B2E8C", "#E69F00",
)  # fmt: skip
MARK = "#D4004C"  # the worst, and what the reader is to look at
PATH = "#E000C8"  # the critical path: it can be seen on every phase, on white and on dark grey
BARRIERS = (
    "#882E72", "#1965B0", "#4EB265", "#F1932D", "#AE76A3", "#5289C7", "#90C987", "#F6C141", "#D1BBD7", "#7BAFDE",
    "#CAE0AB",
)  # fmt: skip
NEUTRAL = "#777777"  # outlines, and what is left over


_OF_ALL_DETAILS = ("communicators", "host_memory", "warmup")


def names() -> list[str]:
    """Of all phases, details and parts of the budget that have a colour."""
    return list(_COLOURS)


def ink_on(background: str) -> str:
    """Black or white, whichever is read more easily on a colour "#RRGGBB": the contrast ratio of WCAG 2.2."""
    linear = []
    for index in (1, 3, 5):
        value = int(background[index : index + 2], 16) / 255
        linear.append(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#FFFFFF"


def colour(phase: str) -> str:
    """Colour of a phase, or of "phase/detail" by its detail, if that has one. Raises KeyError for an unknown one."""
    name, _, detail = phase.partition("/")
    return _COLOURS[name if name in _OF_ALL_DETAILS else detail or name]
