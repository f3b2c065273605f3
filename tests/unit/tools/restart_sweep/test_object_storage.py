"""A sweep on object storage: what of its file has no meaning there, and how its cells name the place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.config.uris import ObjectUri
from tests.unit.tools.restart_sweep.test_commands import CELL
from tools.restart_sweep.cli import main
from tools.restart_sweep.commands import Places, command_of

SWEEP = """
name: stored
repeats: 1
storage_bytes: {storage_bytes}
runs:
  - {{mode: replay, models: [tiny], engines: [lazy], {more}}}
"""


@pytest.mark.parametrize(
    ("storage_bytes", "more", "told"),
    [
        ("1MiB", "cache: [warm]", "storage_bytes: none"),
        ("none", "cache: [cold, warm]", "give cache: warm"),
        ("none", "cache: [warm], limit_bytes: fit", "give a size, and drop striping"),
    ],
)
def test_what_a_store_does_not_have_is_refused_before_a_cell_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], storage_bytes: str, more: str, told: str
) -> None:
    file, out = tmp_path / "sweep.yaml", tmp_path / "out"
    file.write_text(SWEEP.format(storage_bytes=storage_bytes, more=more))
    assert main(["--dir", "s3://bucket/sweep", "--out", str(out), str(file)]) == 2
    said = capsys.readouterr().err
    assert "--dir s3://bucket/sweep: stored asks for what object storage does not have: " in said and told in said
    assert not out.exists()


@pytest.mark.parametrize("place", [["--dir", "."], []])
def test_the_s3_connector_is_refused_where_files_are(
    place: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "sweep.yaml", tmp_path / "out"
    text = SWEEP.format(storage_bytes="none", more="cache: [warm]").replace("[lazy]", "[lazy, s3torchconnector]")
    file.write_text(text)
    assert main([*place, "--out", str(out), str(file)]) == 2
    told = "s3torchconnector writes to object storage only; give --dir s3://BUCKET/PREFIX"
    assert told in capsys.readouterr().err and not out.exists()
    assert main(["--dry-run", str(file)]) == 0


def test_cells_save_below_the_prefix(tmp_path: Path) -> None:
    places = Places(tmp_path, ObjectUri("bucket", "sweep/cell"), tmp_path)
    drill = command_of(CELL, places, 60)
    assert drill.words[drill.words.index("--checkpoints") + 1] == "s3://bucket/sweep/cell/checkpoints"
    train = command_of(replace(CELL, mode="train", fault="none"), places, 60)
    assert train.settings["SAVE_DIR"] == "s3://bucket/sweep/cell/checkpoints"
    replay = replace(CELL, mode="replay", fault="none", settings={"ranks": "0", "limit_bytes": "1MiB"})
    words = command_of(replay, places, 60).words
    assert words[words.index("--dir") + 1] == "s3://bucket/sweep/cell" and "--no-cold" not in words
