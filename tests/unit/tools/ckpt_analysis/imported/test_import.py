"""Imported logs: what they say arrives, and nothing that they do not say."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tools.ckpt_analysis.upstream_log_factory import PARAMETERS, LogOptions, files_of, upstream_log
from tests.unit.tools.ckpt_plan.test_ckpt_plan import study_listing
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.commands.import_ import EXAMPLES
from tools.ckpt_analysis.common.errors import CouldNotRunError
from tools.ckpt_analysis.imported.file import read_run, write_run
from tools.ckpt_analysis.imported.formats import PROGRAMS
from tools.ckpt_analysis.imported.importer import EXPECTED, import_log
from tools.ckpt_analysis.imported.to_report import to_report
from tools.ckpt_analysis.ingest.discover import LogDirectoryError
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.model.imported_run import ImportedRun
from tools.ckpt_analysis.render.json_output import to_dict
from tools.ckpt_analysis.render.terminal import render
from tools.common.tables import Style


def imported(text: str, tmp_path: Path, world_size: int | None = None) -> ImportedRun:
    log = tmp_path / "train.log"
    log.write_text(text)
    return import_log(log, world_size)


def report_of(options: LogOptions, tmp_path: Path) -> dict[str, Any]:
    return to_dict(to_report(imported(upstream_log(options), tmp_path), tmp_path))


def notes(report: dict[str, Any]) -> str:
    assert {problem["kind"] for problem in report["problems"]} == {"imported"}
    return " ".join(problem["message"] for problem in report["problems"])


def test_saves_are_those_of_the_timers(tmp_path: Path) -> None:
    report = report_of(LogOptions(), tmp_path)
    assert [save["step"] for save in report["saves"]] == [1, 2, 3, 4, 5, 6]
    first = report["saves"][0]
    assert (first["tag"], first["engine"], first["outcome"]) == ("global_step1", "Torch", "ok")
    assert (first["ranks"], first["num_files"]) == (4, 10)
    assert first["blocked_s"] == first["wall"]["max_s"] == 2.0
    assert (first["wall"]["min_s"], first["wall"]["spread_s"]) == pytest.approx((1.9995, 0.0005))
    cycle = report["cycles"][0]
    assert (cycle["layout"], cycle["expected"]) == ({"tp": 2, "pp": 1, "dp": 2}, 4)
    assert cycle["versions"] == {"torch": "2.9.0+cu130", "deepspeed": "0.18.1+abc", "megatron-deepspeed": "feed123"}


def test_what_the_log_does_not_say_is_null_and_named(tmp_path: Path) -> None:
    report = report_of(LogOptions(), tmp_path)
    for save in report["saves"]:
        for key in ("bytes", "durable_s", "committed_s", "io_GBps", "blocked_GBps", "critical_rank"):
            assert save[key] is None, key
        assert (save["phases"], save["per_rank"]) == ({}, [])
        assert save["wall"]["median_s"] is None and save["wall"]["slowest_rank"] is None
    assert report["cycles"][0]["durability"] is None and report["cycles"][0]["hosts"] == []
    text = notes(report)
    assert "Not recorded: phases" in text and "bytes counted while writing" in text
    assert f"14 bytes for each of {PARAMETERS} parameters" in text


def test_waits_for_files_block_training_too(tmp_path: Path) -> None:
    report = report_of(LogOptions(engine="Snap", waits_s=[0.25, 3.5, 1.0, 0.5]), tmp_path)
    assert report["saves"][1]["blocked_s"] == pytest.approx(1.010 + 3.5)
    assert report["saves"][1]["drain_s"] is None
    last = report["saves"][-1]  # nothing was left to train when its files were waited for
    assert (last["blocked_s"], last["drain_s"]) == (pytest.approx(1.050), 3.5)
    assert "upper bound" in notes(report)


def test_a_save_that_was_cut_short_has_no_duration(tmp_path: Path) -> None:
    save = report_of(LogOptions(finish=False), tmp_path)["saves"][-1]
    assert (save["outcome"], save["wall"], save["blocked_s"], save["finished_ranks"]) == (
        "unfinished",
        None,
        None,
        None,
    )


def test_the_first_step_and_what_led_to_it(tmp_path: Path) -> None:
    (launch,) = report_of(LogOptions(), tmp_path)["launches"]
    assert launch["time_to_first_step_s"] == pytest.approx(9.5)
    assert launch["phases"]["data_build"]["max_s"] == pytest.approx(0.4)
    report = report_of(LogOptions(loads_step=40), tmp_path)
    (restart,) = report["restarts"]
    assert restart["resumed_step"] == 40 and restart["restart_s"] is None and restart["lost_steps"] is None
    (load,) = report["loads"]
    assert (load["tag"], load["load_s"], load["wall"]["min_s"]) == ("global_step40", 1.25075, 1.2005)


def test_steps_never_hold_a_save(tmp_path: Path) -> None:
    run = imported(upstream_log(), tmp_path)
    assert [step.seconds for step in to_report(run, tmp_path).steps] == [0.5] * 6
    # Megatron's own mean runs from one logged step to the next, over the save between: only the first is free of one.
    run = imported(upstream_log(LogOptions(deepspeed_iterations=False)), tmp_path)
    assert [(step.step, step.seconds) for step in to_report(run, tmp_path).steps] == [(1, pytest.approx(1.2))]


def listed(size: str, minute: str, kind: str = "-rw-r--r--") -> list[str]:
    names = [path.rsplit("/", 1)[1] for path in files_of(1, LogOptions())]
    return ["total 9.9G", *(f"{kind} 1 user group {size} Mar  1 {minute} {name}" for name in names)]


def test_a_listing_counts_files_and_bounds_their_bytes(tmp_path: Path) -> None:
    slow = [70_000.0] * 3  # minutes 12:00 to 12:01, 12:01 to 12:02 and 12:02 to 12:03
    run = imported(upstream_log(LogOptions(save_ms=slow, listing=listed("1.5K", "12:01"))), tmp_path)
    assert run.listing is not None
    assert (run.listing.files, run.listing.low_bytes, run.listing.high_bytes) == (10, 14_340, 15_360)
    assert run.listing.step is None  # two saves ran in that minute
    both = listed("1.5K", "12:00")[:4] + listed("1.5K", "12:01")[4:]
    run = imported(upstream_log(LogOptions(save_ms=slow, listing=both)), tmp_path)
    assert run.listing is not None and run.listing.step == 1
    assert "10 files, 14.3 kB to 15.4 kB as its sizes are rounded; the save of step 1" in notes(
        to_dict(to_report(run, tmp_path))
    )


def test_a_listing_with_directories_among_the_files_bounds_nothing(tmp_path: Path) -> None:
    mixed = [*listed("1.5K", "12:01")[:5], *listed("4.0K", "12:01", "drwxr-sr-x")[5:]]
    run = imported(upstream_log(LogOptions(listing=mixed)), tmp_path)
    assert run.listing is not None
    assert (run.listing.files, run.listing.directories, run.listing.low_bytes) == (4, 6, None)


def test_unrounded_sizes_are_exact(tmp_path: Path) -> None:
    run = imported(upstream_log(LogOptions(listing=listed("1536", "12:01"))), tmp_path)
    assert run.listing is not None
    assert (run.listing.low_bytes, run.listing.high_bytes) == (15_360, 15_360)
    assert "10 files, 15.4 kB; which save" in notes(to_dict(to_report(run, tmp_path)))


def test_hosts_are_those_of_the_launcher(tmp_path: Path) -> None:
    line = "[2026-03-01 12:00:00,000] [INFO] [launch.py:146:main] WORLD INFO DICT: {'n2': [0, 1], 'n1': [0, 1]}\n"
    run = imported(line + upstream_log(), tmp_path)
    assert run.launched.hosts == ["n1", "n2"]
    with pytest.raises(CouldNotRunError, match="number of ranks as 3, line 6 as 4"):
        imported(line.replace("[0, 1], 'n1'", "[0], 'n1'") + upstream_log(), tmp_path)


def test_directories_have_no_size_but_du_may(tmp_path: Path) -> None:
    listing = [*listed("4.0K", "12:01", "drwxr-sr-x"), "12K\t/scratch/run/x/a", "41G\t/scratch/run/x"]
    run = imported(upstream_log(LogOptions(listing=listing)), tmp_path)
    assert run.listing is not None
    assert (run.listing.files, run.listing.directories, run.listing.low_bytes) == (0, 10, None)
    assert run.listing.disk_usage_high == 41 * 1024**3 and run.listing.disk_usage_low == 40 * 1024**3 + 1
    without = imported(upstream_log(), tmp_path)
    assert without.listing is None
    assert "a listing of the checkpoint" in notes(to_dict(to_report(without, tmp_path)))
    fewer = imported(upstream_log(LogOptions(listing=listed("1.5K", "12:01")[:5])), tmp_path)
    assert "4 files where the engine was given 10 paths" in notes(to_dict(to_report(fewer, tmp_path)))


def statistics_lines(shards: int, step: int = 5) -> str:
    lines = [
        "stats = " + repr({"close": 1, "write": 7, "bytes": 1000 + dp, "write_secs": 0.5 + dp, "write_GB/s": 1.0,
                           "path": f"/ckpt/global_step{step}/bf16_zero_pp_rank_{dp}_mp_rank_00_optim_states.pt"})
        for dp in range(shards)
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def test_fastpersist_statistics_count_bytes(tmp_path: Path) -> None:
    run = imported(statistics_lines(4) + statistics_lines(4, step=9), tmp_path, world_size=4)
    assert [(save.step, save.bytes, save.num_files) for save in run.saves] == [(5, 4006, 4), (9, 4006, 4)]
    assert run.saves[0].slowest_file == "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"
    assert run.saves[0].slowest_file_s == 3.5
    report = to_dict(to_report(run, tmp_path))
    assert [(save["outcome"], save["bytes"], save["wall"]) for save in report["saves"]] == [("ok", 4006, None)] * 2
    # Statistics of three ranks of four are not the bytes of the save.
    partial = imported(statistics_lines(3), tmp_path, world_size=4)
    assert (partial.saves[0].bytes, partial.saves[0].num_files, partial.saves[0].completed) == (None, None, False)


def test_the_statistics_are_those_that_deepspeed_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own writer, closed and asked for them as its checkpoint engine does it."""
    from deepspeed.io import PyFileWriter

    path = tmp_path / "global_step7" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    path.parent.mkdir()
    writer = PyFileWriter(str(path))
    writer.write(b"x" * 1000)
    writer.write(b"y" * 24)
    writer.close()
    writer._dump_state()
    (save,) = imported(capsys.readouterr().out, tmp_path, world_size=1).saves
    assert (save.step, save.bytes, save.slowest_file) == (7, path.stat().st_size, path.name)
    assert save.slowest_file_s is not None and save.slowest_file_s > 0


