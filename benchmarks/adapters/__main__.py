"""Runs `python -m benchmarks.adapters`."""

import sys

from benchmarks.adapters.cli import main

if __name__ == "__main__":
    sys.exit(main())
