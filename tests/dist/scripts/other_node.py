"""pretrain_gpt.py whose rank 1 finds no dataset, as on a node that lacks it."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

if os.environ["RANK"] == "1":
    sys.argv += ["--data-path", os.environ["ABSENT_ON_RANK_1"]]

runpy.run_path(str(Path(__file__).resolve().parents[3] / "pretrain_gpt.py"), run_name="__main__")