def test_bytes_of_fastpersist_and_the_timer_give_the_throughput(tmp_path: Path) -> None:
    log = upstream_log(LogOptions(file_calls=False, save_ms=[2000.0]))
    shards = [path for path in files_of(1, LogOptions()) if "optim" in path]
    stats = "".join(f"stats = {{'bytes': 500000000, 'write_secs': 0.25, 'path': {path!r}}}\n" for path in shards)
    (save,) = to_dict(to_report(imported(log + stats, tmp_path), tmp_path))["saves"]
    assert (save["bytes"], save["num_files"]) == (2_000_000_000, 4)
    assert save["blocked_GBps"] == pytest.approx(1.0)


def test_every_reader_takes_an_imported_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text(upstream_log())
    assert main(["import", str(log)]) == 0
    directory = tmp_path / "train-imported"
    assert f"{directory / 'imported.json'}: 6 saves, 1 loads, 6 iterations on 4 ranks" in capsys.readouterr().out
    assert main(["--all", str(directory)]) == 0
    text = capsys.readouterr().out
    assert "TP2 PP1 DP2, 4 ranks on hosts not recorded" in text and "blocked training for 1.050 s" in text
    assert "None" not in text and "coverage not recorded" in text
    assert main(["--strict", "--format", "json", str(directory)]) == 0  # notes do not count
    assert len(json.loads(capsys.readouterr().out)["saves"]) == 6
    with pytest.raises(LogDirectoryError, match="imported run has operations and no spans"):
        load_trace(directory)


