"""What a process group connects, by the ranks in it."""

from __future__ import annotations

import pytest

from megatron.parallel.topology import Layout
from megatron.startup.communicators import kind_of
from restart_trace.schema import GROUPS

LAYOUT = Layout(tp=2, pp=2, dp=2)  # rank = (pp * 2 + dp) * 2 + tp


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        (range(8), "world"),
        ([0, 1], "tensor"),
        ([0, 2], "data"),
        ([1, 5], "pipeline"),
        ([0, 1, 4, 5], "model"),
        ([0, 1, 2, 3], "other"),  # of one stage
        ([0, 7], "other"),
        ([3], "other"),
    ],
)
def test_kind_of_a_group(ranks: list[int], kind: str) -> None:
    assert kind_of(ranks, LAYOUT) == kind
    assert kind in GROUPS


def test_of_a_layout_with_one_dimension_every_group_of_all_is_the_world() -> None:
    assert kind_of([0, 1], Layout(tp=2, pp=1, dp=1)) == "world"
