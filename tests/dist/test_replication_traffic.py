"""The benchmark's training by DeepSpeed's ZeRO-3, on two nodes of one rank: what it gathers, and what is copied."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.replication_traffic.plan import INTERLEAVE, NAIVE, NONE, VARIABLE, Plan
from megatron.net.secret import VARIABLE as SECRET_VARIABLE
from tests.dist.harness import HANGS_S, ROOT, end_all, losses, records, wait_for
from tests.dist.test_launch import environment, marked
from tests.dist.test_memory_shrink import LAUNCHER
from tests.unit.trace_helpers import SECRET

SCRIPT = str(Path(__file__).parent / "scripts" / "counted_zero3.py")
HIDDEN, FFN, LAYERS, LENGTH, VOCAB, MICRO_BATCHES = 128, 256, 4, 16, 128, 2
BLOCK = 4 * HIDDEN**2 + 2 * HIDDEN * FFN  # elements of its matrices; biases, norms and positions stay gathered
PARAMETERS = 2 * VOCAB * HIDDEN + LAYERS * BLOCK + LENGTH * HIDDEN + (2 * LAYERS + 1) * 2 * HIDDEN
PARAMETERS += LAYERS * (5 * HIDDEN + FFN)
FLAGS = f"""
    --tensor-model-parallel-size 1 --distributed-backend gloo --hidden-size {HIDDEN} --ffn-hidden-size {FFN}
    --num-layers {LAYERS} --num-attention-heads 2 --seq-length {LENGTH} --max-position-embeddings {LENGTH}
    --micro-batch-size 1 --global-batch-size {2 * MICRO_BATCHES} --train-iters 100 --lr 1e-3 --bf16 --zero-stage 1
    --tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --data-path none --save-interval 1
    --persist-interval 1000000 --checkpoint-engine memory --checkpoint-durability none --peer-timeout {HANGS_S}
    --replication-traffic interleave
""".split()
COPIED = Plan("", warm_up=3, rounds=1, block=2, settle=0, compute_s=0.01, gathered_bytes=0)
UNCOPIED = Plan("", warm_up=1, rounds=1, block=9, settle=0, compute_s=0.0, gathered_bytes=0)  # up to iteration 9


def trained(directory: Path, plan: Plan) -> Path:
    """Train to the end of the plan, on two nodes; the directory of the trace and of what was counted."""
    directory.mkdir()
    Plan(**{**vars(plan), "directory": str(directory)}).write(directory / "plan.json")
    script = [SCRIPT, *FLAGS, "--save", str(directory / "save"), "--restart-trace-dir", str(directory)]
    env = environment(directory) | {SECRET_VARIABLE: SECRET, VARIABLE: str(directory / "plan.json")}
    env |= {"COUNTS_DIR": str(directory), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> subprocess.Popen[bytes]:
        with (directory / "log").open("ab") as log:
            started.append(subprocess.Popen(command, cwd=directory, stdout=log, stderr=log, env=env))
        return started[-1]

    try:
        coordinator = start(
            *LAUNCHER, "coordinate", "--nnodes", "2", "--heartbeat-timeout", str(HANGS_S), "--port-file",
            str(directory / "port"), *script,
        )  # fmt: skip
        wait_for((directory / "port").exists, "the coordinator")
        where = "127.0.0.1:" + (directory / "port").read_text().strip()
        agents = ["2", "--coordinator", where, "--node-rank", "NODE", "--address", "127.0.0.1", *script]
        start(sys.executable, "-m", "tests.dist.forked_agents", *agents)
        assert coordinator.wait(HANGS_S) == 0, (directory / "log").read_text()[-6000:]
    finally:
        end_all(lambda: marked(directory))
        for process in started:
            process.wait(HANGS_S)
    return directory


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("copied") / "run", COPIED)


def copies(directory: Path, rank: int) -> dict[int, int]:
    """step -> bytes that another node has confirmed."""
    found: list[dict[str, Any]] = records(directory, 0, rank)
    steps = {r["op"]: r["step"] for r in found if r["type"] == "operation_begin" and r["operation"] == "save"}
    spans = [r for r in found if r["type"] == "span" and r["phase"] == "replicate"]
    return {steps[span["op"]]: span["bytes"] for span in spans}


@pytest.mark.slow
def test_each_rank_copies_its_part_of_the_state_after_each_iteration_that_is_to_be_saved(copied: Path) -> None:
    saved = [n for n in range(1, COPIED.iterations + 1) if COPIED.variant(n) != NONE]
    assert {COPIED.variant(n) for n in saved} == {INTERLEAVE, NAIVE} and len(saved) < COPIED.iterations
    part = PARAMETERS * (2 + 12) // 2  # bytes: bf16 weights, and three of fp32, over two ranks
    for rank in (0, 1):
        found = copies(copied, rank)
        assert sorted(found) == saved
        assert all(part <= size < part + (64 << 10) for size in found.values()), (part, found)


@pytest.mark.slow
def test_weights_are_gathered_for_each_pass_and_gradients_scattered_after_each_micro_batch(copied: Path) -> None:
    """In bf16. At least half of the blocks are released after the forward pass, and gathered again."""
    passes = 2 * COPIED.iterations * MICRO_BATCHES
    for rank in (0, 1):
        counts = json.loads((copied / f"rank_{rank}.json").read_text())
        assert 2 * passes * LAYERS * BLOCK * 0.75 <= counts["all_gather_into_tensor"] < 2 * passes * 1.25 * PARAMETERS
        assert counts["reduce_scatter_tensor"] == passes * PARAMETERS, (counts, passes * PARAMETERS)


@pytest.mark.slow
def test_copies_do_not_change_what_is_trained(copied: Path, tmp_path: Path) -> None:
    uncopied = trained(tmp_path / "run", UNCOPIED)
    steps = [n for n in range(1, COPIED.iterations + 1) if n <= UNCOPIED.warm_up + UNCOPIED.block]
    assert all(UNCOPIED.variant(n) == NONE for n in steps) and steps[-1] == COPIED.iterations
    for rank in (0, 1):
        expected, found = losses(uncopied, 0, rank), losses(copied, 0, rank)
        assert [found[n] for n in steps] == [expected[n] for n in steps]
        assert found[steps[-1]] < found[1]
