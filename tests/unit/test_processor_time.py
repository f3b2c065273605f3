"""The processor seconds that `--processor-time` counts for a test."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.processor_time import Meter

BUSY = "import time\nwhile time.process_time() < 0.1: pass\nprint(flush=True)\nimport signal; signal.pause()"


def test_what_a_test_starts_counts_for_it() -> None:
    meter = Meter()
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None and started.stdout.readline()
        running = meter.seconds()
        started.kill()
    assert 0.05 < running <= meter.seconds() + 0.05  # the kernel tells the time of processes to 10 ms


def test_a_process_that_nobody_waits_for_takes_no_time_off() -> None:
    """As those of a cluster, which end with their namespace."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        started = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
        assert started.stdout is not None and started.stdout.readline()
        meter = Meter()
        started.kill()
        started.wait()
        started.stdout.close()
        assert meter.seconds() >= 0
    finally:
        signal.signal(signal.SIGCHLD, before)
