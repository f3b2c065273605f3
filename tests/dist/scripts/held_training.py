"""pretrain_gpt.py whose ranks wait to be killed: see tests/dist/hold.py."""

from __future__ import annotations

import runpy
from pathlib import Path

from megatron.training import trainer as training
from tests.dist.hold import patch

patch(training)
runpy.run_path(str(Path(__file__).resolve().parents[3] / "pretrain_gpt.py"), run_name="__main__")
