"""Writes restart traces whose truth is known: every duration is a constant below, in milliseconds.

The run: 8 ranks (TP2 PP2 DP2). Cycle 0 trains steps 1 to 8, saves at 5 and is killed after 8. Cycle 1 loads
step 5, trains 6 to 12 and saves at 10. Rank 5 straggles in fsync, rank 6 in reading, rank 2 in imports, rank
4 in training; rank 3 has the largest gap between its spans.

`python -m tests.unit.tools.ckpt_analysis.trace_factory DIRECTORY` writes one.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from restart_trace.schema import CYCLE_FILE_PATTERN, RANK_FILE_PATTERN, SCHEMA_VERSION, SPAN, SUPERVISOR_FILE_PATTERN

MS = 1_000_000
RANKS = 8
RUN_ID = "0123456789ab"
ENGINE = "TorchCheckpointEngine"

START_WALL_NS = 1_760_000_000 * 1_000_000_000  # Unix time of the first process start of cycle 0
CYCLE_1_MS = 20_000  # first process start of cycle 1, after that of cycle 0
SKEW_MS = 1  # rank r starts r times this later

STARTUP_MS = {
    "process_start": 40,
    "imports": 3000,
    "rendezvous": 100,
    "communicators": 50,
    "model_build": 200,
    "data_build": 60,
    "engine_init": 300,
}
SLOW_IMPORT_MS = {2: 3500}
STARTUP_GAP_MS = 25  # after engine_init, on every rank
ITERATION_MS = 100
SLOW_ITERATION_MS = {4: 110}

FSYNC_MS = {rank: 40 for rank in range(RANKS)} | {5: 240}
SERIALIZE_MS = {rank: 15.0 for rank in range(RANKS)} | {3: 12.5}  # per file, within a window of FILE_MS
WRITE_MS = 30
FILE_MS = 50
FILES_PER_RANK = 2
SAVE_TAIL_MS = {rank: 1 for rank in range(RANKS)} | {5: 3}

READ_MS = {rank: 20 for rank in range(RANKS)} | {6: 45}

INJECTED_AFTER_MS = 30  # after the last record of cycle 0
DETECTED_MS, STOPPED_MS, RELAUNCHED_MS = 500, 800, 1000  # after the injection
ASKED_AFTER_MS, ABORT_MS, UNDO_MS = 540, 90, 160  # of ranks that return; after the injection


def file_bytes(rank: int) -> int:
    """Size of each file of a rank."""
    return 500_000 * (rank + 1)


@dataclass
class Options:
    """What to plant in the trace."""

    hosts: int = 1
    load_inside_engine_init: bool = False
    background_flush: bool = False  # the save returns early; flush goes on in a thread
    durable: bool = True
    save_fails_on: tuple[int, ...] = ()
    save_killed_on: tuple[int, ...] = ()  # ranks whose files end within the save of cycle 1
    supervisor: bool = True
    returned: tuple[int, ...] | None = None  # ranks that start cycle 1 in their processes; None: none says it
    reject_newest: bool = False
    run_id: str = RUN_ID
    version: int = SCHEMA_VERSION
    instrument: str = "trainer"
    cores: str = ""  # that every rank may run on, as the kernel lists them
    cpu_limit: float | None = None  # quota of every rank's control group, cores
    wall_ns: int = START_WALL_NS


@dataclass
class RankLog:
    """One rank's file in the making; `now_ms` is its clock, in ms after the run's start."""

    options: Options
    rank: int
    cycle: int
    now_ms: float
    records: list[dict[str, Any]] = field(default_factory=list)
    next_op: int = 0

    def ns(self, ms: float) -> int:
        """Monotonic ns of this rank's host: every host booted at a different time."""
        return round(ms * MS) + self.host_uptime_ns()

    @property
    def returns(self) -> bool:
        """Whether its process was there in the cycle before."""
        return self.cycle > 0 and self.rank in (self.options.returned or ())

    def host(self) -> int:
        return self.rank * self.options.hosts // RANKS if self.rank >= 0 else 0

    def host_uptime_ns(self) -> int:
        return (1_000 + 500 * self.host()) * 1_000_000_000

    def write(self, record_type: str, **fields: Any) -> None:
        self.records.append(fields if record_type == SPAN else {"type": record_type} | fields)

    def process(self, role: str = "rank") -> None:
        tp, dp, pp = self.rank % 2, self.rank // 2 % 2, self.rank // 4
        place = {"tp": tp, "pp": pp, "dp": dp} if self.rank >= 0 else {"tp": -1, "pp": -1, "dp": -1}
        launched: dict[str, Any] = {"engine_asked": "torch", "durability": "fsync"} if role == "rank" else {}
        if role == "rank" and self.options.returned is not None:
            launched["returns"] = int(self.returns)
        self.write(
            "process",
            v=self.options.version,
            run_id=self.options.run_id,
            cycle=self.cycle,
            rank=self.rank,
            **place,
            role=role,
            instrument=self.options.instrument,
            cores=self.options.cores,
            **({} if self.options.cpu_limit is None else {"cpu_limit": self.options.cpu_limit}),
            host=f"node{self.host()}",
            boot_id=f"boot-{self.host()}",
            pid=1000 + self.rank,
            world_size=RANKS if role == "rank" else 0,
            layout={"tp": 2, "pp": 2, "dp": 2} if role == "rank" else {"tp": 0, "pp": 0, "dp": 0},
            process_start_ns=self.ns(self.rank * SKEW_MS if self.returns else self.now_ms),
            process_start_source="os",
            wall_ns=self.options.wall_ns + round(self.now_ms * MS),
            monotonic_ns=self.ns(self.now_ms),
            anchor_error_ns=100 + self.rank,
            **launched,
            versions={"python": "3.11.9", "torch": "2.13.0", "deepspeed": "0.19.8"},
            environment={"RANK": str(self.rank)},
            argv=["pretrain_gpt.py"],
        )

    def begin(self, operation: str, engine: str | None = None, **labels: Any) -> OperationLog:
        op_id = self.next_op
        self.next_op += 1
        named = {"engine": engine} if engine else {}
        self.write("operation_begin", operation=operation, op=op_id, **labels, **named, start_ns=self.ns(self.now_ms))
        return OperationLog(self, op_id)

    def event(self, operation: str, phase: str, detail: str | None = None, step: int | None = None) -> None:
        optional: dict[str, Any] = {k: v for k, v in (("detail", detail), ("step", step)) if v is not None}
        wall_ns = self.options.wall_ns + round(self.now_ms * MS)
        if self.rank < 0:
            optional["cycle"] = self.cycle
        self.write("event", operation=operation, phase=phase, **optional, time_ns=self.ns(self.now_ms), wall_ns=wall_ns)

    def iteration(self, step: int) -> None:
        start = self.now_ms
        self.now_ms += SLOW_ITERATION_MS.get(self.rank, ITERATION_MS)
        loss = 6.0 - step / 7
        self.write("iteration", step=step, start_ns=self.ns(start), end_ns=self.ns(self.now_ms), loss=loss)


