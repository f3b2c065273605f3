"""What keeps interleaved copies within the idle spans of a step, and how far.

The settings are those of GEMINI's artifact (github.com/zhuangwang93/Gemini_SOSP23), under its names; None is this
project's own way. That artifact counts what fits into a span from a bandwidth that it is told; here the network is
measured.
"""

from __future__ import annotations

from typing import NamedTuple


class Pacing(NamedTuple):
    """`profile_steps`: steps that are profiled. `shortest_ms`: idle spans that are not longer are not used; `alpha`:
    share of a span that is. `blocks`: of `block_bytes`, that a rank's copy sends in a span at most."""

    profile_steps: int | None = None
    shortest_ms: float | None = None
    alpha: float | None = None
    blocks: int | None = None
    block_bytes: int | None = None


MEASURED = Pacing()  # nothing is given
