"""What a start would take with other phases: the replay against starts worked out by hand, and against the trace."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from restart_trace.schema import RANK_FILE_PATTERN
from tests.unit.tools.ckpt_analysis import trace_factory
from tests.unit.tools.ckpt_analysis.trace_factory import Options, RankLog, dump, write_trace
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.project.what_if import Answer, of_save, of_start, parse_factors, what_if
from tools.ckpt_analysis.report import analyse

pytestmark = pytest.mark.slow  # each analyses whole traces


def ask(directory: Path, **factors: float) -> Answer:
    """The answer for the last start of a trace."""
    analysis = analyse(load_trace(directory))
    answer, _ = of_start(analysis.frames, analysis.report.starts[-1], factors)
    assert answer is not None
    assert sum(answer.new_path.values()) == pytest.approx(answer.new_s, abs=1e-9)
    return answer


def test_without_factors_it_is_the_measured_start(tmp_path: Path) -> None:
    for number, options in enumerate(
        (Options(), Options(hosts=2), Options(load_inside_engine_init=True), Options(supervisor=False))
    ):
        analysis = analyse(load_trace(write_trace(tmp_path / str(number), options)))
        for start in analysis.report.starts:
            answer, _ = of_start(analysis.frames, start, {})
            assert answer is not None and start.wall is not None
            assert answer.new_s == answer.measured_s and answer.new_path == answer.path
            assert sum(answer.path.values()) == pytest.approx(answer.measured_s, abs=1e-9)
            if start.restart_s is not None:
                assert answer.measured_s == pytest.approx(start.restart_s, abs=1e-9)
            else:  # from the first process: rank r starts r ms after it
                assert answer.measured_s == pytest.approx(start.wall.max_s, abs=0.0075)


def write_start(directory: Path, *ranks: list[tuple[str, float, float]]) -> Path:
    """A launch in which each rank has these phases: (phase, start, end in s)."""
    directory.mkdir()
    for rank, phases in enumerate(ranks):
        log = RankLog(Options(), rank, 0, 1000 * phases[0][1])
        log.process()
        op = log.begin("startup")
        for phase, start, end in phases:
            op.at(1000 * start, 1000 * (end - start), phase, "world" if phase == "communicators" else None)
        log.now_ms = 1000 * phases[-1][2]
        op.end()
        dump(directory / RANK_FILE_PATTERN.format(rank=rank, cycle=0), log.records)
    return directory


def test_all_wait_for_whoever_comes_last_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_factory, "RANKS", 2)
    start = write_start(
        tmp_path / "run",
        [("imports", 0, 3), ("rendezvous", 3, 8), ("model_build", 8, 12), ("first_step", 12, 20)],
        [
            ("imports", 1, 7),
            ("rendezvous", 7, 8),
            ("model_build", 8, 11),
            ("data_build", 11, 11.5),
            ("first_step", 11.5, 20),
        ],
    )
    # Rank 1 holds up the rendezvous until 7, which then takes 1; rank 0 the first step until 12, which takes 8.
    measured = ask(start)
    assert measured.measured_s == pytest.approx(20)
    assert measured.path == pytest.approx(
        {"unattributed": 1, "imports": 6, "rendezvous": 1, "model_build": 4, "first_step": 8}
    )
    assert ask(start, imports=0.5).new_s == pytest.approx(1 + 3 + 1 + 4 + 8)  # rank 1 is still the last to come
    assert ask(start, rendezvous=0.5).new_s == pytest.approx(19.5)  # what was waiting is not the rendezvous' own time
    assert ask(start, first_step=2).new_s == pytest.approx(28)
    # Rank 0 builds its model in 1 s, rank 1 in 0.75 s and its data in 5 s: it now comes last, after 8 + 5.75.
    moved = ask(start, model_build=0.25, data_build=10)
    assert moved.new_s == pytest.approx(8 + 0.75 + 5 + 8)
    assert moved.new_path["data_build"] == pytest.approx(5) and "data_build" not in moved.path


def test_the_slowest_rank_may_be_another(tmp_path: Path) -> None:
    """Rank 2 imports for 3.5 s, the others for 3; rank 6 reads for 50 ms more than they; rank r starts r ms late."""
    run = write_trace(tmp_path / "run")
    measured = ask(run).measured_s
    half = ask(run, imports=0.5)
    assert (half.rank, half.new_rank) == (2, 2) and half.new_s == pytest.approx(measured - 1.75)
    none = ask(run, imports=0)
    assert (none.rank, none.new_rank) == (2, 6) and none.new_s == pytest.approx(measured - 3.5 + 0.004 + 0.05)
    assert ask(run, read_bandwidth=2).new_s == pytest.approx(measured - 0.02)  # two files of 20 ms on rank 2
    assert ask(run, detect=0.2).new_s == pytest.approx(measured - 0.4)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_trace(tmp_path / "run"))
    asked = ["project", run, "--what-if", "imports=0.5", "--what-if", "read_bandwidth=2", "--no-cache", "--format"]
    assert main([*asked, "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (start,) = found["answers"]
    assert found["factors"] == {"imports": 0.5, "read_bandwidth": 2}
    assert start["kind"] == "restart" and start["measured_s"] - start["new_s"] == pytest.approx(1.77)
    for name in ("table", "markdown", "csv"):
        assert main([*asked, name]) == 0
        text = capsys.readouterr().out
        assert "imports" in text and ("3.500" in text or "3.5," in text)


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("import=0.5", ("'import'", "imports")),
        ("imports", ("imports=0.5",)),
        ("imports=-1", ("imports=-1",)),
        ("imports=nan", ("imports=nan",)),
        ("read_bandwidth=0", ("read_bandwidth=0",)),
        ("write_bandwidth=0", ("write_bandwidth=0",)),
        ("cuda_context=0.5", ("cuda_context", "no restart, launch or save", "has a phase of that name")),
    ],
)
def test_names_what_cannot_be(
    tmp_path: Path, asked: str, names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(write_trace(tmp_path / "run"))
    assert main(["project", run, "--what-if", asked, "--no-cache"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert all(name in captured.err for name in names), captured.err


# Saves.

GOLDEN = Path(__file__).parents[5] / "tests" / "golden" / "trace_tp2_pp2_dp2" / "restart_trace"


def test_without_factors_it_is_the_measured_save(tmp_path: Path) -> None:
    made = [
        write_trace(tmp_path / str(number), options)
        for number, options in enumerate((Options(), Options(background_flush=True), Options(durable=False)))
    ]
    for directory in (*made, GOLDEN):
        analysis = analyse(load_trace(directory))
        assert analysis.report.complete_saves
        for save in analysis.report.complete_saves:
            (blocked, counts), _ = of_save(analysis.frames, save, {})
            assert blocked.new_s == blocked.measured_s == pytest.approx(save.blocked_s, abs=1e-9)
            assert counts.new_s == counts.measured_s == pytest.approx(save.committed_s, abs=1e-9)
            assert counts.quantity == ("durable_s" if save.durable_s is not None else "committed_s")
            parts = [*blocked.path.values(), *counts.path.values()]
            assert min(parts) >= 0, "one rank of GOLDEN begins its save after the commit"


def write_save(directory: Path, background: bool, slow: int) -> Path:
    """A save of two ranks: rank `slow` is done after 6 s, rank 0 commits from 6.5 s on, and it counts at 8 s.

    In the background is all that follows `collect`; training then waits for it, as at its end. As in agreements of
    this project, rank 1 first tells rank 0 that it is done, and then waits for the answer.
    """
    directory.mkdir()
    own = {
        rank: [("collect", None, 0, 2), ("flush", "write", 2, 6)]
        if rank == slow
        else [("collect", None, 0, 1), ("flush", "write", 1, 3)]
        for rank in (0, 1)
    }
    ends = {rank: spans[-1][3] for rank, spans in own.items()}
    commit = [("commit", "manifest", 6.5, 7.5), ("commit", "publish", 7.5, 8), ("commit", "prune", 8, 8.5)]
    ranks = (
        [*own[0], ("barrier", None, ends[0], 6.5), *commit],
        [*own[1], ("barrier", None, ends[1], ends[1] + 0.1), ("barrier", None, ends[1] + 0.1, 8.5)],
    )
    for rank, spans in enumerate(ranks):
        log = RankLog(Options(), rank, 0, 0)
        log.process()
        op = log.begin("save", trace_factory.ENGINE, tag="global_step1", step=1)
        for phase, detail, start, end in spans:
            blocking = phase == "collect" or not background
            op.at(1000 * start, 1000 * (end - start), phase, detail, blocking=blocking)
        if background:
            op.at(3000, 5500, "wait_previous", None)
        log.now_ms = 8500
        op.end(bytes=1000, num_files=1, durable=True)
        dump(directory / RANK_FILE_PATTERN.format(rank=rank, cycle=0), log.records)
    return directory


@pytest.mark.parametrize(
    ("factors", "blocked", "background_blocked", "durable"),
    [
        ({"collect": 1.0}, 8.5, 2, 8),
        ({"write_bandwidth": 2.0}, 6.5, 2, 6),  # the slow rank is done after 2 + 2
        ({"collect": 0.5}, 7.5, 1, 7),
        ({"flush": 0.0, "collect": 0.5}, 3.5, 1, 3),
        ({"barrier": 2.0}, 9, 2, 8.5),  # of what a rank waits in there only the agreement, half a second, is its own
        ({"commit": 2.0}, 10.5, 2, 9.5),  # prune, too, holds up whoever waits for the end, but the checkpoint counts
    ],
)
def test_a_save_is_held_up_by_whoever_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factors: dict[str, float], blocked: float,
    background_blocked: float, durable: float,
) -> None:  # fmt: skip
    monkeypatch.setattr(trace_factory, "RANKS", 2)
    for background, slow in itertools.product((False, True), (0, 1)):
        run = write_save(tmp_path / f"{background}{slow}", background, slow)
        found = {answer.quantity: answer for answer in what_if(analyse(load_trace(run)), factors)}
        assert found["durable_s"].measured_s == pytest.approx(8) and found["durable_s"].new_s == pytest.approx(durable)
        expected = background_blocked if background else blocked
        assert found["blocked_s"].new_s == pytest.approx(expected)
        for answer in found.values():
            assert answer.new_s == pytest.approx(sum(answer.new_path.values())) and answer.tag == "global_step1"


def test_starts_and_saves_answer_for_their_own_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_trace(tmp_path / "run"))
    for asked, kinds in (("imports=0.5", {"restart"}), ("flush=0.5", {"save"}), ("barrier=0.5", {"restart", "save"})):
        assert main(["project", run, "--what-if", asked, "--format", "json", "--no-cache"]) == 0
        assert {answer["kind"] for answer in json.loads(capsys.readouterr().out)["answers"]} == kinds


def test_a_factor_is_given_once() -> None:
    assert parse_factors(["imports=0.5", "read_bandwidth=2"]) == {"imports": 0.5, "read_bandwidth": 2.0}
    with pytest.raises(ValueError, match="twice"):
        parse_factors(["imports=0.5", "imports=2"])
