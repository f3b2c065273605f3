"""The process that forks the ranks of a replay."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.dist.harness import runs, wait_for
from tests.unit.trace_helpers import ROOT

# It ends, as by SIGTERM, while the rank that it has just forked has done nothing yet.
ENDS = """
    import os, signal, sys, time
    from pathlib import Path
    from types import SimpleNamespace
    from tools.ckpt_replay import worker
    at, server = Path(sys.argv[1]), os.getpid()

    def late(*_):
        while os.getppid() == server:
            time.sleep(0.01)

    worker.signal = SimpleNamespace(**vars(signal) | {"signal": late})
    worker.carry_out = lambda *_: (at / "carried_out").touch()
    rank = worker._Server()._start("task", at, 0, {"environment": dict(os.environ), "log": os.devnull})
    (at / "rank").write_text(str(rank))
    os._exit(0)
"""


@pytest.mark.slow
def test_a_rank_that_was_just_forked_ends_with_the_process_that_forked_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(ENDS), tmp_path], cwd=ROOT, check=True, timeout=300)
    rank = int((tmp_path / "rank").read_text())
    wait_for(lambda: not runs(rank), "the end of the rank")
    assert not (tmp_path / "carried_out").exists()