@dataclass
class OperationLog:
    """One operation in the making."""

    log: RankLog
    op_id: int

    def label(self, **labels: Any) -> None:
        self.log.write("operation_label", op=self.op_id, **labels)

    def span(self, phase: str, detail: str | None, took_ms: float, **fields: Any) -> None:
        """A span that begins now; time moves on to its end."""
        self.at(self.log.now_ms, took_ms, phase, detail, **fields)
        self.log.now_ms += took_ms

    def at(
        self,
        start_ms: float,
        window_ms: float,
        phase: str,
        detail: str | None,
        *,
        busy_ms: float | None = None,
        blocking: bool = True,
        **fields: Any,
    ) -> None:
        """A span at any time, which leaves the clock alone."""
        optional: dict[str, Any] = {"detail": detail} if detail else {}
        shorter = {} if busy_ms is None else {"duration_ns": round(busy_ms * MS)}
        background = {} if blocking else {"thread": "flush", "blocking": False}
        self.log.write(
            SPAN,
            op=self.op_id,
            phase=phase,
            **optional,
            **fields,
            start_ns=self.log.ns(start_ms),
            end_ns=self.log.ns(start_ms + window_ms),
            **shorter,
            **background,
        )

    def end(self, error: str | None = None, **fields: Any) -> None:
        failed = {"error": error} if error else {}
        self.log.write(
            "operation_end",
            op=self.op_id,
            end_ns=self.log.ns(self.log.now_ms),
            outcome="failed" if error else "ok",
            **fields,
            **failed,
        )


