"""The tree of agreements with real ranks on three hosts, one of which comes to harm: the root, a leader, a leaf."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness import Run, Zygote, kill_all, wait_for
from tests.dist.test_distributed_timeout import state_of

SCRIPT = Path(__file__).with_name("scripts") / "agreements.py"
HOSTS = ["a", "a", "a", "b", "b", "b", "c", "c", "c"]  # the ranks 0, 3 and 6 lead their hosts
RANKS = len(HOSTS)
HARM_AT = 2
VICTIMS = pytest.mark.parametrize("victim", [0, 3, 8], ids=["root", "leader", "leaf"])
NIGHTLY = pytest.mark.nightly(minutes=1)


def agree(zygote: Zygote, directory: Path, victim: int, harm: str, **settings: str) -> tuple[Run, list[dict[str, Any]]]:
    """The run, and the last that each rank says."""

    def end_the_stopped(pids: list[int]) -> None:
        if harm == "stop":
            others = [pid for rank, pid in enumerate(pids) if rank != victim]
            try:
                wait_for(lambda: all(state_of(pid) in ("", "Z") for pid in others), "the end of the others")
            finally:
                kill_all([pids[victim]])

    environment = {
        "HOSTS": " ".join(HOSTS), "VICTIM": str(victim), "HARM": harm, "HARM_AT": str(HARM_AT), "PIDS": str(directory),
        "TIMEOUT_S": "3" if harm == "stop" else "300",
    }  # fmt: skip
    run = zygote.run([], RANKS, directory, script=str(SCRIPT), env=environment | settings, during=end_the_stopped)
    said = [[line for line in run.log(rank).splitlines() if line.startswith("{")] for rank in range(RANKS)]
    return run, [json.loads(lines[-1]) if lines else {} for lines in said]


def test_all_agree(zygote: Zygote, tmp_path: Path) -> None:
    run, last = agree(zygote, tmp_path, -1, "none")
    assert run.ok and [said["at"] for said in last] == [5] * RANKS, run.output


@pytest.mark.parametrize(
    ("victim", "within"),
    [
        pytest.param(0, "", id="root, instead of", marks=NIGHTLY),
        pytest.param(0, "1", id="root, within"),
        pytest.param(3, "", id="leader, instead of"),
        pytest.param(3, "1", id="leader, within", marks=NIGHTLY),
        pytest.param(8, "", id="leaf, instead of", marks=NIGHTLY),
        pytest.param(8, "1", id="leaf, within"),
    ],
)
def test_a_rank_that_is_killed(zygote: Zygote, tmp_path: Path, victim: int, within: str) -> None:
    """Every other rank hears of it, by name, in this agreement or the next."""
    run, last = agree(zygote, tmp_path, victim, "kill", WITHIN=within, LAST="7" if within else "-1")
    assert run.exit_codes == [-signal.SIGKILL if rank == victim else 3 for rank in range(RANKS)], run.output
    for rank in set(range(RANKS)) - {victim}:
        assert last[rank]["error"] == "AgreementLostError" and last[rank]["at"] in (HARM_AT, HARM_AT + 1), last[rank]
        assert last[rank]["text"] == f"lost the connection to rank {victim} on {HOSTS[victim]}: it has ended"


@VICTIMS
def test_a_rank_that_is_stopped(zygote: Zygote, tmp_path: Path, victim: int) -> None:
    """No other rank waits longer than the deadline; whom they wait for is for the roll call to say."""
    run, last = agree(zygote, tmp_path, victim, "stop", WITHIN="1", LAST="7")
    assert run.exit_codes == [-signal.SIGKILL if rank == victim else 3 for rank in range(RANKS)], run.output
    for rank in set(range(RANKS)) - {victim}:
        assert last[rank]["error"] == "AgreementTimeoutError", last[rank]
        assert "has waited 3 s for rank" in last[rank]["text"]


@VICTIMS
def test_an_error_within_an_agreement(zygote: Zygote, tmp_path: Path, victim: int) -> None:
    """The others hear why, and the rank itself ends with what it raised."""
    run, last = agree(zygote, tmp_path, victim, "error")
    assert run.exit_codes == [1 if rank == victim else 3 for rank in range(RANKS)], run.output
    assert "TypeError: cannot pickle" in run.log(victim)
    for rank in set(range(RANKS)) - {victim}:
        assert f"rank {victim} on {HOSTS[victim]}: left an agreement: TypeError: cannot pickle" in last[rank]["text"]


def test_a_child_that_outlives_its_rank_hides_nothing(zygote: Zygote, tmp_path: Path) -> None:
    """It has copies of the connections, unless it closes them: the others would wait for their deadline."""
    run, last = agree(zygote, tmp_path, 3, "kill", FORKED="1")
    child = int((tmp_path / "child").read_text())
    try:
        assert state_of(child) not in ("", "Z")
        assert run.exit_codes == [-signal.SIGKILL if rank == 3 else 3 for rank in range(RANKS)], run.output
        assert all(last[rank]["text"].endswith("rank 3 on b: it has ended") for rank in (0, 4, 8))
    finally:
        kill_all([child])
