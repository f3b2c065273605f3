"""Gathering, broadcasting and agreeing between real ranks, and within a single one."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.parallel.control_plane import ControlPlane
from tests.dist.harness import Zygote


def test_agreements_between_ranks(zygote: Zygote, tmp_path: Path) -> None:
    script = Path(__file__).with_name("scripts") / "control_plane.py"
    run = zygote.run([], 3, tmp_path, script=str(script))
    assert run.ok, run.output
    answers = [json.loads(run.log(rank).splitlines()[-1]) for rank in range(3)]
    assert answers[0]["gather"] == [{"rank": rank, "items": [None] * rank} for rank in range(3)]
    assert [answer["gather"] for answer in answers[1:]] == [None, None]
    for answer in answers:
        assert answer["broadcast"] == ["from", 0, "x" * 100_000]
        assert answer["nobody"] == []
        assert answer["odd"] == [[1, "failure of 1"]]
        assert answer["empty"] == [[0, ""]]  # an error without words is an error


def test_single_process_agrees_with_itself() -> None:
    control = ControlPlane(0, 1)
    item = object()
    assert control.gather(item) == [item] and control.broadcast(item) is item
    assert control.agree(None) == [] and control.agree("failure") == [(0, "failure")]
