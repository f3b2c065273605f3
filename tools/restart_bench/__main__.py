"""Runs the launch scripts as `python -m tools.restart_bench` and, for the scripts themselves, as a directory."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

if not __package__:
    # Run as a directory: Python put this directory on the path instead of the one with the packages.
    package = Path(os.path.abspath(__file__)).parent  # by the path that the user gave: see places.py
    sys.path[0] = str(package.parents[1])
    __package__ = f"{package.parent.name}.{package.name}"

if __name__ == "__main__":
    # These end it, as they end a shell, and not with a traceback. SIGINT is ignored by what a script starts with &, and
    # stays so; Python itself ignores SIGPIPE.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(importlib.import_module(".cli", __package__).main())
