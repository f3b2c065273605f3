"""Coordinates by arithmetic are those of DeepSpeed's grid."""

from __future__ import annotations

import pytest

from megatron.parallel.topology import Coordinates, Layout, TensorParallelGroup

SIZES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2), (4, 3, 2), (8, 2, 5), (3, 5, 4)]


@pytest.mark.parametrize(("tp", "pp", "dp"), SIZES)
def test_coordinates_are_deepspeeds(tp: int, pp: int, dp: int) -> None:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    theirs = PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp)
    mine = Layout(tp=tp, pp=pp, dp=dp)
    assert mine.world_size == theirs.world_size()
    for rank in range(mine.world_size):
        at = mine.coordinates(rank)
        coordinate = theirs.get_coord(rank)
        assert (at.tp, at.pp, at.dp) == (coordinate.model, coordinate.pipe, coordinate.data)
        assert mine.rank(*at) == theirs.get_rank(pipe=at.pp, data=at.dp, model=at.tp) == rank


@pytest.mark.parametrize("rank", [-1, 8, 100])
def test_rank_outside_the_layout(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is outside the layout TP2 PP2 DP2"):
        Layout(tp=2, pp=2, dp=2).coordinates(rank)


def test_layout_as_shown_and_as_saved() -> None:
    layout = Layout(tp=4, pp=20, dp=1)
    assert str(layout) == "TP4 PP20 DP1"
    assert Layout(**layout.as_dict()) == layout
    assert layout.coordinates(79) == Coordinates(tp=3, pp=19, dp=0)


def test_single_process_is_a_tensor_parallel_group_of_its_own() -> None:
    assert (TensorParallelGroup().rank, TensorParallelGroup().size, TensorParallelGroup().group) == (0, 1, None)
