"""Groups of in-process restarts: when they are connected, and which of them share their connections."""

from __future__ import annotations

from pathlib import Path

from tests.dist.harness import Zygote

SCRIPT = Path(__file__).with_name("scripts") / "reconnected_groups.py"
RANKS = 3


def test_groups_without_the_late_rank_are_connected_before_it_comes(zygote: Zygote, tmp_path: Path) -> None:
    """The last rank comes when the others have connected theirs, which they would not if they waited for it before.

    Groups of all ranks connect when they are used, and messages between two ranks are no such use. Groups of the same
    ranks share their connections, but with another timeout.
    """
    run = zygote.run([], RANKS, tmp_path, script=str(SCRIPT))
    assert run.ok, run.output
    assert [run.log(rank).splitlines()[-1] for rank in range(RANKS)] == ["shared True False"] * RANKS
