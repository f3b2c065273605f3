"""One rank of a measurement: `python -m tools.ckpt_overhead.rank PLAN.json`, with RANK and the like set.

Rounds of all variants, in every order in turn. Only the variant itself is timed: directories are made and
removed, and dirty pages written out, between them. Rank 0 writes one JSON line per sample to the plan's output.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.restart_trace.clock import now_ns
from tools.ckpt_overhead.plan import FAMILIES, Plan
from tools.ckpt_overhead.state import SavableState, build_state
from tools.ckpt_overhead.variants import Variants


@dataclass(frozen=True)
class Sample:
    """One timed operation of one rank. `storage_read_bytes` is None where the kernel does not tell."""

    wall_s: float
    cpu_s: float
    recorder_s: float
    storage_read_bytes: int | None


class Rounds:
    """Runs the variants of this rank and gathers the samples of all ranks on rank 0."""

    def __init__(self, plan: Plan, state: SavableState) -> None:
        self._plan = plan
        self._control = state.checkpointer.control
        self._directory = Path(plan.directory)
        trace_file = self._directory / f"trace_rank_{self._control.rank}.jsonl"
        self._variants = Variants(state, trace_file)

    def run(self) -> None:
        """A checkpoint to load, then a round that is not counted, then those that are."""
        to_load = self._directory / "to_load"
        self._prepare(to_load)
        self._variants.run("save", "untraced", to_load)()
        self._tell({"facts": self._facts(to_load)})
        before = self._processor_seconds()
        for round_number in range(-1, self._plan.rounds):
            for family in self._plan.families:
                orders = list(itertools.permutations(FAMILIES[family]))
                for variant in orders[round_number % len(orders)]:
                    sample = self._sample(family, variant, to_load)
                    gathered = self._control.gather(asdict(sample))
                    if round_number >= 0:
                        self._tell(
                            {"round": round_number, "family": family, "variant": variant, "ranks": gathered}
                        )

        self._tell({"others_share": _others_share(before, self._processor_seconds())})

    def _processor_seconds(self) -> tuple[float, float, float] | None:
        """(all processors there are, all in use, in use by the ranks) so far; on rank 0, and None elsewhere."""
        mine = self._control.gather(time.process_time())
        if mine is None:
            return None
        return (*_system_processor_seconds(), sum(mine))

    def _sample(self, family: str, variant: str, to_load: Path) -> Sample:
        saves = family in ("save", "write")
        directory = self._directory / variant if saves else to_load
        if saves:
            self._prepare(directory)
        function = self._variants.run(family, variant, directory)
        self._settle(drop_cache=self._plan.cold and not saves)
        recorder = self._variants.recorder
        recorder.spent_ns = 0
        read_before, cpu_before = _storage_read_bytes(), time.process_time()
        start = now_ns()
        function()
        end = now_ns()
        cpu_after, read_after = time.process_time(), _storage_read_bytes()
        sample = Sample(
            wall_s=(end - start) / 1e9,
            cpu_s=cpu_after - cpu_before,
            recorder_s=recorder.spent_ns / 1e9,
            storage_read_bytes=None
            if read_before is None or read_after is None
            else read_after - read_before,
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


def _system_processor_seconds() -> tuple[float, float]:
    """(passed on all processors, of that in use) since boot, from /proc/stat (proc(5)); NaN elsewhere."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    except OSError:
        return math.nan, math.nan
    idle = ticks[3] + ticks[4]  # the second waits for I/O
    return sum(ticks) / os.sysconf("SC_CLK_TCK"), (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")


def _others_share(
    before: tuple[float, float, float] | None, after: tuple[float, float, float] | None
) -> float | None:
    if before is None or after is None:
        return None
    passed, used, own = (late - early for early, late in zip(before, after, strict=True))
    share = (used - own) / passed if passed else math.nan
    return None if math.isnan(share) else max(0.0, share)


def _storage_read_bytes() -> int | None:
    """Bytes this process has caused to be read from storage: 0 more after a read from the page cache."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])
    return None


def main() -> None:
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text()))
    Rounds(plan, build_state(plan.bytes_per_rank, plan.ranks)).run()
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
