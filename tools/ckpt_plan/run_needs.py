"""What a run needs for the checkpoints of a plan: its configuration, host memory, space and throughput of the storage.

Throughputs, in GB/s (1 GB is 1e9 bytes), are minima; docs/metrics.md defines blocked_s and durable_s:

    durable   bytes of a checkpoint / the target; per host and per rank: the bytes of the one that writes most
    blocked   an engine that writes while training waits: as durable, with the blocked target. An engine that writes in
              the background needs no storage throughput for it while the host's memory takes the state; instead the
              bytes of the rank that writes most must be copied from its device within the target
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.checkpointing.engines.registry import engine_class
from megatron.checkpointing.store.disk_space import exports_left, lack_of_space, no_space, saves_left
from megatron.config import Config, ConfigError
from megatron.config.uris import is_uri

from ..common.formatting import size
from ..restart_bench.free_space import FreeSpace, free_space, resumes
from . import slots
from .compression import FILES, Rates, Verdict
from .kinds import WEIGHTS
from .plan import UPSTREAM, Plan, RankPlan


@dataclass(frozen=True)
class Targets:
    """Seconds for which a save may block training, and within which it must be durable."""

    blocked_s: float
    durable_s: float


@dataclass(frozen=True)
class RunNeeds:
    """`host_bytes`, `host_writes`: of the fullest host of `ranks_per_host` ranks. `free` and `lack`: of --save here."""

    configuration: dict[str, Any]
    ranks_per_host: int
    host_bytes: int
    host_writes: int
    rank_writes: int
    checkpoint_bytes: int
    saves: int
    kept: int
    exports: int  # of --export-hf-interval, and their bytes
    export_bytes: int
    free: int | None
    free_of: str | None
    lack: str | None
    no_room: bool  # for a single checkpoint
    targets: Targets
    in_background: bool
    memory: slots.HostMemory | None  # of engine `memory`


def run_needs(plan: Plan, ranks_per_host: int, targets: Targets, *, coordinator: bool = True) -> RunNeeds:
    """What a run of the plan's configuration needs; queries the free space of the file system of --save.

    Raises ConfigError if --save is no directory, or is below a file.
    """
    config = plan.config
    hosts = _hosts(plan, ranks_per_host)
    one = plan.total_bytes + sum(file.num_bytes for file in plan.commit_files)
    saves, keep = saves_left(config, 0), config.checkpoint.keep_last
    kept = saves if keep is None else min(saves, keep + 1)
    exports, export_bytes = exports_left(config, 0), plan.by_kind[WEIGHTS]
    save = config.checkpoint.save
    room = None if save is None or is_uri(save) else _space(save)  # object storage reports no limit
    lack, no_room = (
        (None, False) if room is None or not one else _lack(config, one, saves, room, exports * export_bytes)
    )
    return RunNeeds(
        configuration=configuration(config),
        ranks_per_host=ranks_per_host,
        host_bytes=max(sum(rank.host_bytes for rank in host) for host in hosts),
        host_writes=max(_writes(host) for host in hosts),
        rank_writes=max(rank.num_bytes for rank in plan.ranks),
        checkpoint_bytes=one,
        saves=saves,
        kept=kept,
        exports=exports,
        export_bytes=exports * export_bytes,
        free=None if room is None else room.free,
        free_of=None if room is None else str(room.directory),
        lack=lack,
        no_room=no_room,
        targets=targets,
        in_background=plan.engine != UPSTREAM and engine_class(plan.engine).asynchronous,
        memory=slots.host_memory((config, plan.layout, plan.vocab_sizes), ranks_per_host, coordinator=coordinator)
        if plan.engine == "memory"
        else None,
    )


def compression(plan: Plan, ranks_per_host: int, rates: Rates) -> Verdict:
    """Whether --checkpoint-compression pays for the files of the host that writes most, with engine lazy's threads."""
    from megatron.checkpointing.engines.lazy.host_cache import DEFAULT_IO_THREADS, STREAMING_THREADS

    flags = plan.config.checkpoint
    threads = flags.io_threads or (STREAMING_THREADS if is_uri(flags.save) else DEFAULT_IO_THREADS)
    host = max(_hosts(plan, ranks_per_host), key=_writes)
    return Verdict(_writes(host), len(host) * threads, rates, FILES)


def _hosts(plan: Plan, ranks_per_host: int) -> list[Sequence[RankPlan]]:
    return [plan.ranks[first : first + ranks_per_host] for first in range(0, len(plan.ranks), ranks_per_host)]


def _space(save: str) -> FreeSpace:
    try:
        return free_space(save)
    except NotADirectoryError as exc:
        raise ConfigError(f"--save {save}: {exc.filename} is no directory; give another") from None


