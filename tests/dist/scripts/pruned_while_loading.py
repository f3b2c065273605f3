"""pretrain_gpt.py beside a job that saves to --load with --keep-last 1: it goes on between the listing and the load.

What that job saves is in OTHERS, a directory of checkpoints: with each of the first listings one of them, the oldest
first, takes the place of what was listed.
"""

from __future__ import annotations

import os
import runpy
import shutil
from pathlib import Path
from typing import Any

from megatron.checkpointing.load.storage import DirectorySource

SEARCH = DirectorySource.search


def search_and_go_on(self: DirectorySource) -> Any:
    found, load_dir = SEARCH(self), self.load_dir
    waiting = sorted(Path(os.environ["OTHERS"]).iterdir())
    if waiting:
        listed = list(load_dir.glob("global_step*"))
        waiting[0].rename(load_dir / waiting[0].name)
        for directory in listed:
            shutil.rmtree(directory)
    return found


DirectorySource.search = search_and_go_on

runpy.run_path(str(Path(__file__).resolve().parents[3] / "pretrain_gpt.py"), run_name="__main__")
