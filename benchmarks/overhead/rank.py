"""One rank of a measurement: `rank.py PLAN.json`, with RANK and the like set.

Rounds of all variants, in every order in turn. Only the variant itself is timed: directories are made and
removed, and dirty pages written out, between them. Rank 0 writes one JSON line per sample to the plan's output.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.state import SavableState, build_state, touch_free_memory
from benchmarks.overhead.plan import TRACED, VARIANTS, Plan
from benchmarks.overhead.variants import Variants
from restart_trace.clock import now_ns


@dataclass(frozen=True)
class Sample:
    """One timed operation of one rank.

    `cpu_s` is the rank's own processor time, `machine_cpu_s` that of everything on the machine (resolution
    10 ms), `recorder_s` the time in the recorder. The last two are None where the kernel does not tell.
    """

    wall_s: float
    cpu_s: float
    recorder_s: float
    storage_read_bytes: float | None
    machine_cpu_s: float | None


class Rounds:
    """Runs the variants of this rank and gathers the samples of all ranks on rank 0."""

    def __init__(self, plan: Plan, state: SavableState) -> None:
        self._plan = plan
        self._control = state.context.control
        self._directory = Path(plan.directory)
        trace_file = self._directory / f"trace_rank_{self._control.rank}.jsonl"
        self._variants = Variants(state, trace_file)

    def run(self) -> None:
        """A checkpoint to load, then a round that is not counted, then those that are."""
        to_load = self._directory / "to_load"
        self._prepare(to_load)
        self._variants.run("save", to_load, traced=False)()
        self._tell({"facts": self._facts(to_load)})
        for round_number in range(-1, self._plan.rounds):
            for operation in self._plan.operations:
                orders = list(itertools.permutations(VARIANTS))
                for variant in orders[round_number % len(orders)]:
                    sample = self._sample(operation, variant, to_load)
                    gathered = self._control.gather(asdict(sample))
                    if round_number >= 0:
                        self._tell(
                            {"round": round_number, "operation": operation, "variant": variant, "ranks": gathered}
                        )

    def _sample(self, operation: str, variant: str, to_load: Path) -> Sample:
        saves = operation == "save"
        directory = self._directory / variant if saves else to_load
        if saves:
            self._prepare(directory)
        function = self._variants.run(operation, directory, traced=variant == TRACED)
        self._settle(drop_cache=self._plan.cold and not saves)
        recorder = self._variants.recorder
        recorder.spent_ns = 0
        read_before, cpu_before, busy_before = _read_bytes(), time.process_time(), _busy_seconds()
        start = now_ns()
        function()
        end = now_ns()
        read_after, cpu_after, busy_after = _read_bytes(), time.process_time(), _busy_seconds()
        sample = Sample(
            wall_s=(end - start) / 1e9,
            cpu_s=cpu_after - cpu_before,
            recorder_s=recorder.spent_ns / 1e9,
            storage_read_bytes=_difference(read_before, read_after),
            machine_cpu_s=_difference(busy_before, busy_after),
        )
        self._wait()
        if saves and self._control.rank == 0:
            shutil.rmtree(directory)
        return sample

    def _prepare(self, directory: Path) -> None:
        if self._control.rank == 0:
            directory.mkdir()
        self._wait()

    def _settle(self, *, drop_cache: bool) -> None:
        """Nothing left to write out, caches as the plan says, and all ranks here at once."""
        if self._control.rank == 0:
            os.sync()
            if drop_cache:
                Path("/proc/sys/vm/drop_caches").write_text("1\n")
        self._wait()
        touch_free_memory(self._plan.bytes_per_rank)
        self._wait()

    def _wait(self) -> None:
        self._control.agree(None)

    def _facts(self, to_load: Path) -> dict[str, Any]:
        files = [path for path in (to_load / "global_step1").iterdir() if path.suffix == ".pt"]
        return {
            "bytes_per_rank": sum(path.stat().st_size for path in files) // self._plan.ranks,
            "files_per_rank": len(files) // self._plan.ranks,
        }

    def _tell(self, record: dict[str, Any]) -> None:
        if self._control.rank == 0:
            with open(self._plan.output, "a") as stream:
                stream.write(json.dumps(record) + "\n")


def _busy_seconds() -> float | None:
    """Processor time used on this machine since boot, from /proc/stat (proc(5)); None elsewhere."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    except OSError:
        return None
    idle = ticks[3] + ticks[4]  # the second waits for I/O
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")


def _read_bytes() -> float | None:
    """Bytes this process has caused to be read from storage: 0 more after a read from the page cache."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/io").read_text().splitlines()
        return float(next(line for line in lines if line.startswith("read_bytes:")).split()[1])
    return None


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def main() -> None:
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text()))
    Rounds(plan, build_state(plan.bytes_per_rank, plan.ranks)).run()
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
