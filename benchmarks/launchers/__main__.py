"""Runs `python -m benchmarks.launchers`."""

import sys

from benchmarks.launchers.cli import main

if __name__ == "__main__":
    sys.exit(main())
