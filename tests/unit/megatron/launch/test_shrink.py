"""The layout that a job goes on with after nodes are lost. Real losses: tests/dist/test_memory_shrink.py."""

from __future__ import annotations

import pytest

from megatron.launch.shrink import NoLayoutError, shrunk

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --train-iters 10 "
    "--lr 1e-3 --data-path x --tokenizer-type NullTokenizer --vocab-size 500 --global-batch-size 8"
)


@pytest.mark.parametrize(
    ("flags", "ranks_per_node", "nodes", "left", "goes_on"),
    [
        ("", 1, 4, 3, (2, "TP1 PP1 DP2")),  # 3 replicas do not divide the batch
        ("--ds-sequence-parallel-size 2", 2, 4, 3, (2, "TP1 PP1 DP4")),
        ("--ds-sequence-parallel-size 4", 1, 8, 7, (4, "TP1 PP1 DP4")),  # all of a sequence or none
        ("--num-experts 4 --moe-expert-parallel-size 2", 1, 4, 3, (2, "TP1 PP1 DP2 EP2")),
        ("--num-experts 4 --moe-expert-parallel-size 4", 1, 4, 3, (2, "TP1 PP1 DP2 EP2")),
        ("--num-experts 4 --moe-expert-parallel-size 2", 1, 4, 1, (1, "TP1 PP1 DP1")),
        ("--pipeline-model-parallel-size 2 --ds-sequence-parallel-size 2", 1, 4, 3, (2, "TP1 PP1 DP2")),
    ],
)
def test_the_largest_layout_that_fits(
    flags: str, ranks_per_node: int, nodes: int, left: int, goes_on: tuple[int, str]
) -> None:
    found = shrunk(f"{FLAGS} {flags}".split(), ranks_per_node, nodes, left)
    assert (found.nodes, found.layout) == goes_on
    assert found.arguments[-2:] == ("--global-batch-size", "8")


def test_no_layout_fits() -> None:
    """The ranks that share a sequence are too few."""
    four = f"{FLAGS} --ds-sequence-parallel-size 4".split()
    with pytest.raises(NoLayoutError, match="^no layout of model and batch fits 3 of 4 nodes$"):
        shrunk(four, 1, 4, 3)
    assert shrunk(four, 1, 8, 4).nodes == 4


def test_checkpoints_of_zero_stage_3_are_the_reason() -> None:
    with pytest.raises(NoLayoutError, match="^what --zero-stage 3 has saved, only as many ranks load$"):
        shrunk(f"{FLAGS} --zero-stage 3".split(), 1, 4, 2)
