"""One rank of a layout: `rank.py PLAN.json`, with RANK and the like set.

To measure, it loads the checkpoint of the other layout once, saves the same state on its own layout, and then loads in
rounds: every variant once, beginning with another one each time. Only the load is timed. Before each, the weights
and masters are zeroed and the moments dropped, as a process has none that has just started, and the files are taken
out of the page cache. Rank 0 writes one JSON line per sample to the plan's output.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.state import SavableState, build_from, touch_free_memory
from benchmarks.reshard.plan import BYTES_PER_PARAMETER, ENGINES, PLAIN, VARIANTS, Plan, model_flags, vocab_size
from megatron.config import Config
from megatron.config.arguments import config_from_args, parse_args
from megatron.parallel.control_plane import ControlPlane
from restart_trace.clock import now_ns
from tools.common import page_cache


class Rank:
    """Carries out a plan."""

    def __init__(self, plan: Plan, state: SavableState) -> None:
        self._plan = plan
        self._engine = state.engine
        self._state = state
        self._control: ControlPlane = state.context.control
        self._directory = Path(plan.directory)
        self._bytes = sum(p.numel() for p in state.engine.module.parameters()) * BYTES_PER_PARAMETER

    def save_source(self) -> None:
        """The checkpoint that the other layouts load, by each engine."""
        for engine in ENGINES:
            self._save(self._directory / f"source_{engine}", engine)

    def measure(self) -> None:
        """A round that is not counted and compares what each variant restored; then those that are counted."""
        self._forget()
        self._load("direct lazy")
        for engine in ENGINES:
            self._save(self._own(engine), engine)
        variants = list(VARIANTS)
        hashes: dict[str, dict[str, str]] = {}
        for round_number in range(-1, self._plan.rounds or 0):
            first = max(0, round_number) % len(variants)
            for variant in variants[first:] + variants[:first]:
                sample, cache = self._sample(variant)
                if round_number < 0:
                    hashes[variant] = self._hashes()
                    self._compare(hashes, variant)
                    continue
                seconds = self._control.gather(sample)
                self._tell({"variant": variant, "page_cache": cache, "seconds": seconds})

    def _own(self, engine: str) -> Path:
        return self._directory / ("own_" + "_".join(map(str, [engine, *self._plan.layout])))

    def _save(self, directory: Path, engine: str) -> None:
        from megatron.checkpointing.engines.options import engine_options
        from megatron.checkpointing.engines.registry import create_engine
        from megatron.checkpointing.state.collect import Progress

        config = self._config(save=str(directory), save_interval=1)
        writer = create_engine(
            engine, engine_options(config.checkpoint, self._control.rank, config.parallel.distributed_timeout_minutes)
        )
        checkpointer = self._state.checkpointer(config=config, checkpoint_engine=writer)
        checkpointer.save(self._engine, Progress(iteration=1))
        checkpointer.background.drain()  # whose thread uses the group of this one meanwhile
        for save in checkpointer.finished():
            if save.error is not None:
                raise RuntimeError(save.error)
        writer.close()

    def _config(self, **checkpoint: Any) -> Config:
        config: Config = self._state.context.config
        return replace(config, checkpoint=replace(config.checkpoint, **checkpoint))

    def _source(self, variant: str) -> Path:
        way, engine = VARIANTS[variant]
        return self._own(engine) if way == PLAIN else self._directory / f"source_{engine}"

    def _load(self, variant: str) -> None:
        from megatron.checkpointing.engines.options import engine_options
        from megatron.checkpointing.engines.registry import create_engine

        _, engine = VARIANTS[variant]
        config = self._config(load=str(self._source(variant)))
        reader = create_engine(
            engine, engine_options(config.checkpoint, self._control.rank, config.parallel.distributed_timeout_minutes)
        )
        checkpointer = self._state.checkpointer(config=config, checkpoint_engine=reader)
        if checkpointer.load(self._engine) is None:
            raise FileNotFoundError(f"{config.checkpoint.load}: no checkpoint to load")

    def _sample(self, variant: str) -> tuple[float, str | None]:
        """Seconds of one load of this rank; on rank 0 also in what state the page cache was."""
        self._forget()
        share = None
        if self._control.rank == 0:
            os.sync()
            files = page_cache.files_below(self._source(variant))
            share = page_cache.drop(files)
        self._control.agree(None)
        touch_free_memory(self._bytes)
        self._control.agree(None)
        start = now_ns()
        self._load(variant)
        end = now_ns()
        self._control.agree(None)
        return (end - start) / 1e9, page_cache.state_of(share) if self._control.rank == 0 else None

    def _forget(self) -> None:
        import torch

        optimizer = self._engine.optimizer
        with torch.no_grad():
            for param in self._engine.module.parameters():
                param.zero_()
            for master in optimizer.state_dict()["single_partition_of_fp32_groups"]:
                master.zero_()
        self._engine.basic_optimizer.state.clear()
        for param in self._engine.module.parameters():
            if getattr(param, "_hp_mapping", None) is not None:
                param._hp_mapping.optim_fragment = None  # views of the moments
        gc.collect()

    def _hashes(self) -> dict[str, str]:
        from megatron.checkpointing.state.hashes import tensor_hashes

        return tensor_hashes(self._engine)

    def _compare(self, hashes: Mapping[str, dict[str, str]], variant: str) -> None:
        """Raises RuntimeError on all ranks if a variant restored other bits than the first one."""
        first = next(iter(hashes))
        wrong = [name for name, value in hashes[first].items() if hashes[variant].get(name) != value]
        problem = f"{variant} restored other bits than {first}: {', '.join(wrong[:5])}" if wrong else None
        failed = self._control.agree(problem)
        if failed:
            raise RuntimeError(f"rank {failed[0][0]}: {failed[0][1]}")

    def _tell(self, record: dict[str, Any]) -> None:
        if self._control.rank == 0:
            with self._plan.output.open("a") as stream:
                stream.write(json.dumps(record) + "\n")


def main() -> None:
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text()))
    tp, pp, _ = plan.layout
    config = config_from_args(parse_args(model_flags(plan.hidden_size, tp, pp)), os.environ)
    rank = Rank(plan, build_from(config, vocab_size(plan.hidden_size)))
    rank.save_source() if plan.rounds is None else rank.measure()
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
