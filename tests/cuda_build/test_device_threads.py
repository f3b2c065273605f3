"""Threads with a CUDA build: where CUDA is not initialised, to make one asks nothing of the driver.

The process that forks ranks starts threads, too; one question would make CUDA unusable in every rank.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cuda_build.conftest import CudaHost

SCRIPT = """
from concurrent.futures import ThreadPoolExecutor
import os, torch
from restart_trace.device_threads import current_device, device_selector, device_thread

assert torch.accelerator.current_accelerator().type == "cuda" and current_device() is None
thread = device_thread(print, name="a", args=("ran",))
thread.start()
thread.join()
with ThreadPoolExecutor(1, initializer=device_selector()) as pool:
    pool.submit(print, "ran, too").result()
assert not torch.cuda.is_initialized()
pid = os.fork()
if pid == 0:
    os._exit(torch.cuda._is_in_bad_fork())
assert os.waitpid(pid, 0)[1] == 0, "a process that is forked cannot use CUDA"
"""


def test_a_thread_asks_nothing_of_the_driver(cuda_host: CudaHost, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=cuda_host.environment, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "ran\nran, too\n"), done.stderr
    assert cuda_host.calls() == {}
