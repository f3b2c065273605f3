"""The file of a sweep: what it means, and that every mistake is named with its line and key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.script_helpers import BENCH, ROOT
from tools.restart_sweep.cells import cells_of
from tools.restart_sweep.cli import main
from tools.restart_sweep.reduced import reduced
from tools.restart_sweep.sweep_file import RUN_KEYS, SWEEP_KEYS, SweepFileError, read_sweep

GOOD = """\
name: good
repeats: 2
storage_bytes: 1MiB
runs:
  - mode: replay
    models: [1b, 3b]
    engines: [torch, lazy]
    limit_bytes: 1MiB
  - mode: restart
    models: tiny
    layouts: [tp1_pp1_dp2]
    engines: [lazy]
    cache: [warm, cold]
    faults: [sigkill-all@mid-step]
"""
SAMPLES = sorted((BENCH / "sweeps").glob("*.yaml"))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    return path


def test_cells_of_a_repeat_come_together_and_its_variants_begin_with_another_one(tmp_path: Path) -> None:
    cells = cells_of(read_sweep(written(tmp_path, GOOD)))
    assert [cell.index for cell in cells] == list(range(2 * (1 + 4 + 2)))
    assert [cell.repeat for cell in cells] == [1] * 7 + [2] * 7
    told = [(cell.mode, cell.model, cell.layout, cell.engine, cell.cache) for cell in cells]
    assert told[:7] == [
        ("storage", "", "tp1_pp1_dp1", "", ""),
        ("replay", "1b", "tp1_pp1_dp1", "torch", "cold+warm"),
        ("replay", "1b", "tp1_pp1_dp1", "lazy", "cold+warm"),
        ("replay", "3b", "tp4_pp1_dp1", "torch", "cold+warm"),
        ("replay", "3b", "tp4_pp1_dp1", "lazy", "cold+warm"),
        ("restart", "tiny", "tp1_pp1_dp2", "lazy", "warm"),
        ("restart", "tiny", "tp1_pp1_dp2", "lazy", "cold"),
    ]
    assert sorted(told[7:]) == sorted(told[:7])
    assert [entry[3] for entry in told[8:12]] == ["lazy", "torch", "lazy", "torch"]
    assert len({cell.name for cell in cells}) == len(cells)


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("repeats: 2", "repeets: 2", 2, "repeets: no such key; did you mean repeats?"),
        ("repeats: 2", "repeats: two", 2, "repeats: must be a whole number, at least 1, and is `two`"),
        ("repeats: 2", "repeats: [2]", 2, "repeats: must be a whole number, and is a list"),
        ("repeats: 2", "repeats: yes", 2, "repeats: must be a whole number, at least 1, and is `yes`"),
        ("repeats: 2", "name: again", 2, "name: is there twice; the first is in line 1"),
        ("storage_bytes: 1MiB", "storage_bytes: much", 3, "storage_bytes: `much` is no size; write it as 64MiB, or"),
        ("mode: replay", "mode: reply", 5, "mode: `reply` is no mode; did you mean replay?; there are replay, scaled"),
        ("models: [1b, 3b]", "models: [1b, 4b]", 6, "models: `4b` is no preset"),
        ("models: [1b, 3b]", "models: []", 6, "models: is an empty list"),
        ("engines: [torch, lazy]", "engines: [torch, lasy]", 7, "engines: `lasy` is no engine; did you mean lazy?"),
        ("engines: [torch, lazy]", "engines: [torch, torch]", 7, "engines: `torch` is there twice"),
        ("engines: [torch, lazy]", "engines: [torch, none]", 7, "engines: engine `none` writes no files"),
        ("limit_bytes: 1MiB", "iterations: 3", 8, "iterations: means nothing in mode replay; it belongs to scaled"),
        ("limit_bytes: 1MiB", "operations: [load, sav]", 8, "operations: `sav` is no operation; did you mean save?"),
        ("limit_bytes: 1MiB", "striping: 8x", 8, "striping: '' is no"),
        ("limit_bytes: 1MiB", "striping: many", 8, "striping: 'many': write it as N or NxSIZE, such as 8x4MiB, or"),
        ("limit_bytes: 1MiB", "stripe_command: lfs", 8, "stripe_command: sets what `striping` says"),
        ("engines: [lazy]", "engines: [raw-all]", 12, "engines: `raw-all` saves in replays alone"),
        ("engines: [lazy]", "engines: [s3torchconnector]", 12, "engines: `s3torchconnector` saves in replays alone"),
        ("sigkill-all@mid-step", "node-loss@mid-step", 14, "faults: node-loss@mid-step is a fault of a node, which"),
        ("    cache: [warm, cold]", "    nodes_command: x", 13, "nodes_command: only faults of nodes use it"),
        ("    models: tiny\n", "", 9, "models: is missing from a run: presets, as in ckpt-plan"),
        ("[tp1_pp1_dp2]", "[tp1-pp1]", 11, "layouts: `tp1-pp1` is no layout; write it as tp4_pp2"),
        ("cache: [warm, cold]", "cache: [tepid]", 13, "cache: `tepid` is no state of the page cache"),
        ("sigkill-all@mid-step", "sigkil-all@mid-step", 14, "faults: `sigkil-all` is no fault; did you mean sigkill"),
        ("sigkill-all@mid-step", "sigkill-all", 14, "faults: sigkill-all: write FAULT@WHEN"),
        ("sigkill-all@mid-step", "sigkill-all@noon", 14, "faults: noon: not an injection point"),
        ("sigkill-all@mid-step", "disk-full@mid-load", 14, "faults: --fault disk-full --at mid-load: nothing is saved"),
        ("sigkill-all@mid-step", "none", 13, "cache: without a fault nothing is loaded"),
        ("name: good", "name: ../up", 1, "name: `../up` is to name files"),
        ("name: good", "- name: good", 1, "is not YAML"),
        ("runs:", "runs: [", 4, "is not YAML"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line_and_key(
    tmp_path: Path, old: str, new: str, line: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in GOOD
    path = written(tmp_path, GOOD.replace(old, new, 1))
    assert main(["--dry-run", str(path)]) == 2
    told = capsys.readouterr()
    found = re.fullmatch(rf"restart-sweep: {re.escape(str(path))}:(\d+): (.*)\n", told.err)
    assert found is not None and message in found[2], told.err
    assert told.out == ""
    if "is not YAML" not in message:
        assert int(found[1]) == line


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"name", b"a: &a [*a]", b"{" * 50])
def test_what_is_no_sweep_at_all(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_bytes(content)
    with pytest.raises(SweepFileError, match=re.escape(str(path))):
        read_sweep(path)
    with pytest.raises(SweepFileError, match="cannot be read"):
        read_sweep(tmp_path / "missing.yaml")


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_the_sample_sweeps_are_right(path: Path) -> None:
    sweep = read_sweep(path)
    assert sweep.name == path.stem and sweep.about
    assert cells_of(sweep)


def test_the_documentation_has_every_key() -> None:
    text = (ROOT / "docs" / "restart_sweep.md").read_text()
    rows = text.partition("## The file\n")[2].partition("\n### ")[0].splitlines()
    first_cells = [line.split("|")[1] for line in rows if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(first_cells))) == {*SWEEP_KEYS, *RUN_KEYS}


REPLAYS = """\
name: replays
repeats: 1
storage_bytes: none
runs:
  - mode: replay
    models: 3b
    engines: [lazy, raw-all]
    operations: [save_and_load, load]
    striping: [none, 8x4MiB]
    stripe_command: stripe {count} {size} {directory}
