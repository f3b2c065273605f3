"""Runs the analysis as `python -m tools.ckpt_analysis` and as `python tools/ckpt_analysis`."""

from __future__ import annotations

import sys
from pathlib import Path

if __package__:
    from .cli import main
else:  # Run as a directory: Python put this directory on the path instead of the project's root.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from tools.ckpt_analysis.cli import main

if __name__ == "__main__":
    sys.exit(main())
