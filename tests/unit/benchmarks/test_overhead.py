"""Statistics, arguments and sizes of the overhead measurement."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
from pathlib import Path

import pytest

from benchmarks.common.samples import Ratio, median_of_ratios, ratio_of_medians, verdict
from benchmarks.common.state import model_flags
from benchmarks.overhead import jobs
from benchmarks.overhead.cli import main, parse_ranks
from benchmarks.overhead.clients import table
from benchmarks.overhead.launch import Measurement
from benchmarks.overhead.plan import OPERATIONS, VARIANTS
from benchmarks.overhead.report import analyse, render
from tools.common.cli import parse_bytes
from tools.common.machine import filesystem_of
from tools.common.samples import interquartile_range

NOBODY = 65534  # a user without rights
CALM = Ratio(1.0, 0.998, 1.002)


def noisy(rounds: int, factor: float, spread: float, seed: int) -> list[float]:
    generator = random.Random(seed)
    return [factor * generator.gauss(1.0, spread) for _ in range(rounds)]


def test_interquartile_range() -> None:
    assert interquartile_range([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    assert interquartile_range([7.0]) == 0.0


def test_ratio_of_medians_pools_the_baselines() -> None:
    ratio = ratio_of_medians([2.0, 2.0, 2.0], [[1.0, 1.0, 1.0], [1.0, 3.0, 3.0]])
    assert ratio.value == 2.0  # the median of 1 1 1 1 3 3 is 1


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_the_interval_holds_the_true_ratio(factor: float) -> None:
    held = 0
    for seed in range(20):
        tested, first, second = (noisy(24, f, 0.05, 3 * seed + i) for i, f in enumerate((factor, 1.0, 1.0)))
        ratio = ratio_of_medians(tested, [first, second])
        held += ratio.low <= factor <= ratio.high
    assert held >= 16  # 19 of 20 are expected


def test_noise_that_a_round_shares_cancels_within_rounds() -> None:
    drift = [1.0 + 0.5 * (i % 5) for i in range(30)]
    tested = [1.02 * d for d in drift]
    ratio = median_of_ratios(tested, [drift, drift])
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((1.02, 1.02, 1.02))


def test_rounds_must_be_complete() -> None:
    with pytest.raises(ValueError, match="one value per round"):
        ratio_of_medians([1.0, 2.0], [[1.0]])


@pytest.mark.parametrize(
    ("ratio", "control", "rounds", "begins"),
    [
        (Ratio(1.002, 0.999, 1.006), CALM, 20, "met"),
        (Ratio(1.03, 1.02, 1.04), CALM, 20, "not met"),
        (Ratio(1.005, 0.99, 1.02), CALM, 20, "undecided: the interval"),
        (Ratio(0.9, 0.8, 0.95), Ratio(0.8, 0.7, 0.9), 20, "undecided: the baseline differs"),
        (Ratio(1.002, 0.999, 1.006), CALM, 3, "undecided: fewer"),
    ],
)
def test_verdict(ratio: Ratio, control: Ratio, rounds: int, begins: str) -> None:
    assert verdict(ratio, control, 0.01, rounds).startswith(begins)


@pytest.mark.parametrize(
    ("text", "size"), [("1GiB", 1 << 30), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("42", 42), ("3B", 3)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1Gi", "-1MB", "1 PiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        parse_bytes(text)


def test_numbers_of_ranks() -> None:
    assert parse_ranks("1,2,8") == [1, 2, 8]
    with pytest.raises(argparse.ArgumentTypeError, match="no list of numbers of ranks"):
        parse_ranks("1,,2")


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("size", [4 << 20, 64 << 20, 1 << 30, 5 << 30])
def test_the_model_has_the_size_asked_for(size: int, ranks: int) -> None:
    flags = model_flags(size, ranks)
    value = {name: int(text) for name, text in zip(flags, flags[1:], strict=False) if text.isdigit()}
    hidden, ffn, layers = value["--hidden-size"], value["--ffn-hidden-size"], value["--num-layers"]
    parameters = layers * (4 * hidden**2 + 3 * hidden * ffn) / ranks
    assert 14 * parameters == pytest.approx(size, rel=0.15 if size > 4 << 20 else 0.5)
    assert value["--num-attention-heads"] % ranks == 0
    assert ffn % ranks == 0


def measurement(overhead: float, storage_read_bytes: int = 0) -> Measurement:
    """Twelve rounds in which the tested variant takes `overhead` more."""
    found = Measurement("/somewhere", "ext4", ranks=1, bytes_per_rank=1000, files_per_rank=3)
    for operation in OPERATIONS:
        for variant in VARIANTS:
            seconds = 1.0 + overhead * (variant == "traced")
            sample = {
                "wall_s": seconds, "cpu_s": seconds / 2, "recorder_s": 0.004 * (variant == "traced"),
                "storage_read_bytes": storage_read_bytes, "machine_cpu_s": seconds,
            }  # fmt: skip
            found.samples.setdefault(operation, {})[variant] = [[sample]] * 12
    return found


def test_the_report_says_what_was_measured() -> None:
    result = analyse(measurement(0.05))
    save, load = (result["comparisons"][name] for name in ("save", "load"))
    assert save["ratio_of_medians"]["value"] == pytest.approx(1.05)
    assert (save["verdict"], load["verdict"]) == ("not met", "not met")
    text = render([result])
    assert "target < 1%: not met" in text
    assert "+5.00%  [+5.00%, +5.00%]" in text
    assert "4.00 ms = 0.40%" in text
    assert result["samples"]["save"]["traced"][0][0]["wall_s"] == 1.05


@pytest.mark.parametrize(("read", "state"), [(0, "warm"), (950, "cold"), (500, "partly warm")])
def test_the_page_cache_is_named_by_what_was_read_from_storage(read: int, state: str) -> None:
    result = analyse(measurement(0.0, storage_read_bytes=read))
    assert result["comparisons"]["load"]["page_cache"] == state
    assert result["comparisons"]["save"]["page_cache"] is None


def test_file_system_of_a_directory(tmp_path: Path) -> None:
    assert filesystem_of(Path("/proc")) == "proc"
    assert filesystem_of(tmp_path) not in ("", "unknown", "proc")


def test_a_directory_without_room_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dir", str(tmp_path), "--bytes-per-rank", "900TiB", "--ranks", "1"]) == 2
    assert f"--dir {tmp_path}" in capsys.readouterr().err


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dir", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_cold_needs_root(tmp_path: Path) -> None:
    told = (tmp_path / "told").open("w+")
    child = os.fork()
    if child == 0:  # a process of its own, as rights that are given up are gone
        try:
            if os.geteuid() == 0:
                os.setuid(NOBODY)
            with contextlib.redirect_stderr(told):
                main(["--cold"])
        except SystemExit as stopped:
            told.flush()
            os._exit(stopped.code if isinstance(stopped.code, int) else 99)
        finally:
            os._exit(98)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    told.seek(0)
    assert "--cold: /proc/sys/vm/drop_caches cannot be written" in told.read()


def test_the_table_of_jobs_has_the_share_of_tracing_in_their_processor_time() -> None:
    untraced = [{"wall_s": 20.0, "cpu_s": cpu_s, "calls_s": 0.0} for cpu_s in (19.0, 20.0, 21.0)]
    traced = [{"wall_s": 21.0, "cpu_s": 20.0, "start_s": 0.1, "calls_s": calls_s} for calls_s in (0.04, 0.06, 0.05)]
    slow = [sample | {"start_s": 0.2} for sample in traced]
    lines = jobs.table({"one": (30, untraced, traced), "two": (1, untraced, slow)}).splitlines()
    assert lines[2] == (
        "| one | 30 | 20.0 +- 1.0 | 20.0 +- 0.0 | 20.0 +- 0.0 | 21.0 +- 0.0 | 100.0 +- 0.0 | 50.0 +- 10.0 | 0.75 % |"
    )
    assert lines[3].startswith("| two | 1 |") and lines[3].endswith("| 1.25 % |")
    assert lines[-1] == "Tracing takes less than 1% of the processor time of 1 of 2 jobs."


def test_the_table_of_clients_has_medians_and_spreads() -> None:
    """Of the time within hooks, as a share of what a user waits for, and of processor time."""
    untraced = [{"wall_s": wall_s, "cpu_s": 2.0} for wall_s in (10.0, 11.0, 12.0)]
    traced = [
        {"wall_s": 11.0, "cpu_s": 3.0, "hooks_s": hooks_s, "worked_s": 4.0, "calls": 50}
        for hooks_s in (0.010, 0.018, 0.014)
    ]
    slow = [sample | {"hooks_s": 0.03} for sample in traced]
    lines = table({"one": (untraced, traced), "two": (untraced, slow)}).splitlines()
    assert lines[2] == (
        "| one | 11.00 +- 1.00 | 11.00 +- 0.00 | 2.00 +- 0.00 | 3.00 +- 0.00 | 4.00 +- 0.00 | 50 | 14.0 +- 4.0 "
        "| 0.35 % | 0.70 % |"
    )
    assert lines[3].endswith("| 30.0 +- 0.0 | 0.75 % | 1.50 % |")
    assert lines[-1] == "Hooks take less than 1% of both: true of 1 of 2 clients."
