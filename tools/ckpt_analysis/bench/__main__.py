"""The former name of `python -m benchmarks.analysis_speed`."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
runpy.run_module("benchmarks.analysis_speed", run_name="__main__", alter_sys=True)
