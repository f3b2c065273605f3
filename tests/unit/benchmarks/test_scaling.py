"""The benchmark of simulated ranks runs, and what it shows does not grow where it must not."""

from __future__ import annotations

import re

import pytest

from benchmarks.scaling.__main__ import main


@pytest.mark.slow
@pytest.mark.nightly(minutes=1)
def test_what_a_rank_does_is_the_same_for_eight_and_sixteen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ranks", "8", "16", "--repeat", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| ranks | connections") and lines[4].split("|")[1:3] == [" 8 ", " 14 "]
    calls = {
        (cells[1].strip(), cells[2].strip()): [int(re.match(r"\d+", cell.strip())[0]) for cell in cells[3:5]]  # type: ignore[index]
        for cells in (line.split("|") for line in lines[9:])
    }
    assert calls["save", "rank 0"][0] == pytest.approx(calls["save", "rank 0"][1], abs=4)
    assert calls["removal", "last rank"] == [5, 5]  # of the one checkpoint that goes, the directory and its three files
    assert calls["load: discovery", "rank 0"][0] == pytest.approx(calls["load: discovery", "rank 0"][1], abs=4)
    assert calls["start: checks", "second rank of a host"] == [0, 0]  # its host's first rank has told it
    assert calls["save", "last rank"][0] == pytest.approx(calls["save", "last rank"][1], abs=2)
    assert min(calls["start: checks", "rank 0"]) > 10 and min(calls["save", "rank 0"]) > 10
