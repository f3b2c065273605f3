"""Runs `python -m benchmarks.hooks`."""

import sys

from benchmarks.hooks.cli import main

if __name__ == "__main__":
    sys.exit(main())
