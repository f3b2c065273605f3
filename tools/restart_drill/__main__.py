"""Runs `python -m tools.restart_drill`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
