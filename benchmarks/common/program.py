"""How a measurement's command ends: with what it has found, or why it could not run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from benchmarks.common.ranks import MeasurementError
from tools.common.cli import COULD_NOT_RUN, OK


def printed(name: str, measure: Callable[[], str], *failures: type[Exception]) -> int:
    """Print what `measure` returns; the exit status. `failures`: what it may raise besides OSError, MeasurementError.

    SIGTERM ends it as an error does: files are removed, and nothing is left running.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        print(measure())
    except (OSError, MeasurementError, *failures) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    return OK
