"""The arithmetic of redistribution, against tensors that are really cut and flattened."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpointing.engines.base import PlacedTensor
from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointMismatchError
from megatron.checkpointing.reshard.gathering import by_broadcasts
from megatron.checkpointing.reshard.reading import Reading
from megatron.checkpointing.reshard.runs import Runs, intersect, make_runs, merged, positions, slice_runs, subtract
from megatron.checkpointing.reshard.sources import SourceIndex
from megatron.checkpointing.reshard.targets import Target, Transfer, plan
from megatron.checkpointing.state.shard_metadata import fragments, shard_placement, weight_placement
from megatron.parallel.parameter_slice import ParameterSlice
from restart_trace.recorder import untraced_operation
from tests.flat_partitions import flat_partition

VOCABULARY = 9
# name -> full shape, dimension split over TP, matrices fused along it, whether it counts tokens
PARAMETERS: dict[str, tuple[tuple[int, ...], int | None, tuple[int, ...], bool]] = {
    "1.word_embeddings.weight": ((12, 3), 0, (12,), True),
    "2.query_key_value.weight": ((16, 3), 0, (8, 4, 4), False),
    "2.dense.weight": ((3, 8), 1, (8,), False),
    "2.norm.weight": ((3,), None, (), False),
    "2.dense_h_to_4h.weight": ((24, 3), 0, (12, 12), False),
    "2.dense_4h_to_h.weight": ((3, 12), 1, (12,), False),
}


def part(name: str, rank: int, size: int, padded: int = 12) -> ParameterSlice:
    shape, dim, blocks, vocabulary = PARAMETERS[name]
    if vocabulary:
        shape, blocks = (padded, *shape[1:]), (padded,)
    return ParameterSlice(shape, dim, blocks, rank, size, vocabulary)


def cut(full: torch.Tensor, part: ParameterSlice) -> torch.Tensor:
    """What a rank holds, by indexing."""
    if part.ranges is None or part.dim is None:
        return full
    return torch.cat([full.narrow(part.dim, a, b - a) for a, b in part.ranges], part.dim).contiguous()


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (3, 4)])
def test_runs_say_where_each_element_lies(name: str, rank: int, size: int) -> None:
    mine = part(name, rank, size)
    full = torch.arange(int(np.prod(mine.shape))).reshape(mine.shape)
    local = cut(full, mine).reshape(-1)
    runs = slice_runs(mine.shape, mine.dim, mine.ranges)
    assert runs.numel == local.numel() and (np.diff(runs.full) > 0).all()
    for at, held, length in zip(runs.full, runs.held, runs.length, strict=True):
        assert local[held : held + length].tolist() == list(range(at, at + length))


def elements(runs: Runs) -> dict[int, int]:
    """Element of the parameter -> where it is held."""
    return {
        int(at + i): int(held + i)
        for at, held, length in zip(runs.full, runs.held, runs.length, strict=True)
        for i in range(length)
    }


@st.composite
def some_runs(draw: st.DrawFn) -> Runs:
    """Disjoint runs in [0, 60), held in another order than they lie in the parameter."""
    edges = sorted(draw(st.sets(st.integers(0, 60), max_size=12)))
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    order = draw(st.permutations(range(len(pairs))))
    held, at = [0] * len(pairs), 0
    for i in order:
        held[i] = at
        at += pairs[i][1] - pairs[i][0]
    return make_runs([a for a, _ in pairs], held, [b - a for a, b in pairs])


@pytest.mark.slow
@given(some_runs(), some_runs())
def test_intersection_and_difference_are_those_of_sets(first: Runs, second: Runs) -> None:
    mine, theirs = elements(first), elements(second)
    copies = intersect(first, second)
    found = {
        (int(s + i), int(t + i))
        for s, t, n in zip(copies.source, copies.target, copies.length, strict=True)
        for i in range(n)
    }
    assert found == {(mine[e], theirs[e]) for e in mine.keys() & theirs.keys()}
    assert elements(subtract(first, second)) == {e: at for e, at in mine.items() if e not in theirs}


@given(st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=6), max_size=4))
def test_merged_sets(found: list[list[tuple[int, int]]]) -> None:
    """Each list of (start, length) may overlap the others; within a list only what does not is taken."""
    sets = [merged([positions([start], [start + length]) for start, length in pairs]) for pairs in found]
    everything = merged(sets)
    members = {e for pairs in found for start, length in pairs for e in range(start, start + length)}
    assert set(elements(everything)) == members
    assert (np.diff(everything.full) > everything.length[:-1]).all(), "neighbours are one run"


# A whole checkpoint, on every layout


class Saved:
    """The state of a model on one TP x DP layout, as tensors of files: weights, and flat ZeRO-1 shards."""

    def __init__(self, full: dict[str, dict[str, torch.Tensor]], tp: int, dp: int, padded: int) -> None:
        self.tensors: list[tuple[PlacedTensor, torch.Tensor]] = []
        for t, d in itertools.product(range(tp), range(dp)):
            path = Path(f"tp{t}_dp{d}")
            for target, values in new_rank(tp, dp, t, d, padded, with_values=full):
                self.tensors.append((PlacedTensor(path, target.kind, values.dtype, 0, target.placement), values))

    def index(self) -> SourceIndex:
        return SourceIndex(tensor for tensor, _ in self.tensors)

    def carry_out(self, transfers: list[Any]) -> None:
        data = {id(tensor): values.view(torch.uint8) for tensor, values in self.tensors}
        for transfer in transfers:
            source, target = (data[id(transfer.source)].reshape(-1), transfer.target.reshape(-1).view(torch.uint8))
            rows = zip(transfer.file_offset, transfer.target_offset, transfer.num_bytes, strict=True)
            for a, b, n in rows:
                target[b : b + n] = source[a : a + n]


def new_rank(
    tp: int, dp: int, t: int, d: int, padded: int, with_values: dict[str, dict[str, torch.Tensor]] | None = None
) -> list[tuple[Target, torch.Tensor]]:
    """Tensors of a rank, with what they ought to hold where `with_values` (kind -> parameter -> full) says it."""
    parts = {name: part(name, t, tp, padded) for name in PARAMETERS}
    found = []
    for name, mine in parts.items() if d == 0 else ():
        values = cut(with_values["weight"][name], mine) if with_values else torch.zeros(mine.local_shape)
        target = Target(torch.full(mine.local_shape, 7.0), "weight", weight_placement(name, mine, VOCABULARY))
        found.append((target, values.reshape(-1).float()))
    partition = flat_partition(parts.items(), d, dp)
    held = fragments(partition, VOCABULARY)
    for kind in ("master", "exp_avg"):
        flat = torch.zeros(partition.size * dp)
        if with_values:
            joined = torch.cat([cut(with_values[kind][name], mine).reshape(-1) for name, mine in parts.items()])
            flat[: len(joined)] = joined
        values = flat[partition.start : partition.start + partition.size]
        placement = shard_placement(kind, held, partition.size)
        found.append((Target(torch.full((partition.size,), 7.0), kind, placement), values))
    return found


def full_state(padded: int) -> dict[str, dict[str, torch.Tensor]]:
    """Distinct values; those of tokens that are none are zero, as redistribution makes them."""
    state: dict[str, dict[str, torch.Tensor]] = {}
    for k, kind in enumerate(("weight", "master", "exp_avg")):
        state[kind] = {}
        for i, name in enumerate(PARAMETERS):
            mine = part(name, 0, 1, padded)
            values = 1000.0 * (k + 1) + 100 * i + torch.arange(float(np.prod(mine.shape))).reshape(mine.shape)
            if mine.vocabulary:
                values[VOCABULARY:] = 0
            state[kind][name] = values
    return state


LAYOUTS = [(1, 1, 12), (2, 1, 12), (1, 2, 10), (2, 3, 10), (4, 1, 12), (4, 2, 16)]


@pytest.mark.parametrize(("old", "new"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_every_layout_from_every_other(old: tuple[int, int, int], new: tuple[int, int, int]) -> None:
    """(TP, DP, padded vocabulary): each rank gets exactly what it would hold, and zeros for padding."""
    saved, expected = Saved(full_state(old[2]), *old), full_state(new[2])
    tp, dp, padded = new
    for t, d in itertools.product(range(tp), range(dp)):
        rank = new_rank(tp, dp, t, d, padded, with_values=expected)
        saved.carry_out(plan([target for target, _ in rank], saved.index()))
        for target, values in rank:
            assert torch.equal(target.tensor.reshape(-1), values), (target.kind, target.placement)


def test_what_is_missing_or_of_another_type_is_named() -> None:
    saved = Saved(full_state(12), 1, 1, 12)
    target = new_rank(2, 1, 1, 0, 12)[2][0]
    with pytest.raises(CheckpointMismatchError, match=r"lacks 12 of the 12 elements of the weight of 2\.dense\.weight"):
        plan([target], SourceIndex(t for t, _ in saved.tensors if t.placement.get("name") != "2.dense.weight"))
    wrong = Target(target.tensor.bfloat16(), target.kind, target.placement)
    with pytest.raises(CheckpointMismatchError, match="float32, and torch.bfloat16"):
        plan([wrong], saved.index())


def test_another_vocabulary_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Saved(full_state(12), 1, 1, 12).index()
    monkeypatch.setattr("tests.unit.megatron.checkpointing.reshard.test_reading.VOCABULARY", VOCABULARY - 1)
    with pytest.raises(CheckpointMismatchError, match=r"embeddings.weight has 9 tokens in the checkpoint and 8 here"):
        plan([target for target, _ in new_rank(2, 1, 0, 0, 12)], index)


def test_of_what_several_ranks_hold_the_first_is_taken_and_the_rest_fills_up() -> None:
    """As of a tied embedding, which two stages hold, cut at other places by ZeRO-1."""
    whole = {"name": "e", "shape": [10], "dim": None, "ranges": None}

    def held(start: int, numel: int, rank: str) -> PlacedTensor:
        piece = {**whole, "local_shape": [10], "start": start, "numel": numel, "offset": 0}
        return PlacedTensor(Path(rank), "m", torch.float32, 0, shard_placement("master", [piece], numel))

    index = SourceIndex([held(0, 4, "a"), held(2, 6, "b"), held(0, 4, "c"), held(5, 5, "d")])
    found = {s.tensor.path.name: (s.runs.full.tolist(), s.runs.length.tolist()) for s in index.of("master", "e")}
    assert found == {"a": ([0], [4]), "b": ([4], [4]), "d": ([8], [2])}


# Reading


@pytest.mark.parametrize("direct_io", ["auto", "on", "off"])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_planned_bytes_are_read_into_the_targets(tmp_path: Path, direct_io: str, threads: int) -> None:
    """Two files; rows of several lengths, regular and not, across the lines of the grid; nothing else is touched."""
    random = np.random.default_rng(5)
    content = {tmp_path / name: random.bytes(70_001) for name in ("a", "b")}
    for path, data in content.items():
        path.write_bytes(data)
    transfers, expected = [], []
    for path in content:
        for rows, length, step in ((40, 300, 700), (3, 20_000, 23_000), (1, 1, 1), (9, 8192, 7000)):
            source = np.arange(rows) * step + random.integers(0, 900)
            kept = source + length <= 70_001
            source, rows = source[kept], int(kept.sum())
            order = random.permutation(rows) if length < 300 or step < length else np.arange(rows)
            target = torch.full((rows * (length + 5),), 9, dtype=torch.uint8)
            held = PlacedTensor(path, "t", torch.uint8, 0, {})
            lengths = np.full(rows, length)
            transfers.append(Transfer(held, target, source, order * (length + 5), lengths))
            wanted = target.clone()
            for at, to in zip(source, order * (length + 5), strict=True):
                wanted[to : to + length] = torch.frombuffer(
                    bytearray(content[path][at : at + length]), dtype=torch.uint8
                )
            expected.append(wanted)
    sizes = {path: len(data) for path, data in content.items()}
    plan_of_one = Reading(transfers, sizes, direct_io, threads, block=8192, gap=512)
    assert plan_of_one.run({0: plan_of_one.share()}, 0, untraced_operation()) == [], "nothing has a checksum"
    assert plan_of_one.num_files == 2 and 0 < plan_of_one.bytes_read <= 2 * 73_728
    for transfer, wanted in zip(transfers, expected, strict=True):
        assert torch.equal(transfer.target, wanted)


def test_a_file_that_is_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(5000))
    target = torch.zeros(10, dtype=torch.uint8)
    at = np.array([4000])
    transfer = Transfer(PlacedTensor(path, "t", torch.uint8, 0, {}), target, at, np.array([0]), np.array([10]))
    with pytest.raises(CheckpointDamagedError, match=f"{path}: ends at byte 5000"):
        short = Reading([transfer], {path: 9000}, "auto", None)
        short.run({0: short.share()}, 0, untraced_operation())


def test_weights_are_broadcast_where_gathering_them_takes_new_memory() -> None:
    assert by_broadcasts("gloo", 2) and by_broadcasts("gloo", 4)
    assert not by_broadcasts("gloo", 1) and not by_broadcasts("nccl", 4)
