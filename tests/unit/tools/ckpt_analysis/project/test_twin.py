"""Predictions for another place: costs whose truth is known, what cannot be known, and the command on traces."""

from __future__ import annotations

import csv
import io
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.tools.ckpt_analysis import trace_factory
from tests.unit.tools.ckpt_analysis.trace_factory import Options, write_trace
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.common.errors import CouldNotRunError
from tools.ckpt_analysis.model.run_info import cycles_imported_once
from tools.ckpt_analysis.project.costs import choose_hidden, learn
from tools.ckpt_analysis.project.drills import Deployment, Drill
from tools.ckpt_analysis.project.twin import Predicted, predict

pytestmark = pytest.mark.slow  # each analyses whole traces

SIZES = ((2, 8e6), (4, 8e6), (4, 32e6), (8, 8e6), (8, 32e6), (16, 8e6))
TP = {(4, 8e6): 2, (8, 8e6): 8, (8, 32e6): 2, (16, 8e6): 4}  # of these sizes; the others have 1
FAR = Deployment(ranks=64, hosts=1, cores=2, bytes=128e6, files=128, tp=16)


def truth(deployment: Deployment, hidden: float = 0.0) -> dict[str, dict[str, float]]:
    """Costs that the terms can express: what a fit must find. `hidden` ranks per core cost nothing."""
    crowd = max(deployment.ranks / deployment.cores - hidden, 0.0)
    rounds = deployment.ranks / deployment.cores * math.log2(deployment.ranks)
    return {
        "blocked_s": {"serialize": 0.01 + 0.02 * crowd + 4e-9 * deployment.bytes},
        "durable_s": {"flush": 0.05 + 0.03 * crowd, "commit": 0.01 + 0.001 * deployment.files},
        "load_s": {"load": 0.02 + 3e-9 * deployment.bytes, "barrier": 0.01 * rounds},
        "restart_s": {
            "imports": 1.7,
            "first_step": 0.2 * crowd + 0.3 * (deployment.tp - 1),
            "rendezvous": 0.0005 * deployment.ranks**2 / deployment.cores,
            "communicators": 0.01 * rounds,
        },
    }


def drill(
    ranks: int, num_bytes: float, noise: random.Random | None = None, engine: str = "lazy", hidden: float = 0.0
) -> Drill:
    tp = TP.get((ranks, num_bytes), 1)
    deployment = Deployment(ranks=ranks, hosts=1, cores=2, bytes=num_bytes, files=2 * ranks, tp=tp)
    seconds = {
        quantity: {part: took * (noise.uniform(0.97, 1.03) if noise else 1.0) for part, took in parts.items()}
        for quantity, parts in truth(deployment, hidden).items()
    }
    return Drill(f"{ranks}", engine, deployment, seconds)


def exact_drills(hidden: float = 0.0) -> list[Drill]:
    return [drill(ranks, num_bytes, hidden=hidden) for ranks, num_bytes in SIZES]


@pytest.mark.parametrize("hidden", [0.0, 1.0, 3.0])
def test_finds_costs_that_are_sums_of_the_terms(hidden: float) -> None:
    prediction = predict(exact_drills(hidden), FAR)
    assert prediction.hidden == hidden
    for entry in prediction.predicted:
        parts = truth(FAR, hidden)[entry.quantity]
        assert entry.seconds == pytest.approx(sum(parts.values()), rel=1e-6)
        assert entry.parts == pytest.approx(parts, rel=1e-6)
        assert sum(entry.parts.values()) == pytest.approx(entry.seconds)
        assert entry.low == pytest.approx(entry.high, rel=1e-5)  # every drill lies on the fit
        assert entry.error == pytest.approx(0, abs=1e-6)


def test_the_terms_are_those_that_the_drills_need() -> None:
    needed = {quantity: learn(quantity, exact_drills(), 0.0).terms for quantity in truth(FAR)}
    assert needed["blocked_s"] == ["start", "ranks per core", "bytes"]
    assert needed["durable_s"] == ["start", "ranks per core", "files"]
    assert needed["restart_s"] == [
        "start", "ranks per core", "ranks per core x log2(ranks)", "pairs of ranks per core",
        "hops around a tensor-parallel ring",
    ]  # fmt: skip


def test_noise_does_not_hide_how_many_ranks_share_a_core_for_nothing() -> None:
    source = random.Random(3)
    for hidden in (0.0, 3.0):
        noisy = [drill(ranks, num_bytes, source, hidden=hidden) for ranks, num_bytes in SIZES for _ in range(3)]
        assert choose_hidden(dict.fromkeys(truth(FAR), noisy)) == hidden


def test_the_interval_covers_what_comes_from_the_same_costs() -> None:
    source = random.Random(7)
    near = Deployment(ranks=8, hosts=1, cores=2, bytes=16e6, files=16)
    covered = asked = 0
    for _ in range(40):
        noisy = [drill(ranks, num_bytes, source) for ranks, num_bytes in SIZES for _ in range(2)]
        for entry in predict(noisy, near).predicted:
            another = sum(drill(8, 16e6, source).seconds[entry.quantity].values())
            covered += entry.low <= another <= entry.high
            asked += 1
            assert entry.low <= entry.seconds <= entry.high
    assert covered / asked >= 1 - 2 / (len(SIZES) + 1)  # what jackknife+ promises of as many layouts


