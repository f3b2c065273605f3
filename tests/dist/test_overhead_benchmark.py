"""The overhead measurement, end to end, on a state so small that only its working is tested."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.overhead.plan import OPERATIONS, VARIANTS
from tests.dist.harness import ROOT, wait_for

pytestmark = pytest.mark.nightly(minutes=2)
COMMAND = [sys.executable, "-m", "benchmarks.overhead", "--bytes-per-rank", "2MiB", "--format", "json"]


def test_every_variant_is_measured_on_every_rank_and_nothing_is_left(tmp_path: Path) -> None:
    rounds, ranks = 2, 2
    done = subprocess.run(
        [*COMMAND, "--ranks", str(ranks), "--repeat", str(rounds), "--dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["measurements"]
    assert found["bytes_per_rank"] == pytest.approx(2 << 20, rel=0.5)
    for operation in OPERATIONS:
        assert set(found["samples"][operation]) == set(VARIANTS)
        for variant in VARIANTS:
            samples = found["samples"][operation][variant]
            assert [len(of_ranks) for of_ranks in samples] == [ranks] * rounds
            assert all(sample["wall_s"] > 0 for of_ranks in samples for sample in of_ranks)
            recorded = all(sample["recorder_s"] > 0 for of_ranks in samples for sample in of_ranks)
            assert recorded == (variant == "traced")
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_after_a_termination(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--ranks", "1", "--repeat", "1000", "--dir", str(tmp_path)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_for(lambda: bool(list(tmp_path.glob("*/to_load"))), "the first checkpoint")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_the_cost_of_sending_spans_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs opentelemetry-exporter-otlp-proto-http")
    command = [sys.executable, "-m", "benchmarks.otlp", "--rounds", "2", "--steps", "5", "--dir", str(tmp_path)]
    done = subprocess.run([*command, "--format", "json"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: len(values) for name, values in found["samples"].items()} == {"without": 2, "with": 2, "again": 2}
    assert found["verdict"] == "undecided: fewer than 10 rounds (--repeat)" and found["requests"] > 0
    assert not list(tmp_path.iterdir())


def test_clients_are_measured_with_and_without_hooks(tmp_path: Path) -> None:
    name = "FSDP2, dcp.save"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.overhead.clients", "--only", name, "--repeat", "2", "--width", "64",
         "--dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    head, _, row, _, verdict = done.stdout.strip().splitlines()
    cells = dict(zip(head.split(" | "), row.split(" | "), strict=True))
    assert row.startswith(f"| {name} |") and int(cells["hooked calls"]) > 50
    assert all(float(cells[key].split(" +- ")[0]) > 0 for key in ("untraced s", "traced s", "ms within hooks"))
    assert verdict.startswith("Hooks take less than 1% of both: true of ")
    assert not list(tmp_path.iterdir())


def test_tracing_is_measured_in_all_processes_of_a_job(tmp_path: Path) -> None:
    """Of one that torchrun starts, and of one that spawns its ranks."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.overhead.jobs", "--only", "FSDP2, dcp.save", "mp.spawn", "--repeat", "1",
         "--steps", "0.1", "--width", "64", "--dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:4]]
    for name, steps, *times, _ in rows:
        assert name in ("| FSDP2, dcp.save", "| mp.spawn") and int(steps) > 1
        assert all(float(time.split()[0]) > 0 for time in times)
    assert not list(tmp_path.iterdir())
