"""Runs the soak, if possible with a private /dev/shm, which then shows only what the launches leave there."""

from __future__ import annotations

import sys

from ..own_shm import enter_own_shm
from .cli import main

if __name__ == "__main__":
    sys.exit(main(own_shm=enter_own_shm(__spec__.parent)))