def test_the_file_holds_the_whole_run(tmp_path: Path) -> None:
    options = LogOptions(waits_s=[0.1, 0.2], loads_step=3, listing=listed("1.5K", "12:01"))
    run = imported(upstream_log(options), tmp_path)
    write_run(run, tmp_path / "out")
    assert read_run(tmp_path / "out") == run
    assert import_log(tmp_path / "train.log").run_id == run.run_id  # the content's, not the moment's


def test_an_earlier_import_or_a_trace_is_not_overwritten(tmp_path: Path) -> None:
    run = imported(upstream_log(), tmp_path)
    write_run(run, tmp_path / "out")
    with pytest.raises(CouldNotRunError, match="--force"):
        write_run(run, tmp_path / "out")
    write_run(run, tmp_path / "out", force=True)
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "rank_00000_cycle_000.jsonl").touch()
    with pytest.raises(CouldNotRunError, match="holds the trace of a run"):
        write_run(run, tmp_path / "trace", force=True)


BAD_LOGS = {
    "empty": (b"", "is empty"),
    "something else": (b"2026-03-01 GET /index.html 200\n" * 50, "has no line that is known"),
    "binary": (bytes(range(256)) * 40, "has no line that is known"),
    "no newline": (b"\x00" * 3_000_000, "has no line that is known"),
    "one word": (b"a" * 3_000_000, "has no line that is known"),
    "only versions": (b"torch version .................... 2.9.0\n", "has no save, no load and no iteration"),
    "no ranks": (b"saving checkpoint at iteration       1 to /x\n", "give --world-size N"),
    "layout": (upstream_log(LogOptions(pp=2)).encode(), "= 8 ranks, but there are 4"),
    "two launches": ((upstream_log() + upstream_log()).encode(), "several launches, at lines 5 and"),
    "two world sizes": (
        upstream_log().replace("  world_size ......", "  world_size .... 8\n  world_size .").encode(),
        "line 5 gives the number of ranks as 4, line 9 as 8",
    ),
}