def save(log: RankLog, step: int) -> None:
    """collect 10, device_to_host 20, two files, fsync, barrier until rank 5 is done, commit 9 on rank 0."""
    rank, options = log.rank, log.options
    op = log.begin("save", ENGINE, tag=f"global_step{step}", step=step)
    op.span("collect", None, 10)
    op.span("device_to_host", None, 20)
    for index in range(FILES_PER_RANK):
        name = f"rank_{rank}_{index}.pt"
        op.at(log.now_ms, FILE_MS, "serialize", None, busy_ms=SERIALIZE_MS[rank], file=name)
        op.at(log.now_ms, FILE_MS, "flush", "write", busy_ms=WRITE_MS, file=name, bytes=file_bytes(rank))
        log.now_ms += FILE_MS
    if step == 10 and rank in options.save_killed_on:
        return
    if options.background_flush:
        op.at(log.now_ms, FSYNC_MS[rank], "flush", "fsync", blocking=False, bytes=2 * file_bytes(rank))
        log.now_ms += FSYNC_MS[rank]
    else:
        op.span("flush", "fsync", FSYNC_MS[rank], bytes=2 * file_bytes(rank))
    if step == 10 and options.save_fails_on:
        reason = f"rank {options.save_fails_on[0]}: OSError: [Errno 28] No space left on device"
        op.span("barrier", None, 241 - FSYNC_MS[rank])
        op.end(error=reason, bytes=0, num_files=0, durable=False)
        return
    op.span("barrier", None, 241 - FSYNC_MS[rank])
    if rank == 0:
        op.span("commit", "manifest", 5)
        op.span("commit", "publish", 3)
        op.span("commit", "prune", 1)
    else:
        op.span("barrier", None, 9)
    log.now_ms += SAVE_TAIL_MS[rank]
    op.end(bytes=FILES_PER_RANK * file_bytes(rank), num_files=FILES_PER_RANK, durable=options.durable)


def load(log: RankLog) -> None:
    """discover 3, two files (read, deserialize 10), host_to_device 5, all_gather 8, barrier 4, a gap of 1."""
    rank = log.rank
    op = log.begin("load", ENGINE)
    op.span("discover", None, 3)
    if log.options.reject_newest:
        log.event("load", "checkpoint_rejected", "global_step8: rank_0_0.pt has 12 of 500000 bytes")
    op.label(tag="global_step5", step=5)  # known only after discovery
    for index in range(FILES_PER_RANK):
        name = f"rank_{rank}_{index}.pt"
        op.span("load", "read", READ_MS[rank], file=name, bytes=file_bytes(rank))
        op.span("load", "deserialize", 10, file=name)
    op.span("load", "host_to_device", 5)
    op.span("redistribute", "all_gather", 8)
    op.span("barrier", None, 4)
    log.now_ms += 1
    op.end(bytes=FILES_PER_RANK * file_bytes(rank), num_files=FILES_PER_RANK)


def begin_startup(log: RankLog) -> OperationLog:
    """The start-up with what a rank that returns does before it is told to start, which it is now."""
    if not log.returns:
        return log.begin("startup")
    told_ms, log.now_ms = log.now_ms, injected_ms(log.options) + ASKED_AFTER_MS
    op = log.begin("startup")
    op.span("abort", None, ABORT_MS)
    op.span("return", "undo", UNDO_MS)
    op.span("return", "barrier", told_ms - log.now_ms)
    return op


