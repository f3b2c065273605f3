"""Runs `python -m megatron.launch`."""

import sys

from megatron.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