@pytest.mark.parametrize("name", BAD_LOGS)
def test_bad_logs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, message = BAD_LOGS[name]
    log = tmp_path / "bad.log"
    log.write_bytes(content)
    assert main(["import", str(log)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and str(log) in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
    assert not (tmp_path / "bad-imported").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["missing.log"], "missing.log: cannot be read: No such file or directory"),
        (["."], "is a directory"),
        (["good.log", "--world-size", "0"], "--world-size 0: give a number of ranks"),
        (["good.log", "--world-size", "8"], "--world-size 8: line 5 of the log says 4"),
        (["good.log", "-o", "good.log/x"], "cannot be written: Not a directory"),
    ],
)
def test_bad_flags(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("good.log").write_text(upstream_log())
    assert main(["import", *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged (not JSON)"),
        ("{}", "is not the file of an imported run"),
        ('{"format": "ckpt_analysis_import", "version": 2}', "has version 2; this tool reads version 3"),
        ('{"format": "ckpt_analysis_import", "version": 3}', "is damaged (field source is missing)"),
    ],
)
def test_damaged_imports(content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "imported.json").write_text(content)
    assert main([str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1


class TestALogOfTheStudysSize:
    """30 saves on 4 ranks, of 132 files each, and a listing; by an engine that waits and one that does not."""

    options = LogOptions(tp=4, dp=1, layers=32, save_ms=[60_000.0] + [15_000.0 + 40 * n for n in range(29)])

    def test_torch(self, tmp_path: Path) -> None:
        listing = study_listing().replace("Oct  1 01:52", "Mar  1 12:00").splitlines()
        run = imported(upstream_log(replace(self.options, listing=listing)), tmp_path)
        assert (run.launched.world_size, run.launched.layout) == (4, {"tp": 4, "pp": 1, "dp": 1})
        assert (run.engine, run.parameters, len(run.saves)) == ("Torch", PARAMETERS, 30)
        calls = [save.call.max_s for save in run.saves if save.call]
        assert calls == pytest.approx([60.0] + [15.0 + 0.04 * n for n in range(29)])
        assert {save.num_files for save in run.saves} == {132} and all(save.completed for save in run.saves)
        assert run.listing is not None and run.listing.files == 132
        assert run.listing.low_bytes is not None and run.listing.high_bytes is not None
        assert 43.5e9 < run.listing.low_bytes < run.listing.high_bytes < 44.5e9
        assert run.listing.step == 1  # by the files' times, the first save and not the last
        text = render(to_report(run, tmp_path), Style(io.StringIO()), show_all=True)
        assert "TP4 PP1 DP1, 4 ranks on hosts not recorded" in text and "132 files" in text

    def test_torchsnapshot(self, tmp_path: Path) -> None:
        directories = study_listing().replace("-rw-r--r-- 1", "drwxr-xr-x 2").replace("Oct  1", "Mar  1")
        options = replace(
            self.options, engine="TorchSnapshot", waits_s=[3.0, 3.1, 3.075694, 2.9], listing=directories.splitlines()
        )
        run = imported(upstream_log(options), tmp_path)
        assert (run.engine, len(run.saves)) == ("TorchSnapshot", 30)
        assert run.listing is not None
        assert (run.listing.files, run.listing.directories, run.listing.low_bytes) == (0, 132, None)
        waits = [save.wait.max_s for save in run.saves if save.wait]
        assert waits == [3.1] * 29
        assert run.saves[-1].drain is not None and run.saves[-1].drain.max_s == 3.1


def test_texts_for_users_name_whose_logs_can_be_read() -> None:
    docs = Path(__file__).resolve().parents[5] / "docs"
    texts = {"EXPECTED": EXPECTED, "EXAMPLES": EXAMPLES}
    texts |= {page: (docs / page).read_text() for page in ("importing.md", "guides/trace_your_job.md")}
    for program in PROGRAMS:
        assert [name for name, text in texts.items() if program not in text] == [], f"these do not name {program}"