def _lack(config: Config, one: int, saves: int, room: FreeSpace, exports: int) -> tuple[str | None, bool]:
    """Why space will not suffice, or None; and whether a run would be refused for it, as `check_free_space` does.

    `exports`: bytes of all exports, which count unless --export-hf-dir puts them elsewhere.
    """
    options = config.checkpoint
    hopeless = no_space(config, one, room.free)
    if hopeless and resumes(str(options.save), options.load, weights_alone=options.finetune):
        hopeless = None
    lack = hopeless or lack_of_space(config, one, 0, saves, room.free, 0 if options.export_hf_dir else exports)
    if lack and not room.there:
        return f"{lack}. This is the room in {room.directory}, as --save is not there on this host", False
    return lack, hopeless is not None


def _writes(host: Sequence[RankPlan]) -> int:
    return sum(rank.num_bytes for rank in host)


def configuration(config: Config) -> dict[str, Any]:
    """The settings that differ from their default, by their names in pretrain_gpt.py."""
    found: dict[str, Any] = {}
    for values in filter(dataclasses.is_dataclass, vars(config).values()):
        for field in dataclasses.fields(values):
            value = getattr(values, field.name)
            if value != field.default:
                found[field.name] = value
    return dict(sorted(found.items()))


def to_dict(needs: RunNeeds) -> dict[str, Any]:
    """Fields of the JSON, as docs/ckpt_plan.md defines them."""
    return {
        "configuration": needs.configuration,
        "ranks_per_host": needs.ranks_per_host,
        "host_bytes_estimate": needs.host_bytes,
        "memory": None if needs.memory is None else slots.to_dict(needs.memory),
        "saves": needs.saves,
        "kept_at_most": needs.kept,
        "kept_bytes": needs.kept * needs.checkpoint_bytes,
        "exports": needs.exports,
        "export_bytes": needs.export_bytes,
        "free_bytes": needs.free,
        "free_of": needs.free_of,
        "lack": needs.lack,
        "blocked_target_s": needs.targets.blocked_s,
        "durable_target_s": needs.targets.durable_s,
        "storage_GBps_for_blocked": None
        if needs.in_background
        else _GBps(needs.checkpoint_bytes, needs.targets.blocked_s),
        "storage_GBps_for_durable": _GBps(needs.checkpoint_bytes, needs.targets.durable_s),
        "host_GBps_for_durable": _GBps(needs.host_writes, needs.targets.durable_s),
        "rank_GBps_for_durable": _GBps(needs.rank_writes, needs.targets.durable_s),
        "device_to_host_GBps_for_blocked": _GBps(needs.rank_writes, needs.targets.blocked_s),
    }


def _GBps(num_bytes: int, seconds: float) -> float:
    return num_bytes / 1e9 / seconds


def render(needs: RunNeeds, *, show_all: bool) -> str:
    """Text for a terminal; `show_all`: with the configuration."""
    found = to_dict(needs)
    lines: list[str] = []
    if show_all:
        lines += ["", "configuration, where it is not the default:"]
        lines += [f"  {name:34} {_shown(value)}" for name, value in needs.configuration.items()]
    host, kept = size(needs.host_bytes, 2), size(found["kept_bytes"], 2)
    if needs.memory is not None:
        lines += ["", *slots.render(needs.memory).splitlines()]
    else:
        lines += ["", f"host memory, {needs.ranks_per_host} ranks a host: {host} while they save, beside their state"]
    room = f"storage: {needs.saves} saves, of which at most {needs.kept} are there at once: {kept}"
    lines.append(room + ("" if needs.free is None else f"; {size(needs.free, 2)} are free in {needs.free_of}"))
    if needs.exports:
        lines.append(f"storage: {needs.exports} exports (--export-hf-interval): {size(needs.export_bytes, 2)}")
    if needs.lack is not None and not needs.no_room:
        lines.append(f"storage: {needs.lack}")
    if needs.checkpoint_bytes:
        lines += _throughputs(needs, found)
    return "\n".join(lines) + "\n"


def _throughputs(needs: RunNeeds, found: dict[str, Any]) -> list[str]:
    blocked = f"blocked for at most {needs.targets.blocked_s:g} s: "
    if needs.in_background:
        blocked += (
            "nothing of the storage, as this engine writes in the background, while the host memory above is there and "
            f"the save before is durable; {found['device_to_host_GBps_for_blocked']:.3g} GB/s off a device if no "
            "training overlaps the copy"
        )
    else:
        blocked += (
            f"the storage must take {found['storage_GBps_for_blocked']:.3g} GB/s, as this engine writes while training "
            "waits"
        )
    return [
        blocked,
        f"durable within {needs.targets.durable_s:g} s: the storage must take {found['storage_GBps_for_durable']:.3g} "
        f"GB/s, {found['host_GBps_for_durable']:.3g} of them from one host and {found['rank_GBps_for_durable']:.3g} "
        "from one rank",
    ]


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
