"""What all tests with ranks rely on."""

from __future__ import annotations

import array
import fcntl
import termios
import time
from pathlib import Path

import pytest

from tests.dist.harness import HANGS_S, Zygote

pytestmark = pytest.mark.slow  # starts a rank


def test_a_run_that_is_over_before_anybody_reads_of_it_is_seen(zygote: Zygote, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    request = {"argv": [], "env": {}, "nproc": 1, "log_dir": str(tmp_path), "script": str(script)}
    zygote._ask(request)
    deadline = time.monotonic() + HANGS_S
    while _waiting_bytes(zygote) < len('{"pids": [4194304]}\n{"exit_codes": [0]}\n') - len("419430"):
        assert time.monotonic() < deadline, "the run never ended"
        time.sleep(0.01)
    assert list(zygote._answer(HANGS_S)) == ["pids"]
    assert zygote._answer(HANGS_S) == {"exit_codes": [0]}


def _waiting_bytes(zygote: Zygote) -> int:
    """Bytes of answers that were not read yet."""
    assert zygote.process.stdout is not None
    count = array.array("i", [0])
    fcntl.ioctl(zygote.process.stdout, termios.FIONREAD, count)
    return count[0]
