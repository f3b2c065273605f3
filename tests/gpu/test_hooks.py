"""Trainers of others, traced by restart_trace.hooks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.harness import HANGS_S, ROOT, records

CLIENTS = ROOT / "tests" / "dist" / "scripts" / "clients"


def test_lightning_is_traced(tmp_path: Path) -> None:
    """Lightning's DeepSpeed strategy needs a CUDA device."""
    pytest.importorskip("lightning")
    program = "import sys; from restart_trace.run import main; sys.exit(main())"  # restart-trace, as in a checkout
    command = [sys.executable, "-c", program, "run", "--trace-dir", "trace", "--"]
    command += [sys.executable, str(CLIENTS / "lightning_trainer.py")]
    environment = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr[-3000:]
    ends = [record for record in records(tmp_path / "trace") if record["type"] == "operation_end"]
    saved = [record for record in ends if record["operation"] == "save" and record.get("bytes")]
    assert saved and all(record["outcome"] == "ok" for record in saved)
