"""The JSON of replays in `compare` and `project`: each engine by itself, and engines by storage."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tools.ckpt_replay.replay_helpers import figures, samples
from tools.ckpt_analysis.cli import main


def replay(path: Path, directory: str = "/scratch", lazy_durable: float = 1.0, **changes: Any) -> str:
    """What `ckpt-replay --output PATH` writes, of two ranks of TP8 PP8, engines torch and lazy, five repeats."""
    limit = changes.pop("limit_bytes", None)
    found = figures(samples(lazy_durable), limit_bytes=limit) | {"directory": directory} | changes
    path.write_text(json.dumps(found))
    return str(path)


def compared(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["compare", "--format", "json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_engines_of_a_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(capsys, replay(tmp_path / "disk.json"))
    assert [variant["name"] for variant in found["variants"]] == ["torch", "lazy"]
    rows = {row["name"]: [cell["median"] for cell in row["cells"]] for row in found["rows"]}
    assert rows["blocked_s"] == pytest.approx([8.8, 0.011]) and rows["durable_s"] == pytest.approx([8.8, 1.1])
    assert rows["load_cold_s"] == pytest.approx([4.4, 1.1]) and rows["load_warm_s"] == [2.0, 0.5]
    assert rows["save_bytes"] == [2000, 2000]
    assert "total_blocked_s" not in rows and "load_s" not in rows
    row = next(row for row in found["rows"] if row["name"] == "durable_s")
    assert [len(cell["values"]) for cell in row["cells"]] == [5, 5]  # the replay has warmed up before
    assert "lazy blocks training 800 times shorter than torch" in found["verdict"]
    assert main([str(tmp_path / "disk.json")]) == 0  # without a command
    assert capsys.readouterr().out.startswith("lazy blocks training")


def test_engines_by_storage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [replay(tmp_path / "disk.json"), replay(tmp_path / "shm.json", "/dev/shm", 0.1)]
    page = tmp_path / "page.html"
    assert main(["compare", *words, "-o", str(page)]) == 0
    table = capsys.readouterr().out
    rows = [line.split() for line in table.splitlines() if line.split()[:1] == ["durable_s"]]
    assert rows == [
        ["durable_s", "torch", "8.8", "(5)", "8.8", "(5)"],
        ["durable_s", "lazy", "1.1", "(5)", "0.11", "(5)"],
    ]
    verdict = " ".join(table.partition("\n\n")[0].split())
    assert verdict.startswith(
        "/scratch (ext4): lazy blocks training 800 times shorter than torch; lazy is durable 8.0 "
    )
    assert "/dev/shm (ext4): lazy blocks training 800 times shorter than torch; lazy is durable 80 times" in verdict
    assert "Times by storage: less is better" in page.read_text()
    assert re.findall(r'<div class="label">\s*<p>(.*?)</p>', page.read_text()) == [
        "all runs: a replay of 2 of 64 ranks"
    ]
    assert main(["compare", "--format", "markdown", *words]) == 0
    assert "| durable_s | lazy | 1.1 (5) | 0.11 (5) |" in capsys.readouterr().out
    undurable = [replay(tmp_path / f"{place}.json", place) for place in ("a", "b")]
    for path in map(Path, undurable):
        content = json.loads(path.read_text())
        content["options"]["checkpoint_durability"] = "none"
        path.write_text(json.dumps(content))
    assert main(["compare", *undurable]) == 0
    assert "committed_s" in capsys.readouterr().out
    other = replay(tmp_path / "other.json", "/other", model="7b")
    assert main(["compare", words[0], other]) == 0
    assert "Engines by storage" not in capsys.readouterr().out  # the model is another one, too


@pytest.mark.parametrize(
    "changes",
    [
        {"limit_bytes": 100 << 20}, {"sharding": "none"}, {"machine": {"processors": 64}},
        {"options": {"io_threads": 8}}, {"options": {"checkpoint_durability": "none"}},
        {"layout": {"tp": 8, "pp": 8, "dp": 2}},
    ],
    ids=lambda changes: str(next(iter(changes))),
)  # fmt: skip
def test_nothing_else_may_differ_in_a_table_by_storage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    """Then it is an ordinary comparison, which says what differs."""
    disk, shm = replay(tmp_path / "disk.json"), tmp_path / "shm.json"
    nested = {key: value for key, value in changes.items() if key in ("machine", "options")}
    content = json.loads(
        Path(replay(shm, "/dev/shm", **{k: v for k, v in changes.items() if k not in nested})).read_text()
    )
    for key, value in nested.items():
        content[key] |= value
    shm.write_text(json.dumps(content))
    assert main(["compare", disk, str(shm)]) == 0
    assert "Engines by storage" not in capsys.readouterr().out
    differing = compared(capsys, disk, str(shm))["differing"]
    (key, value), *_ = changes.items()
    names = {"limit_bytes": "label", "layout": "layout"}
    of_options = {"checkpoint_durability": "durability"}
    name = names.get(key, key) if not isinstance(value, dict) or key == "layout" else next(iter(value))
    assert {of_options.get(name, name), "storage"} <= differing.keys()


def test_replays_of_one_name_that_differ_in_size_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replay(tmp_path / "small.json", limit_bytes=100 << 20)
    assert main(["compare", f"one={replay(tmp_path / 'disk.json')}", f"one={small}"]) == 2
    error = capsys.readouterr().err
    assert "one: runs of one name are repeats of each other, and these replays differ in label: " in error


def test_replays_of_one_name_are_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"disk={replay(tmp_path / f'{index}.json')}" for index in range(3)]
    found = compared(capsys, *words)
    assert found["repeats"] == "runs" and [variant["name"] for variant in found["variants"]] == ["torch", "lazy"]
    assert [len(variant["directories"]) for variant in found["variants"]] == [3, 3]


@pytest.mark.parametrize(("hosts", "said"), [(4, {"ran": 4, "times": 2}), (1, {"ran": 1, "times": 8}), (None, None)])
def test_a_projection_starts_from_the_hosts_of_the_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hosts: int | None, said: dict[str, int] | None
) -> None:
    path = tmp_path / "disk.json"
    replay(path)
    content = json.loads(path.read_text())
    assert content.pop("hosts") == 1
    path.write_text(json.dumps(content | ({} if hosts is None else {"hosts": hosts})))
    words = ["project", str(path), "--engine", "lazy", "--nodes", "8", "--mtbf-hours", "1000", "--format", "json"]
    assert main([*words, "--restart-seconds", "1", "--step-seconds", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    row = {"unit": "nodes", "asked": 8, "too_far": False}
    assert found["extrapolated"] == ([] if said is None else [row | said])
    assert {row["times_what_ran"] for row in found["rows"]} == {None if said is None else said["times"]}


@pytest.mark.parametrize("hosts", [0, -1, "two", 1.5])
def test_hosts_that_are_no_number_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hosts: object
) -> None:
    assert main(["compare", replay(tmp_path / "disk.json", hosts=hosts)]) == 2
    assert f"is not as ckpt-replay writes it: ValueError({f'{hosts!r} hosts'!r})" in capsys.readouterr().err


def test_what_failed_or_was_not_durable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "disk.json"
    replay(path)
    content = json.loads(path.read_text())
    content["engines"]["torch"]["failed"] = "no space left"
    content["options"]["checkpoint_durability"] = "none"
    path.write_text(json.dumps(content))
    assert main(["report", str(path), replay(tmp_path / "whole.json"), "--strict"]) == 1
    assert capsys.readouterr().out.count(": engine torch failed: no space left") == 1
    found = compared(capsys, str(path))
    rows = {row["name"]: [cell["median"] for cell in row["cells"]] for row in found["rows"]}
    assert rows["committed_s"] == [None, pytest.approx(1.1)] and "durable_s" not in rows
    assert rows["load_cold_s"] == [None, pytest.approx(1.1)]
    assert any("1 of 1 saves did not end well" in note for note in found["notes"])


def test_a_gap_in_a_table_by_storage_has_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [replay(tmp_path / f"{place}.json", f"/{place}") for place in ("disk", "shm")]
    for path in map(Path, words):
        content = json.loads(path.read_text())
        lazy = content["engines"]["lazy"]
        lazy["in_memory_s"], lazy["durable_s"] = lazy["durable_s"], None
        if path.stem == "shm":
            for engine in content["engines"].values():
                engine["load_cold_s"], engine["not_measured"] = None, {"load_cold_s": "tmpfs is its own page cache"}
        path.write_text(json.dumps(content))
    assert main(["compare", *words]) == 0
    table = capsys.readouterr().out
    rows = [line.split() for line in table.splitlines() if line.split()[:1] == ["in_memory_s"]]
    assert rows == [["in_memory_s", "lazy", "1.1", "(5)", "1.1", "(5)"]]
    notes = " ".join(table.split())
    assert "No load_cold_s of C and D: tmpfs is its own page cache." in notes
    assert "No durable_s of B and D: its saves are in memory alone: see in_memory_s." in notes


def test_project_takes_whole_ranks_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question = ["--nodes", "8", "--mtbf-hours", "9", "--restart-seconds", "90", "--step-seconds", "8"]
    question += ["--format", "json", "--engine", "lazy"]
    assert main(["project", replay(tmp_path / "whole.json"), *question]) == 0
    inputs = json.loads(capsys.readouterr().out)["inputs"]
    assert inputs["durable_s"]["value"] == pytest.approx(1.1)
    assert inputs["blocked_s"]["note"] == "median of 5 saves (blocked_s, slowest rank; a replay of 2 of 64 ranks)"
    assert inputs["checkpoint_bytes"] is None  # those of two ranks are none of a checkpoint
    share = replay(tmp_path / "share.json", limit_bytes=10**9)
    assert main(["project", share, *question]) == 2
    assert "its saves are of 50 % of a rank's bytes (--limit-bytes)" in capsys.readouterr().err
    assert main(["project", share, *question, "--blocked-seconds", "1", "--durable-seconds", "9"]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "is not the JSON of a replay"),
        ('{"variants": []}', "is not the JSON of a replay"),
        (
            '{"engines": {"a": 1}, "layout": {}, "bytes_per_rank": 1, "machine": {}, "steps": {}}',
            "is not as ckpt-replay",
        ),
    ],
)
def test_other_json(content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text(content)
    assert main(["compare", str(tmp_path / "x.json")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "x.json" in captured.err and captured.out == ""


def test_a_sample_that_is_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(replay(tmp_path / "x.json"))
    path.write_text(path.read_text().replace("8.8", "-8.8"))
    assert main(["compare", str(path)]) == 2
    assert "is not as ckpt-replay writes it" in capsys.readouterr().err


def test_flags_of_traces_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", replay(tmp_path / "x.json"), "--run-id", "a"]) == 2
    assert "--run-id: applies to single traces, not to a sweep or a replay's JSON" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["report"], ["summary"], ["goodput"], ["project", "--what-if", "barrier=0.5"]])
def test_commands_for_traces_name_those_that_take_a_replay(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = replay(tmp_path / "disk.json")
    assert main([*command, path]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert f"ckpt-analysis: {path}: is no directory of a trace" in said
    assert f"`ckpt-analysis compare {path}`" in said and f"`ckpt-analysis project --nodes N {path}`" in said


def test_a_flag_may_stand_before_a_replay_without_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--all", replay(tmp_path / "disk.json")]) == 0
    assert "lazy blocks training 800 times shorter than torch" in " ".join(capsys.readouterr().out.split())


def test_a_replay_of_one_engine_needs_a_second_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(replay(tmp_path / "disk.json"))
    content = json.loads(path.read_text())
    del content["engines"]["torch"]
    path.write_text(json.dumps(content))
    assert main([str(path)]) == 2
    assert "disk.json: is a replay of one engine; give a second one to compare it with" in capsys.readouterr().err


def test_object_storage_has_no_file_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = figures(samples(1.0))["machine"] | {"filesystem": None}
    words = [replay(tmp_path / "store.json", "s3://bucket/prefix", machine=machine), replay(tmp_path / "disk.json")]
    assert main(["compare", *words]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "s3://bucket/prefix: lazy blocks training" in told and "None" not in told