def start_up(log: RankLog, first_step: int, loads: bool) -> tuple[OperationLog, float]:
    """Everything up to the end of the first step; returns the operation and that end."""
    op = begin_startup(log)
    for phase, usual_ms in STARTUP_MS.items():
        took = SLOW_IMPORT_MS.get(log.rank, usual_ms) if phase == "imports" else usual_ms
        start = log.now_ms
        if phase == "engine_init" and loads and log.options.load_inside_engine_init:
            log.now_ms += 100
            load(log)
            log.now_ms += took - 100  # engine_init's own time is as ever
            op.at(start, log.now_ms - start, phase, None)
        else:
            op.span(phase, "world" if phase == "communicators" else None, took)
    if loads and not log.options.load_inside_engine_init:
        load(log)
    log.now_ms += STARTUP_GAP_MS
    log.write("runtime", engine_used=ENGINE, engine_asked="torch", optimizer="FusedAdam", backend="gloo")
    loop_start = log.now_ms
    log.iteration(first_step)
    op.at(loop_start, log.now_ms - loop_start, "first_step", None)
    op.end()
    return op, log.now_ms


def rank_log(options: Options, rank: int, cycle: int) -> RankLog:
    """All records of one rank in one cycle."""
    log = RankLog(options, rank, cycle, cycle * CYCLE_1_MS + rank * SKEW_MS)
    log.process()
    first, last, saved_at = (1, 8, 5) if cycle == 0 else (6, 12, 10)
    op, first_step_end = start_up(log, first, loads=cycle > 0)
    for step in range(first + 1, last + 1):
        log.iteration(step)
        if cycle > 0 and step == 8:
            op.at(first_step_end, log.now_ms - first_step_end, "caught_up", None)
        if step == saved_at:
            save(log, step)
            if cycle > 0 and rank in options.save_killed_on:
                break
    return log


def injected_ms(options: Options) -> float:
    """When the fault is injected into cycle 0."""
    last_ms = max(log.now_ms for log in (rank_log(options, rank, 0) for rank in range(RANKS)))
    return last_ms + INJECTED_AFTER_MS


def supervisor_log(options: Options) -> RankLog:
    """Kills cycle 0 after its last record and relaunches it."""
    log = RankLog(options, -1, 0, injected_ms(options))
    log.process(role="supervisor")
    injected = log.now_ms
    for phase, after in (("injected", 0), ("detected", DETECTED_MS), ("stopped", STOPPED_MS)):
        log.now_ms = injected + after
        log.event("failure", phase, "sigkill" if phase == "injected" else None, step=8)
    log.now_ms = injected + RELAUNCHED_MS
    log.event("failure", "relaunched")
    return log


def dump(path: Path, records: list[dict[str, Any]]) -> None:
    lines = [json.dumps(record, separators=(",", ":")) for record in records]
    path.write_text("".join(line + "\n" for line in lines))


def ended_trace(directory: Path) -> Path:
    """A trace of ranks of another host, all of which record their end."""
    trace = write_trace(directory)
    for path in trace.glob("rank_*.jsonl"):
        record_end(path)
    return trace


def record_end(path: Path) -> None:
    """Write what a rank writes last of all."""
    last = max(json.loads(line).get("end_ns", 0) for line in path.read_text().splitlines())
    end = {"type": "event", "operation": "process", "phase": "ended", "time_ns": last + 1, "wall_ns": last + 1}
    with path.open("a") as file:
        file.write(json.dumps(end) + "\n")


def write_trace(directory: Path, options: Options | None = None) -> Path:
    """Write the run into `directory`, which is made if missing; returns it."""
    options = options or Options()
    directory.mkdir(parents=True, exist_ok=True)
    for cycle in (0, 1):
        claim = {"run_id": options.run_id, "cycle": cycle, "launch_key": f"launch-{cycle}", "wall_ns": 0}
        (directory / CYCLE_FILE_PATTERN.format(cycle=cycle)).write_text(json.dumps(claim) + "\n")
        for rank in range(RANKS):
            name = RANK_FILE_PATTERN.format(rank=rank, cycle=cycle)
            dump(directory / name, rank_log(options, rank, cycle).records)
    if options.supervisor:
        dump(directory / SUPERVISOR_FILE_PATTERN.format(index=0), supervisor_log(options).records)
    return directory


if __name__ == "__main__":
    write_trace(Path(sys.argv[1]))
