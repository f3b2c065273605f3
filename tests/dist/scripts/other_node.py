"""pretrain_gpt.py whose rank 1 finds no dataset, as on a node that lacks it."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from megatron.config import arguments

arguments.OTHER_RANKS_WAIT_S = 0.2  # for rank 0 to tell the error, which it never will
if os.environ["RANK"] == "1":
    sys.argv += ["--data-path", os.environ["ABSENT_ON_RANK_1"]]

runpy.run_path(str(Path(__file__).resolve().parents[3] / "pretrain_gpt.py"), run_name="__main__")
