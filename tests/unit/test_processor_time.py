"""The processor seconds that `--processor-time` counts for a test."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.processor_time import PROPERTY, Meter, ProcessorTime

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


def test_files_tests_and_quick_tests_that_took_most_are_listed(pytestconfig: pytest.Config) -> None:
    counted = ProcessorTime(1)
    took: list[tuple[str, float, dict[str, Any]]] = [
        ("a.py::slow", 3.0, {"slow": 1}), ("b.py::one", 2.0, {}), ("b.py::other", 1.5, {}),
    ]  # fmt: skip
    for nodeid, seconds, marks in took:
        told = [(PROPERTY, seconds)]
        counted.pytest_runtest_logreport(
            pytest.TestReport(nodeid, ("", 1, ""), marks, "passed", None, "teardown", user_properties=told)
        )
    written = io.StringIO()
    counted.pytest_terminal_summary(pytest.TerminalReporter(pytestconfig, written))
    shown = [line.split() for line in written.getvalue().splitlines() if " s  " in line]
    assert shown == [["3.50", "s", "b.py"], ["3.00", "s", "a.py::slow"], ["2.00", "s", "b.py::one"]]
