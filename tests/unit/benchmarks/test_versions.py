"""Two versions side by side: this checkout beside itself, and what the table says of samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.versions.__main__ import main, table, verdict
from tests.unit.trace_helpers import ROOT


@pytest.mark.slow
@pytest.mark.nightly(minutes=1)
def test_this_version_beside_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--bytes", "1MiB", "--engine", "torch", "--rounds", "1", "--dir", str(tmp_path)]
    assert main(["--before", str(ROOT), "--only", "replay, 1 rank", "analysis", *sizes]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[5:9]] == [
        "| torch: blocked", "| torch: durable", "| torch: load cold", "| torch: load warm"
    ]  # fmt: skip
    assert lines[10] == "## Analysis" and lines[-1].startswith("| whole command | ")
    assert not list(tmp_path.iterdir())


def test_a_version_that_fails_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pretrain_gpt.py").touch()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").touch()
    assert main(["--before", str(tmp_path), "--rounds", "1", "--dir", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_no_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--before", str(tmp_path)])
    assert f"--before {tmp_path}: is no checkout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.1, 1.2, 1.3, 1.1, 1.01], "slower"),
        ([0.9, 0.8, 0.7, 0.9, 0.99], "faster"),
        ([1.1, 1.2, 1.3, 1.1, 0.99], "no difference shown"),
        ([2.0], "too few rounds"),
    ],
)
def test_a_difference_counts_where_every_round_shows_it(ratios: list[float], expected: str) -> None:
    assert verdict(ratios) == expected


def test_rounds_are_compared_pairwise() -> None:
    before, now = [{"x": value} for value in (1.0, 2.0, 4.0)], [{"x": value} for value in (2.0, 4.0, 4.0)]
    *_, row = table("restart", before, now)
    assert row == "| x | 2.000 [1.000, 4.000] | 4.000 [2.000, 4.000] | 2.00 [1.00, 2.00] | too few rounds |"


def test_a_round_without_a_value_does_not_count() -> None:
    before: list[dict[str, float]] = [{"x": 1.0, "y": 1.0}, {"y": 1.0}]
    now: list[dict[str, float]] = [{"x": 3.0}, {"x": 5.0}]
    *_, x, y = table("replay", before, now)
    assert x == "| x | 1.000 [1.000, 1.000] | 3.000 [3.000, 3.000] | 3.00 [3.00, 3.00] | too few rounds |"
    assert y == "| y | - | - | - | not measured |"
