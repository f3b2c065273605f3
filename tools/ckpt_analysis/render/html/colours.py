"""One colour per phase, in every figure.

The colours of a save and a load are Paul Tol's scheme "muted", those of a start-up his "light", those of a
failure, and of the parts of the budget, from "light", "vibrant" and "muted" (Colour Schemes, SRON technical note
EPS/TN/09-002, 2021): within each, colours can be told apart with any of the common forms of colour blindness. They
read on white and on dark grey.
"""

from __future__ import annotations

UNATTRIBUTED = "unattributed"
STEP = "training step"

_COLOURS = {
    "wait_previous": "#882255",
    "collect": "#88CCEE",
    "device_to_host": "#4477AA",
    "serialize": "#DDCC77",
    "flush": "#CC6677",
    "write": "#CC6677",
    "fsync": "#AA4499",
    "upload": "#663333",
    "replicate": "#664400",
    "tag_validation": "#BBBBBB",
    "engine_call": "#332288",
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
    "process_start": "#BBCC33",
    "imports": "#EE8866",
    "name_lookup": "#AA7788",
    "rendezvous": "#FFAABB",
    "cuda_context": "#997700",
    "communicators": "#AAAA00",
    "host_memory": "#EECC66",
    "compile": "#6699CC",
    "warmup": "#994455",
    "model_build": "#77AADD",
    "data_build": "#99DDFF",
    "data_skip": "#88BBCC",
    "engine_init": "#44BB99",
    "first_step": "#228833",
    "caught_up": "#CCBB44",
    "detect": "#CC3311",
    "stop": "#EE3377",
    "relaunch": "#AA3377",
    "launcher": "#EEDD88",
    "launching": "#BBCC33",
    "restarting": "#EE8866",
    "training": "#44BB99",
    "blocked": "#AA4499",
    "lost": "#CC3311",
    "other": "#C8C8C8",
    UNATTRIBUTED: "#C8C8C8",
    STEP: "#B8C4D6",
}


_OF_ALL_DETAILS = ("communicators", "host_memory", "warmup")


def colour(phase: str) -> str:
    """Colour of a phase, or of "phase/detail" by its detail, if that has one. Raises KeyError for an unknown one."""
    name, _, detail = phase.partition("/")
    return _COLOURS[name if name in _OF_ALL_DETAILS else detail or name]
