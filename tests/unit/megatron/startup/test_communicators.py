"""What a process group connects, by the ranks in it."""

from __future__ import annotations

import pytest

from megatron.parallel.topology import Layout
from megatron.startup.communicators import collective_sizes, kind_of
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


@pytest.mark.parametrize("ranks", [*range(2, 70), 1000, 1024, 10_007, 16_384])
def test_warm_up_allocates_as_much_for_a_group_of_any_size(ranks: int) -> None:
    small, large = collective_sizes(ranks)
    assert small == (1, 1, ranks), "what a step's flags and norms have"
    for size in (small, large):
        assert size.gathered == size.part * ranks, "all-gather and reduce-scatter take parts of one size"
    elements = max(large.reduced, large.gathered) + large.part
    assert elements * 4 <= 48 << 20, f"{elements} elements of fp32"
    assert min(large.reduced, large.gathered) * 2 > 15 << 20, "NCCL's algorithm for bandwidth, with bf16, too"
