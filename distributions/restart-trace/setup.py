"""Packaging of restart-trace: the root's setup.py knows what is in it."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
os.chdir(ROOT)  # in which setuptools finds the packages
runpy.run_path(str(ROOT / "setup.py"))["restart_trace"]()
