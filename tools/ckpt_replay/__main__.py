"""Runs `python -m tools.ckpt_replay`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
