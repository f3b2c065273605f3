"""Loads with and without --ckpt-fully-parallel-load: what the command counts, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.load_sharing.__main__ import Load, main, table


@pytest.mark.slow
@pytest.mark.nightly(minutes=1)  # of the trainer: tests/dist/test_load_reads.py
def test_replicas_that_share_ask_for_each_byte_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--layout", "1,1,2", "--engine", "lazy", "--hidden-size", "64", "--repeat", "1", "--format", "json"]
    assert main([*argv, "--dir", str(tmp_path)]) == 0
    own, shared = sorted(json.loads(capsys.readouterr().out)["loads"], key=lambda load: load["shared"])
    assert shared["checkpoint_bytes"] == own["checkpoint_bytes"] <= shared["asked_bytes"] < own["asked_bytes"]
    assert shared["exchange_s"] > 0 and own["exchange_s"] == 0
    assert not list(tmp_path.iterdir())


def test_the_table_has_medians_and_the_spread() -> None:
    loads = [Load("lazy", True, seconds, 100_000_000, 110_000_000, None, 0.25) for seconds in (3.0, 1.0, 2.0)]
    assert table(loads)[2:] == ["| `lazy`, with it | 110 MB | 1.10 | not recorded | 2.0 [1.0 to 3.0] s | 0.25 s |"]


@pytest.mark.parametrize(("layout", "why"), [("1,1,1", "nobody to share with"), ("2,2", "give three sizes")])
def test_layouts_that_share_nothing_are_refused(layout: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--layout", layout])
    assert why in capsys.readouterr().err


@pytest.mark.slow
def test_a_training_that_fails_is_told_with_its_last_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--layout", "1,1,2", "--hidden-size", "7", "--dir", str(tmp_path)]) == 2
    assert "a training ended with exit status 2" in capsys.readouterr().err
