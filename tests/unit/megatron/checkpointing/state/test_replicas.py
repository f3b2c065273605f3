"""Which replica reads which layers, and what is told of those that arrive otherwise."""

from __future__ import annotations

import torch

from megatron.checkpointing.state.layer_files import files_of_layer
from megatron.checkpointing.state.replicas import differing, layers_read_by
from megatron.checkpointing.store.naming import RankPlace, layer_file
from megatron.parallel.topology import Layout

SIZES = (90, 10, 10, 10, 30)
LAYERS = [(number, torch.nn.Linear(size, 1, bias=False)) for number, size in enumerate(SIZES, 1)]


def read_by(layout: Layout, rank: int, *, divided: bool = True) -> list[str]:
    place = RankPlace(layout, layout.coordinates(rank), "bf16")
    files = [file for number, layer in LAYERS for file in files_of_layer(number, layer, place)]
    return layers_read_by(files, place, divided=divided)


def test_each_layer_is_read_by_one_replica() -> None:
    layout = Layout(tp=2, pp=1, dp=3)
    for tp in range(layout.tp):
        of_each = [read_by(layout, layout.rank(tp, 0, dp)) for dp in range(layout.dp)]
        assert sorted(sum(of_each, [])) == [layer_file(number, tp) for number, _ in LAYERS]
        assert [[int(name[6:8]) for name in names] for names in of_each] == [[1], [5], [2, 3, 4]]


def test_replicas_without_a_layer_and_an_undivided_load() -> None:
    many = Layout(tp=1, pp=1, dp=8)
    assert [len(read_by(many, rank)) for rank in range(8)] == [1, 1, 1, 1, 1, 0, 0, 0]
    assert all(len(read_by(many, rank, divided=False)) == len(LAYERS) for rank in range(8))


def test_what_differs_is_told_with_reader_and_receiver() -> None:
    """Ranks 0 and 1 are replicas, and so are 2 and 3."""
    right = [{"a": (1, 0), "b": (2, 1)}, {"a": (1, 0), "b": (2, 1)}, {"c": (3, 2)}, {"c": (3, 2)}]
    assert differing(right) == []
    wrong = [{"a": (1, 0), "b": (9, 1)}, {"a": (1, 0), "b": (2, 1)}, {"c": (3, 2)}, {"c": (4, 2)}]
    assert differing(wrong) == ["b on rank 0, from rank 1", "c on rank 3, from rank 2"]
    assert differing([{}, {}]) == []  # not verified
