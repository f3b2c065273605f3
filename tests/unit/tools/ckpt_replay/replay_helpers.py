"""A request to the replay."""

from __future__ import annotations

from typing import Any

from tools.ckpt_replay.options import parse_arguments, request_from
from tools.ckpt_replay.plan import Request, Share


def request(**changes: Any) -> Request:
    share = Share("70b", (8, 8, 1), (0, 1), **changes)
    line = "--model 70b --tp 8 --pp 8 --engine torch,lazy --dir . --ranks 0-1 --steps-between 6 --step-seconds 3"
    found = request_from(parse_arguments(line.split()), None)
    return Request(**vars(found) | {"share": share, "repeat": 5, "cold": True})