def test_no_cost_falls_below_nothing() -> None:
    """A part that shrinks with the ranks is not continued below 0."""
    shrinking = [
        Drill(str(ranks), "lazy", Deployment(ranks, 1, 2, 8e6, ranks), {"restart_s": {"imports": 4.0 - 0.4 * ranks}})
        for ranks in (2, 4, 8)
    ]
    (entry,) = predict(shrinking, FAR).predicted
    assert 0 < entry.low <= entry.high


def test_names_what_was_in_no_trace() -> None:
    told = predict(exact_drills(), FAR).not_in_traces
    assert [sentence.split(":")[0] for sentence in told] == [
        "ranks 64", "ranks per core 32", "bytes 1.28e+08", "files 128", "tp 16",
    ]  # fmt: skip
    assert all("times the most" in sentence for sentence in told)
    many_files = predict(exact_drills(), Deployment(ranks=8, hosts=1, cores=2, bytes=8e6, files=30)).not_in_traces
    together = "in all traces they go together, and what either costs counts as the latter"
    assert many_files == [f"files per core apart from ranks per core: {together}"]
    elsewhere = predict(exact_drills(), Deployment(ranks=8, hosts=4, cores=8, bytes=8e6, files=16)).not_in_traces
    assert [sentence.split(":")[0] for sentence in elsewhere] == ["hosts 4", "cores 8"]
    assert predict(exact_drills(), Deployment(ranks=4, hosts=1, cores=2, bytes=16e6, files=8)).not_in_traces == []


def test_the_storage_ceiling_is_a_floor_of_the_time() -> None:
    slow = {name: entry for name, entry in by_name(ceilings={"write_GBps": 0.01, "read_GBps": 0.02}).items()}
    free = by_name()
    assert slow["durable_s"].seconds == slow["durable_s"].floor_s == pytest.approx(12.8)
    assert slow["load_s"].seconds == pytest.approx(6.4)
    assert slow["restart_s"].seconds - free["restart_s"].seconds == pytest.approx(6.4 - free["load_s"].seconds)
    assert slow["blocked_s"] == free["blocked_s"]
    fast = by_name(ceilings={"write_GBps": 1e3, "read_GBps": 1e3})
    assert fast == free
    for entry in slow.values():
        assert entry.low <= entry.seconds <= entry.high and sum(entry.parts.values()) == pytest.approx(entry.seconds)


def by_name(ceilings: dict[str, float] | None = None, factors: dict[str, float] | None = None) -> dict[str, Predicted]:
    prediction = predict(exact_drills(), FAR, ceilings=ceilings, factors=factors)
    return {entry.quantity: entry for entry in prediction.predicted}


def test_a_phase_that_takes_half() -> None:
    whole, half = by_name()["restart_s"], by_name(factors={"imports": 0.5})["restart_s"]
    assert whole.seconds - half.seconds == pytest.approx(1.7 / 2)
    assert half.parts["first_step"] == whole.parts["first_step"]
    with pytest.raises(CouldNotRunError, match="cuda_context"):
        by_name(factors={"cuda_context": 0.5})
    fast = by_name(factors={"serialize": 0.5})["blocked_s"]
    assert fast.seconds == pytest.approx(by_name()["blocked_s"].seconds / 2)  # it has no other part here


def test_engines_are_learnt_apart() -> None:
    both = [*exact_drills(), *(drill(ranks, size, engine="torch") for ranks, size in SIZES)]
    with pytest.raises(CouldNotRunError, match="lazy, torch"):
        predict(both, FAR)
    assert predict(both, FAR, "torch").drills == both[len(SIZES) :]
    with pytest.raises(CouldNotRunError, match="dcp.*lazy, torch"):
        predict(both, FAR, "dcp")


def test_imports_are_done_once_where_the_launcher_does_them() -> None:
    """Noise in what every drill does once is not taken for growth."""
    noisy = [replace(drill(ranks, size), imported_once=True) for ranks, size in SIZES]
    for entry, took in zip(noisy, (1.5, 1.6, 1.7, 1.9, 2.2, 2.4), strict=True):
        entry.seconds["restart_s"]["imports"] = took
    once = {entry.quantity: entry for entry in predict(noisy, FAR).predicted}["restart_s"].parts["imports"]
    assert 1.5 < once < 2.4
    each = [replace(entry, imported_once=False) for entry in noisy]
    assert {entry.quantity: entry for entry in predict(each, FAR).predicted}["restart_s"].parts["imports"] > 4
    with pytest.raises(CouldNotRunError, match="launcher"):
        predict([*noisy, each[0]], FAR)


