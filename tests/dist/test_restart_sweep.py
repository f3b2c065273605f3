"""A sweep of very small cells: killed and resumed; and its results: report, table, bundle, comparison."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from tests.dist.harness import HANGS_S, ROOT, processes_with, wait_for
from tests.unit.tools.ckpt_analysis.glossary_helpers import titles_of, undefined_in_titles
from tests.unit.tools.ckpt_analysis.render.html.report_pages import Page
from tools.ckpt_analysis.cli import main as analysis
from tools.common.formatting import size
from tools.restart_sweep.cli import main as sweep_main

pytestmark = pytest.mark.slow
SWEEP = """\
name: cells
about: Cells of a megabyte.
repeats: 2
storage_bytes: 1MiB
runs:
  - mode: replay
    models: [tiny]
    layouts: [tp1_pp1]
    engines: [torch, lazy]
    limit_bytes: 1MiB
    steps_between: 0
"""
BROKEN = """\
name: broken
repeats: 1
storage_bytes: none
runs:
  - mode: replay
    models: [tiny]
    layouts: [tp1_pp1]
    engines: [torch]
    flags: --no-such-flag
  - mode: replay
    models: [tiny]
    layouts: [tp1_pp1]
    engines: [lazy]
    cache: [warm]
    limit_bytes: 1MiB
    steps_between: 0
