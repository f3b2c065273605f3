"""`--processor-time N`: the N files that took most processor time, the N tests, and the N that are not marked `slow`.

Counted are the tests and all processes that they started. Processor seconds hardly depend on what else the machine
does, unlike durations. A fixture that several tests share counts for the first of them. Processes that outlived their
parent, and that nobody has waited for, are missed.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Generator

import psutil
import pytest

PROPERTY = "processor_s"


def own_seconds() -> float:
    """User and system seconds of this process, and of the descendants that it has waited for."""
    return sum(os.times()[:4])


def seconds_of_descendants() -> float:
    """Of those that are there, and of those that these have waited for. It takes milliseconds itself."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


class Meter:
    """Processor seconds since it was made, of this process and of all that it starts."""

    def __init__(self) -> None:
        self._of_descendants = seconds_of_descendants()
        self._own = own_seconds()

    def seconds(self) -> float:
        """Never negative: those of a descendant that has ended and that nobody has waited for are gone."""
        own = own_seconds() - self._own
        of_descendants = seconds_of_descendants() - self._of_descendants
        return max(own + of_descendants, 0.0)


class ProcessorTime:
    def __init__(self, shown: int) -> None:
        self._shown = shown
        self._of_file: defaultdict[str, float] = defaultdict(float)
        self._of_test: defaultdict[str, float] = defaultdict(float)
        self._of_quick_test: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._meter = Meter()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, object, object]:
        if call.when == "teardown":  # the report of this phase takes it from a worker to the process that sums up
            item.user_properties.append((PROPERTY, self._meter.seconds()))
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = dict(report.user_properties).get(PROPERTY)
        if report.when != "teardown" or not isinstance(seconds, float):
            return
        self._of_file[report.nodeid.partition("::")[0]] += seconds
        self._of_test[report.nodeid] += seconds
        if "slow" not in report.keywords:
            self._of_quick_test[report.nodeid] += seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"processor time: {sum(self._of_file.values()):.0f} s")
        for counted in (self._of_file, self._of_test, self._of_quick_test):
            for name, seconds in sorted(counted.items(), key=lambda item: -item[1])[: self._shown]:
                terminalreporter.write_line(f"{seconds:8.2f} s  {name}")
            terminalreporter.write_line("")


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processor-time",
        type=int,
        metavar="N",
        help="show the N files and the N tests that took most processor time, with all they start",
    )


def configure(config: pytest.Config) -> None:
    shown = config.getoption("--processor-time")
    if shown is not None:
        config.pluginmanager.register(ProcessorTime(shown))
