"""Runs the measurements as `python -m benchmarks.hooks` and as `python benchmarks/hooks`."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    # Run as a directory: Python put this directory on the path instead of the project's root.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.hooks.cli import main

if __name__ == "__main__":
    sys.exit(main())
