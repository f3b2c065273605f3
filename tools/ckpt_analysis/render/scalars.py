"""The metrics of a run as scalars of TensorBoard, in its event files. docs/prometheus.md lists the metrics.

A name is that of the metric and the values of its labels, between slashes, so that TensorBoard groups them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from ..report import Analysis
from .prometheus import families

GROUP = "restart_trace"
# No scalars: what stands in their labels, and moments, which a float of 32 bits rounds to minutes.
_LEFT_OUT = ("run_info", "start_timestamp_seconds", "last_step_timestamp_seconds", "last_checkpoint_timestamp_seconds")
_QUANTILES = {"0.5": "median", "1": "max"}


def scalars(analysis: Analysis) -> Iterator[tuple[str, float]]:
    """(name, value) of all that is known of the run."""
    for family in families(analysis):
        if family.name in _LEFT_OUT:
            continue
        for suffix, labels, value in family.samples:
            words = [word for label, word in labels.items() if label != "quantile"]
            words.append(_QUANTILES.get(labels.get("quantile", ""), ""))
            yield "/".join([GROUP, f"{family.name}{suffix}", *filter(None, words)]), value


def write_tensorboard(analysis: Analysis, directory: Path) -> int:
    """Write an event file in `directory`, at the newest training step and its time. Returns the number of scalars.

    Raises ModuleNotFoundError without tensorboard, OSError if the directory cannot be written.
    """
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    moments = {family.name: family.samples[0][2] for family in families(analysis) if family.samples}
    step, at = int(moments.get("last_step", 0)), moments.get("last_step_timestamp_seconds", time.time())
    values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(analysis)]
    directory.mkdir(parents=True, exist_ok=True)
    writer = EventFileWriter(str(directory))
    writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))
    writer.close()
    return len(values)
