"""The former name of `python -m benchmarks.synthetic_traces`."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
runpy.run_module("benchmarks.synthetic_traces", run_name="__main__", alter_sys=True)
