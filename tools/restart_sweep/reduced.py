"""A sweep made small enough for any machine: the same kinds of cells, few of each, with little in them."""

from __future__ import annotations

from dataclasses import replace

from ..common.sweep_files import NO_FAULT
from .sweep_file import Run, Sweep, layouts_of

ENGINES, VALUES = 2, 2  # of each run, at most: engines, and values of what else it compares
LIMIT_BYTES = "16MiB"  # of each rank of a replay
STORAGE_BYTES = 16 << 20
MOST_RANKS = 8  # of a training
_SAID = (
    f"Reduced: one repeat, one model and layout of each run, {ENGINES} engines; replays of {LIMIT_BYTES} of each rank; "
    f"trainings scaled down, on at most {MOST_RANKS} ranks, no longer than saves take. "
    "It shows that the sweep runs, and measures nothing."
)


def reduced(sweep: Sweep) -> Sweep:
    """The sweep that --reduced runs in place of `sweep`, under a name of its own."""
    return replace(
        sweep,
        name=f"{sweep.name}_reduced",
        about=f"{_SAID} {sweep.about}".rstrip(),
        repeats=1,
        storage_bytes=min(sweep.storage_bytes, STORAGE_BYTES),
        runs=tuple(_reduced(run) for run in sweep.runs),
        text=b"# Reduced (--reduced). The sweep that it was made of:\n" + sweep.text,
    )


def _reduced(run: Run) -> Run:
    model = run.models[0]
    layout = layouts_of(run, model)[0]
    replay = run.mode == "replay"
    small = {"limit_bytes": LIMIT_BYTES, "steps_between": 0.5, "step_seconds": 0.25}
    return replace(
        run,
        mode="replay" if replay else "scaled",
        models=(model,),
        layouts=(layout if replay else _fewer_ranks(layout),),
        engines=run.engines[:ENGINES],
        faults=run.faults[:1],
        save_intervals=run.save_intervals[:VALUES],
        operations=run.operations,
        striping=run.striping[:VALUES],
        settings={key: value for key, value in run.settings.items() if replay or key in ("iterations", "flags")}
        | (small if replay else _fewer_iterations(run)),
    )


def _fewer_iterations(run: Run) -> dict[str, int]:
    """Of a training without a fault, which says when it comes: as many as save at each interval, and one more."""
    intervals = [interval for interval in run.save_intervals[:VALUES] if interval is not None]
    if "iterations" not in run.settings or not intervals or run.faults[:1] != (NO_FAULT,):
        return {}
    return {"iterations": min(run.settings["iterations"], max(intervals) + 1)}


def _fewer_ranks(layout: tuple[int, int, int]) -> tuple[int, int, int]:
    """Of at most MOST_RANKS: fewer replicas, then fewer stages, then smaller tensor parallelism."""
    tp, pp, dp = layout
    while tp * pp * dp > MOST_RANKS:
        if dp > 1:
            dp = dp // 2
        elif pp > 1:
            pp = pp // next(factor for factor in range(2, pp + 1) if pp % factor == 0)
        else:
            tp = tp // 2
    return tp, pp, dp
