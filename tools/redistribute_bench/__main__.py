"""The former name of `python -m benchmarks.reshard`."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
runpy.run_module("benchmarks.reshard", run_name="__main__", alter_sys=True)
