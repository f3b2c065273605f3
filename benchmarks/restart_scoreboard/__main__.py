"""Runs `python -m benchmarks.restart_scoreboard`."""

import sys

from benchmarks.restart_scoreboard.cli import main

if __name__ == "__main__":
    sys.exit(main())
