"""Chooses the largest layout that fits the nodes that are left; the job then loads the old layout's checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.config import Config, ConfigError
from megatron.config.arguments import config_from_args, parse_args


@dataclass(frozen=True)
class Shrunk:
    """A job on the first `nodes` nodes; `arguments` are put behind those of the training. `layout`: for messages."""

    nodes: int
    layout: str
    arguments: tuple[str, ...]


class NoLayoutError(ValueError):
    """The job cannot go on with fewer nodes; the message says why."""


def shrunk(arguments: Sequence[str], ranks_per_node: int, nodes: int, left: int) -> Shrunk:
    """The largest layout for `left` of `nodes` nodes.

    As many replicas as fit at the same TP, PP and EP; where not even one does, the most nodes at a smaller EP, then PP,
    and at last at a smaller TP. The global batch stays what it was, so the training stays the same but for the order of
    sums.
    Raises NoLayoutError if there is none, and ConfigError if the training would refuse its flags even with all nodes.
    """
    whole = _config(arguments, nodes * ranks_per_node)
    sizes = whole.parallel.layout
    if whole.parallel.zero_stage == 3:
        raise NoLayoutError("what --zero-stage 3 has saved, only as many ranks load")
    batch = whole.training.global_batch_size or whole.training.micro_batch_size * whole.parallel.data_parallel_size
    for tp, pp, ep, remaining in _candidates(sizes["tp"], sizes["pp"], sizes["ep"], left):
        ranks = remaining * ranks_per_node
        flags = (
            *(("--moe-expert-parallel-size", str(ep)) if sizes["ep"] > 1 else ()),
            "--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp),
            "--global-batch-size", str(batch),
        )  # fmt: skip
        try:
            _config([*arguments, *flags], ranks)
        except ConfigError:
            continue
        layout = f"TP{tp} PP{pp} DP{ranks // (tp * pp)}" + (f" EP{ep}" if ep > 1 else "")
        return Shrunk(remaining, layout, flags)
    raise NoLayoutError(f"no layout of model and batch fits {left} of {nodes} nodes")


def _candidates(tp: int, pp: int, ep: int, left: int) -> Iterator[tuple[int, int, int, int]]:
    """(TP, PP, EP, nodes), the preferred first."""
    nodes, experts = range(left, 0, -1), (ep, *_below(ep))
    yield from ((tp, pp, ep, number) for number in nodes)
    yield from ((tp, pp, fewer, number) for number in nodes for fewer in _below(ep))
    yield from ((tp, fewer, ranks, number) for number in nodes for fewer in _below(pp) for ranks in experts)
    yield from (
        (fewer, stages, ranks, number)
        for number in nodes for fewer in _below(tp) for stages in (pp, *_below(pp)) for ranks in experts
    )  # fmt: skip


def _below(size: int) -> list[int]:
    """Smaller sizes that divide it, the largest first."""
    return [smaller for smaller in range(size - 1, 0, -1) if size % smaller == 0]


def _config(arguments: Sequence[str], ranks: int) -> Config:
    env = {"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0"}
    return config_from_args(parse_args(list(arguments), env), env)