"""


def test_operations_and_stripes_are_dimensions_and_what_they_are_by_themselves_is_not_said(tmp_path: Path) -> None:
    cells = cells_of(read_sweep(written(tmp_path, REPLAYS)))
    assert [(cell.engine, *cell.of_replay) for cell in cells] == [
        ("lazy",), ("raw-all",), ("lazy", "load"), ("raw-all", "load"),
        ("lazy", "striping 8x4MiB"), ("raw-all", "striping 8x4MiB"),
        ("lazy", "load", "striping 8x4MiB"), ("raw-all", "load", "striping 8x4MiB"),
    ]  # fmt: skip
    assert len({cell.name for cell in cells}) == 8


def test_saves_that_are_kept_are_those_of_one_operation(tmp_path: Path) -> None:
    kept = REPLAYS.replace("operations: [save_and_load, load]", "operations: saves_then_loads\n    saves: 3")
    cells = cells_of(read_sweep(written(tmp_path, kept)))
    assert {(cell.settings["operations"], cell.settings["saves"]) for cell in cells} == {("saves_then_loads", 3)}
    for wrong, said in (
        (kept.replace("    saves: 3\n", ""), "operations: `saves_then_loads` needs `saves: N`"),
        (
            kept.replace("saves_then_loads", "[save, saves_then_loads]"),
            "saves: belongs to `operations: saves_then_loads`",
        ),
        (kept.replace("saves_then_loads", "load"), "saves: belongs to `operations: saves_then_loads`"),
        (
            kept.replace("saves_then_loads\n    saves: 3", "[save, saves_then_loads]"),
            "operations: `saves_then_loads` stands alone; give it a run of its own",
        ),
        (
            kept.replace("[lazy, raw-all]", "[lazy, memory]"),
            "engines: the slots of `memory` hold the newest save alone",
        ),
    ):
        with pytest.raises(SweepFileError, match=said):
            read_sweep(written(tmp_path, wrong))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_a_reduced_sweep_has_every_kind_of_cell_and_none_that_takes_a_gpu(sample: Path) -> None:
    sweep = read_sweep(sample)
    small = reduced(sweep)
    cells = [cell for cell in cells_of(small) if cell.mode != "storage"]
    assert small.name == f"{sweep.name}_reduced" and small.text != sweep.text and small.about.startswith("Reduced: ")
    assert {cell.mode for cell in cells} <= {"replay", "scaled"} and {cell.repeat for cell in cells} == {1}
    assert all(cell.ranks <= 8 for cell in cells if cell.mode == "scaled")
    assert all(cell.settings["limit_bytes"] == "16MiB" for cell in cells if cell.mode == "replay")
    assert len(small.runs) == len(sweep.runs) and len(cells) >= 2 * len(sweep.runs) - 1
    for cell in cells:
        if cell.mode == "scaled" and cell.fault == "none" and cell.save_interval is not None:
            longest = max(other.save_interval or 0 for other in cells if other.fault == "none")
            assert cell.save_interval < cell.settings["iterations"] <= longest + 1


def test_faults_of_nodes_take_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = GOOD.replace("sigkill-all@", "node-loss@").replace("    cache: [warm, cold]", "    nodes_command: harm")
    monkeypatch.delenv("HOSTFILE", raising=False)
    assert main([str(written(tmp_path, text)), "--out", str(tmp_path / "out")]) == 2
    assert "HOSTFILE: is not set, but node-loss@mid-step is a fault of a node" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
