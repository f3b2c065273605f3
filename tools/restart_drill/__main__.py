"""Runs the drill as `python -m tools.restart_drill` and as `python tools/restart_drill`."""

from __future__ import annotations

import sys
from pathlib import Path

if __package__:
    from .cli import main
else:  # Run as a directory: Python put this directory on the path instead of the project's root.
    sys.path[0] = str(Path(__file__).absolute().parents[2])
    from tools.restart_drill.cli import main

if __name__ == "__main__":
    sys.exit(main())
