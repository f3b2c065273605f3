"""Engine `memory` with compressed copies: a killed rank, whose own save is damaged, loads one from a peer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.dist.harness import HANGS_S, Zygote, losses, records, wait_for
from tests.dist.test_launch import marked
from tests.dist.test_memory_shrink import HELD_AT, LAST, NODES, Job


@pytest.mark.slow
def test_a_killed_rank_loads_a_compressed_copy_to_the_bit(tmp_path: Path, dataset: list[str], zygote: Zygote) -> None:
    job = Job(tmp_path, dataset, "--replica-compression", "zstd", "--verify-restored-state")
    try:
        job.until_held()
        for rank in range(NODES):
            found = records(job.trace, 0, rank)
            sizes = [r["bytes"] for r in found if r["type"] == "span" and r["phase"] == "replicate"]
            probed = [r["values"] for r in found if r["type"] == "probe" and "replicate_wire_bytes" in r["values"]]
            assert len(sizes) == len(probed) == HELD_AT
            assert all(one["replicate_wire_bytes"] < 0.95 * size for one, size in zip(probed, sizes, strict=True))
            assert all(one["replicate_compress_s"] > 0 for one in probed)
        job.flip_bits(0)
        os.kill(records(job.trace, 0, 0)[0]["pid"], signal.SIGKILL)
        assert job.coordinator.wait(HANGS_S) == 0, job.output[-6000:]
        wait_for(lambda: marked(tmp_path) == [], "the end of all processes")
    finally:
        job.end()
    for rank in range(NODES):
        found = records(job.trace, 1, rank)
        (load,) = [r for r in found if r["type"] == "operation_end" and r["operation"] == "load"]
        assert (load["outcome"], load["step"]) == ("ok", HELD_AT)
        reads = [r["tier"] for r in found if r["type"] == "span" and r.get("detail") == "read"]
        assert reads[-1] == ("local_memory" if rank else "peer"), reads
    after = losses(job.trace, 1, 1)
    assert sorted(after) == list(range(HELD_AT + 1, LAST + 1))
    assert after == job.from_storage(zygote, NODES), "the same state, to the last bit"