def test_ranks_that_are_restarted_in_place_import_nothing_again() -> None:
    """The launcher tells only the ranks of its first start when it imported."""
    first = {"RESTART_TRACE_PRELOAD": "1:2:3"}
    named = {"RESTART_TRACE_LAUNCH_ID": "a"}
    ranks = [
        {"cycle": cycle, "environment": environment}
        for cycle, environment in enumerate((first | named, named, {"RESTART_TRACE_LAUNCH_ID": "b"}, first, {}))
    ]
    assert cycles_imported_once(ranks) == {0, 1, 3}
    assert cycles_imported_once([*ranks, {"cycle": 1, "environment": {}}]) == {0, 3}, "all ranks of a cycle"


def test_two_sizes_are_too_few() -> None:
    with pytest.raises(CouldNotRunError, match=r"2, 4 ranks.*3 different"):
        predict([drill(2, 8e6), drill(4, 8e6), drill(4, 8e6)], FAR)


# The command.


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Traces of 2, 4 and 8 ranks on 2 cores."""
    deployment = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        for ranks in (2, 4, 8):
            patch.setattr(trace_factory, "RANKS", ranks)
            write_trace(deployment / str(ranks), Options(cores="0-1"))
    return [str(deployment / str(ranks)) for ranks in (2, 4, 8)]


ELSEWHERE = ["--ranks", "16", "--checkpoint-bytes", "2e6", "--checkpoint-files", "32", "--no-cache"]


def test_learns_from_traces(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["project", *runs, *ELSEWHERE, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "prediction" and found["engine"] == "torch"
    assert found["deployment"] == {"ranks": 16, "hosts": 1, "cores": 2, "bytes": 2e6, "files": 32, "tp": 2}
    predicted = {entry["quantity"]: entry for entry in found["predicted"]}
    assert list(predicted) == ["blocked_s", "durable_s", "load_s", "restart_s"]
    # 3.0 s on every rank of every run, but 3.5 on rank 2, which the two larger runs have.
    assert 3.0 <= predicted["restart_s"]["parts"]["imports"] < 4.5
    assert found["not_in_traces"][0].startswith("ranks 16: the traces have 2 to 8")
    for name in ("table", "markdown"):
        assert main(["project", *runs, *ELSEWHERE, "--format", name]) == 0
        text = capsys.readouterr().out
        assert "nothing below was measured; extrapolated from 8 to 16 ranks" in text and "ranks 16" in text
        assert "is to be relied on" not in text
    assert main(["project", *runs, *ELSEWHERE, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    whole = next(row for row in rows if row["quantity"] == "restart_s" and not row["part"])
    parts = [float(row["seconds"]) for row in rows if row["quantity"] == "restart_s" and row["part"]]
    assert float(whole["seconds"]) == pytest.approx(sum(parts))


def test_more_than_twenty_times_what_ran_is_called_so_in_the_headline(
    runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--ranks", "16", "--checkpoint-bytes", "2e12", "--checkpoint-files", "32", "--no-cache"]
    assert main(["project", *runs, *words]) == 0
    title = " ".join(capsys.readouterr().out.partition("\n\n")[0].split())
    assert "extrapolated from 8 to 16 ranks, from" in title and "to 2e+12 bytes; beyond 20 times what ran" in title


def test_takes_ranks_bytes_and_files_from_a_plan(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [{"name": f"{rank}.pt", "bytes": 1000 * rank, "rank": rank} for rank in range(8)]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"engine": "torch", "layout": {"tp": 2, "pp": 2, "dp": 2}, "files": files}))
    assert main(["project", *runs, "--plan", str(plan), "--format", "json", "--no-cache"]) == 0
    deployment = json.loads(capsys.readouterr().out)["deployment"]
    assert (deployment["ranks"], deployment["bytes"], deployment["files"]) == (8, 28000, 8)
    plan.write_text('{"engine": "torch"}')
    assert main(["project", *runs, "--plan", str(plan), "--no-cache"]) == 2
    assert "plan.json: not what `ckpt-plan --format json` writes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--ranks", "16", "--checkpoint-bytes", "1e6"], ["--checkpoint-files is missing"]),
        ([*ELSEWHERE, "--tp", "0"], ["--tp 0"]),
        (["--ranks", "0", "--checkpoint-bytes", "1e6", "--checkpoint-files", "8"], ["--ranks 0"]),
        ([*ELSEWHERE, "--engine", "lazy"], ["--engine lazy", "torch"]),
        ([*ELSEWHERE, "--write-GBps", "0"], ["--write-GBps 0"]),
        ([*ELSEWHERE, "--what-if", "import=0.5"], ["'import'", "imports"]),
        ([*ELSEWHERE, "--mtbf-hours", "9"], ["--mtbf-hours", "--ranks"]),
        (["--what-if", "imports=0.5", "--no-cache"], ["give one"]),
        (["--nodes", "8", "--mtbf-hours", "9", "--no-cache"], ["give one"]),
    ],
)
def test_names_what_cannot_be(
    runs: list[str], words: list[str], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["project", *runs, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert all(name in captured.err for name in names), captured.err


def test_a_run_without_its_cores_teaches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "run")
    assert main(["project", str(tmp_path / "run"), *ELSEWHERE]) == 2
    assert "run: the cores that its ranks may use is not recorded" in capsys.readouterr().err
