"""Runs `python -m benchmarks.reshard`."""

import sys

from benchmarks.reshard.cli import main

if __name__ == "__main__":
    sys.exit(main())
