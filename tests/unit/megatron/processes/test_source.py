"""What a host runs, and how hosts that do not run the same are told."""

from __future__ import annotations

import sys

import torch

from megatron.processes.source import difference, source_checksum, what_runs
from restart_trace.version import __version__


def test_what_runs_is_what_this_process_would_import() -> None:
    mine = what_runs()
    # A build for CUDA from PyPI has +cuNNN in torch.__version__ alone.
    assert mine["torch"] in (torch.__version__, torch.__version__.partition("+")[0])
    assert mine["Python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert mine["megatron-restart"] == f"{__version__} source {source_checksum()}"
    assert {"deepspeed", "numpy"} <= set(mine) and "kernel" not in mine


def test_hosts_that_run_the_same_do_not_differ() -> None:
    assert difference([]) is None
    assert difference([("node0", what_runs()), ("node1", what_runs())]) is None


def test_of_two_hosts_the_second_one_differs() -> None:
    found = difference([("node0", {"torch": "2.13", "numpy": "2"}), ("node1", {"torch": "2.0"})])
    assert found is not None
    assert found.startswith("host node1 runs numpy none (node0: 2), torch 2.0 (node0: 2.13): a run needs the same")


def test_the_few_are_named_even_if_they_come_first() -> None:
    hosts = [("odd", {"torch": "1"}), ("a", {"torch": "2"}), ("b", {"torch": "2"}), ("c", {"torch": "3"})]
    found = difference(hosts)
    assert found is not None
    assert found.startswith("host odd runs torch 1 (a: 2); host c runs torch 3 (a: 2): ")


def test_many_hosts_that_differ_alike_are_counted_off() -> None:
    hosts = [(f"new{i}", {"torch": "2"}) for i in range(10)] + [(f"old{i}", {"torch": "1"}) for i in range(9)]
    found = difference(hosts)
    assert found is not None
    assert found.startswith("hosts old0, old1, old2, old3, old4, old5, old6, old7 ... run torch 1 (new0: 2): ")
