"""Runs `python -m benchmarks.overhead`."""

import sys

from benchmarks.overhead.cli import main

if __name__ == "__main__":
    sys.exit(main())
