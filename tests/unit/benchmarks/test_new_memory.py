"""Cold reads into new memory, on whatever file system the temporary files are."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.new_memory.__main__ import VARIANTS, main


def test_each_kind_of_memory_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--bytes", "4MiB", "--rounds", "1", "--dir", str(tmp_path)])
    output, error = capsys.readouterr()
    if status == 0:
        assert [line.split(" | ")[0] for line in output.splitlines()[2:]] == [f"| {name}" for name in VARIANTS]
    else:  # a file system in memory
        assert status == 2 and str(tmp_path) in error
    assert not list(tmp_path.iterdir())


def test_less_than_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--bytes", "100"])
    assert "--bytes 100" in capsys.readouterr().err