"""


def command(out: Path, file: Path) -> list[str]:
    script = ROOT / "examples_deepspeed" / "restart_bench" / "sweep.py"
    return [sys.executable, str(script), "--out", str(out), str(file)]


def environment() -> dict[str, str]:
    return {**os.environ, "SKIP_SETUP": "1", "CUDA_VISIBLE_DEVICES": ""}


def results(out: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in out.glob("cells/*/result.json")}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that SIGKILL ended within its third cell, and that was resumed."""
    place = tmp_path_factory.mktemp("sweep")
    file, out = place / "cells.yaml", place / "out"
    file.write_text(SWEEP)
    with (place / "killed.txt").open("w") as log:
        killed = subprocess.Popen(command(out, file), env=environment(), stdout=log, stderr=log)
        wait_for(lambda: (out / "cells").is_dir() and len(list((out / "cells").iterdir())) == 3, "three cells begun")
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    before = results(out)
    assert len(before) == 2
    own_id = json.loads((out / "sweep.json").read_text())["id"]
    wait_for(lambda: not processes_with("RESTART_SWEEP", own_id), "the end of the processes of the killed sweep")
    (place / "before.json").write_text(json.dumps({name: content.decode() for name, content in before.items()}))
    done = subprocess.run(command(out, file), env=environment(), capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    (place / "resumed.txt").write_text(done.stderr)
    return place


def test_a_killed_sweep_is_resumed_without_repeating_what_was_done(swept: Path) -> None:
    out, before = swept / "out", json.loads((swept / "before.json").read_text())
    after = results(out)
    assert {name: after[name].decode() for name in before} == before
    assert len(after) == 6 and {json.loads(content)["status"] for content in after.values()} == {"ok"}
    told = (swept / "resumed.txt").read_text()
    assert "2 of 6 cells are done already" in told and told.count(" s, ok") == 4 and " left" in told
    (aside,) = (out / "aside").iterdir()
    assert aside.name.startswith("0002_r1_") and not (aside / "result.json").exists()
    assert len(list((out / "sessions").glob("*.json"))) == 2
    assert not (out / "storage").exists()


def test_its_report_has_every_figure_and_says_what_was_not_measured(swept: Path) -> None:
    page = (swept / "out" / "report" / "ckpt_report.html").read_text()
    for figure in ("files", "saves", "restarts", "speedups", "throughput", "frequency", "iterations", "cells"):
        assert f'<section id="sweep-{figure}"' in page
    assert "Cells of a megabyte." in page and "Replay: rank 0 of tiny on TP1 x PP1 x DP1" in page
    assert "No restart was measured: the sweep has no fault." in page
    assert "The save interval was not varied" in page and "No iteration was measured" in page
    assert "replay tiny tp1_pp1_dp1: " in page  # the verdict
    assert page.count("as planned") >= 2
    assert undefined_in_titles(titles_of(Page(page))) == []


def test_the_terminal_has_a_sentence_for_each_configuration_and_counts_cells_that_have_not_ended(
    swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(swept / "out", tmp_path / "out")
    next((tmp_path / "out" / "cells").glob("*_r2_replay*lazy*/result.json")).unlink()
    assert analysis(["sweep", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    begun, wrapped, files = printed.split("\n\n")[:3]
    verdicts = " ".join(wrapped.split())  # a sentence breaks where the machine's figures make it longer
    plan = json.loads((tmp_path / "out" / "plans" / "tiny_tp1_pp1_dp1_torch.json").read_text())
    sizes = plan["file_bytes"]
    _, title, row, _ = files.splitlines()
    assert files.startswith("Files and sizes\n") and plan["num_files"] > 2 and sizes == sorted(set(sizes))
    assert all(f"{which} file" in title for which in ("smallest", "median", "largest"))
    assert all(size(num_bytes) in row for num_bytes in (plan["total_bytes"], *sizes))
    assert begun == "cells: 5 of 6 cells measured" and printed.endswith("\n1 cell without a result yet\n")
    assert "FAILED" not in printed
    assert verdicts.count("replay tiny tp1_pp1_dp1: ") == 1 and verdicts.count("too few repeats to tell") < 2
    assert verdicts.count("Load of the machine before: ") == ("too few repeats to tell" in verdicts)


def test_its_table_has_a_row_for_each_measurement(swept: Path) -> None:
    report = swept / "out" / "report"
    table = pl.read_parquet(report / "measurements.parquet")
    assert table.height == pl.read_csv(report / "measurements.csv").height
    loads = table.filter(pl.col("metric").is_in(["load_cold_s", "load_warm_s"]))
    assert loads.group_by("engine", "cache", "metric").len()["len"].to_list() == [2] * 4
    replayed = json.loads(next((swept / "out" / "cells").glob("*_r2_replay*lazy*/replay.json")).read_text())
    warm = table.filter((pl.col("metric") == "load_warm_s") & (pl.col("engine") == "lazy") & (pl.col("repeat") == 2))
    assert warm["value"].to_list() == replayed["engines"]["lazy"]["load_warm_s"]["samples"]
    ceiling = table.filter(pl.col("mode") == "storage")
    assert {"storage_write_direct_GBps", "storage_read_buffered_cold_GBps"} <= set(ceiling["metric"])
    assert (ceiling["value"] > 0).all()


def test_a_bundle_is_valid_and_compared_and_one_byte_makes_the_difference(
    swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "cells.zip"
    assert analysis(["bundle", str(swept / "out"), "-o", str(bundle)]) == 0
    assert analysis(["validate", str(bundle)]) == 0
    assert "6 cells: valid" in capsys.readouterr().out
    assert analysis(["validate", "--mlperf", str(bundle)]) == 1
    told = capsys.readouterr().out
    assert "has model tiny, which is not in table 2" in told and "has 1 writes, and not 10" in told
    assert analysis(["compare", f"ours={bundle}", f"theirs={swept / 'out'}"]) == 0
    told = capsys.readouterr().out
    assert "theirs: lazy" in told and "load_cold_s" in told
    content = bundle.read_bytes()
    altered = tmp_path / "altered.zip"
    name = b"replay.json"
    for place in (0, content.index(name) + 200, len(content) // 2, content.rindex(name), len(content) - 30, -1):
        data = bytearray(content)
        data[place] ^= 1
        altered.write_bytes(data)
        for words in (["validate", str(altered)], ["compare", str(altered)], ["sweep", str(altered)]):
            assert analysis(words) == 2, place
            message = capsys.readouterr().err
            assert message.count("\n") == 1 and message.count(str(altered)) == 1, message
    data = bytearray(content)
    data[content.index(name) + 200] ^= 1  # of the compressed content of that file
    altered.write_bytes(data)
    assert analysis(["validate", str(altered)]) == 2
    assert "replay.json is altered" in capsys.readouterr().err


def test_a_sweep_that_breaks_a_rule_is_not_valid(
    swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(swept / "out", out)
    (out / "cells" / "0000_r1_storage" / "result.json").unlink()
    session = out / "sessions" / "002.json"
    session.write_text(session.read_text().replace('"kernel": "', '"kernel": "other '))
    assert analysis(["validate", str(out)]) == 1
    told = capsys.readouterr().out
    assert "rule not met: complete: 0000_r1_storage has no result" in told
    assert "rule not met: storage: the storage itself was not measured in repeat 1" in told
    assert "rule not met: one machine: start 2 differs from the first in kernel" in told
    assert "not valid: 3 problems" in told


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cells/0003_r2_storage/replay.json", "{}", "its files are not as a sweep leaves them"),
        ("cells/0003_r2_storage/replay.json", "[", "replay.json: is not JSON"),
        ("cells/0003_r2_storage/replay.json", None, "replay.json: cannot be read"),
        (
            "cells/0003_r2_storage/result.json",
            '{"status": "ok", "trace": "../../.."}',
            "result.json: is not as a sweep",
        ),
        ("sessions/001.json", "{}", "001.json: does not say on what machine"),
        ("sweep.json", '{"format": 9}', "sweep.json: is of format 9, not 1"),
    ],
)
def test_damaged_files_are_named(
    swept: Path, tmp_path: Path, name: str, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(swept / "out", out)
    (out / name).unlink()
    if content is not None:
        (out / name).write_text(content)
    assert analysis(["sweep", str(out)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and message in told, told


def test_a_sweep_without_a_command_is_shown_as_one(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = swept / "out"
    status = analysis(["sweep", str(out)])
    shown = capsys.readouterr().out
    assert analysis([str(out)]) == status
    assert capsys.readouterr().out == shown != ""
    assert analysis(["report", str(out)]) == 2
    assert f"{out}: is the --out of a sweep" in capsys.readouterr().err


def test_another_sweep_is_refused_in_a_directory_that_has_one(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = swept / "other.yaml"
    other.write_text(SWEEP.replace("repeats: 2", "repeats: 3"))
    assert sweep_main(["--out", str(swept / "out"), str(other)]) == 2
    assert "holds another sweep" in capsys.readouterr().err
    assert sweep_main(["--out", str(swept), str(other)]) == 2
    assert "is not empty, and holds no sweep" in capsys.readouterr().err


def test_a_failure_is_recorded_and_passed_over(tmp_path: Path) -> None:
    file, out = tmp_path / "broken.yaml", tmp_path / "out"
    file.write_text(BROKEN)
    done = subprocess.run(command(out, file), env=environment(), capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 1, done.stderr
    assert "FAILED: exit code 2: " in done.stderr and "--no-such-flag" in done.stderr
    found = [json.loads(content) for _, content in sorted(results(out).items())]
    assert [one["status"] for one in found] == ["failed", "ok"]
    page = (out / "report" / "ckpt_report.html").read_text()
    assert "--no-such-flag" in page and "The storage itself was not measured" in page
    part = [*command(out, file), "--engines", "lazy", "--no-report"]
    of_others = subprocess.run(part, env=environment(), capture_output=True, text=True, timeout=HANGS_S)
    assert of_others.returncode == 0, of_others.stderr
    assert "of the cells that were not asked for here, 1 failed before" in of_others.stderr
