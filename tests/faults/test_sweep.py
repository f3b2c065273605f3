"""At every seventh system call of a save and of a start something goes wrong: nothing is lost, and it is said.

In object storage, most of whose calls both engines have, at every 13th; of two ranks, of which each fault takes a
second, at every 41st.

Every fault at every call: `python -m tests.faults.sweep --processes 2`, which .ci/nightly runs.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.checkpointing.engines.registry import builtin_engines
from tests.engines import EXCEPTIONS
from tests.faults import sweep
from tests.faults.injection import Fault
from tests.faults.sweep import SCENARIOS, STORED, TWO_RANKS, read, share_of
from tests.faults.system_calls import KILL
from tests.faults.verdicts import MISSED, SAVE, START, Verdict

# Those of which others have all the code, and one whose process takes seconds to start in each launch.
LEFT_TO_THE_NIGHT = ("fastpersist", "dcp", "dcp-process", "lazy-zstd")
IN_DIRECTORIES = [name for name in SCENARIOS if name not in (*LEFT_TO_THE_NIGHT, *STORED, *TWO_RANKS)]


def swept(out: Path, names: Sequence[str], every: int, processes: int) -> list[Verdict]:
    options = [text for name in names for text in ("--scenario", name)]
    options += ["--every", str(every), "--processes", str(processes), "--out", str(out)]
    command = [sys.executable, "-m", "tests.faults.sweep", *options]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    verdicts = read(out)
    broken = any(verdict.broken for verdict in verdicts)
    # With 1 and nothing broken, a process has ended early.
    assert ended.returncode == (1 if broken else 0), ended.stdout[-2000:] + ended.stderr[-6000:]
    return verdicts


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[Verdict]:
    directory = tmp_path_factory.mktemp("faults")
    return (
        swept(directory / "one.jsonl", IN_DIRECTORIES, 7, 1)
        + swept(directory / "stored.jsonl", STORED, 13, 1)
        + swept(directory / "two.jsonl", [*TWO_RANKS], 41, 1)
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "names", [*([name] for name in (*IN_DIRECTORIES, *STORED)), [*TWO_RANKS]], ids=lambda names: names[0]
)
def test_a_fault_loses_nothing(verdicts: list[Verdict], names: list[str]) -> None:
    mine = [verdict for verdict in verdicts if verdict.scenario in names]
    assert [verdict for verdict in mine if verdict.broken] == []
    assert sum(verdict.outcome == MISSED for verdict in mine) <= len(mine) / 20
    mine = [verdict for verdict in mine if verdict.survived]
    assert {verdict.of for verdict in mine} == {SAVE, START}
    assert any(verdict.fault.effect == KILL for verdict in mine)
    assert {verdict.outcome for verdict in mine} == {"whole", "told"}


def test_each_engine_is_swept() -> None:
    engines = {flags[flags.index("--checkpoint-engine") + 1] for flags in SCENARIOS.values()}
    assert engines | EXCEPTIONS.keys() == builtin_engines().keys()


def test_a_sweep_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """The newest verdict on a fault counts; the line at which a kill came does not."""
    out = tmp_path / "out.jsonl"
    assert read(out) == []
    fault = Fault("read", 2, "EIO")
    verdict = {"scenario": "lazy", "of": "save", "fault": dataclasses.asdict(fault), "hit": "read x", "said": None}
    lines = [json.dumps(verdict | {"outcome": outcome, "seconds": 0.1}) for outcome in ("hangs", "whole")]
    out.write_text("\n".join(lines) + "\n" + lines[0][:-9])
    assert [(told.key, told.survived) for told in read(out)] == [(("lazy", "save", fault), True)]


def test_a_fault_that_no_call_met_is_neither_survived_nor_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "run_beside", lambda *_: True)
    missed = Verdict("lazy-stored", START, Fault("receive", 153, "EIO"), None, MISSED, None, 0.1)
    out = tmp_path / "out.jsonl"
    out.write_text(json.dumps(dataclasses.asdict(missed)) + "\n")
    assert (missed.survived, missed.broken) == (False, False)
    assert sweep.main(["--out", str(out)]) == 1  # nothing else was tried
    assert "no fault was injected: " in capsys.readouterr().out
    hit = dataclasses.replace(missed, outcome="whole", fault=Fault("receive", 1, "EIO"))
    with out.open("a") as file:
        file.write(json.dumps(dataclasses.asdict(hit)) + "\n")
    assert sweep.main(["--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[3:] == ["2", "1", "0", "1", "0"]


def test_a_sweep_without_a_fault_has_shown_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "run_beside", lambda *_: True)
    assert sweep.main(["--fault", "EIO at rename 99", "--out", str(tmp_path / "out.jsonl")]) == 1
    assert "no fault was injected: " in capsys.readouterr().out


def test_processes_that_list_other_faults_leave_none_out() -> None:
    """Each process records the calls anew, and a socket takes another number of reads each time."""
    few, more = ([Fault("receive", number, "short") for number in range(1, most)] for most in (40, 60))
    judged = [fault for share, faults in enumerate((few, more, few)) for fault in faults if share_of(fault, 3) == share]
    assert len(judged) == len({*judged}) and {*few} <= {*judged}
