"""The records of one rank of the made-up run, as text: fast, since a large run has ten million of them."""

from __future__ import annotations

import json

from benchmarks.synthetic_traces.schedule import engine_ready, loop_start
from benchmarks.synthetic_traces.shape import RANKS_PER_HOST
from benchmarks.synthetic_traces.times import COMMIT_US, STARTUP_PHASES, TAIL_US, Cycle, Save, Times, late
from restart_trace.schema import SCHEMA_VERSION

RUN_ID = "5eed5eed5eed"
ENGINE = "TorchCheckpointEngine"
START_WALL_NS = 1_760_000_000 * 1_000_000_000  # Unix time of the first process start
CLOCK_OFFSET_NS = 3_000_000_000  # of the host with clock-offset
_VALUES = '{"rss_bytes":%d,"page_cache_bytes":%d,"dirty_bytes":%d}'


class RankLines:
    """Lines of one rank in one cycle. Arguments called `us` are microseconds since the run's start."""

    def __init__(self, times: Times, cycle: Cycle, rank: int, version: int = SCHEMA_VERSION) -> None:
        self.times, self.cycle, self.rank = times, cycle, rank
        self.lines: list[str] = []
        host = max(rank, 0) // RANKS_PER_HOST
        self.host = host
        self._uptime_ns = (1_000 + 7 * host) * 1_000_000_000  # every host booted at another time
        ahead = host == times.shape.planted_host("clock-offset")
        self._clock_error_ns = CLOCK_OFFSET_NS if ahead else 0
        self._version = version
        self._next_op = 0

    def write(self, record_type: str, rest: str) -> None:
        """A record that is no span. `rest`: the other fields as JSON without braces."""
        self.lines.append(f'{{"type":"{record_type}",{rest}}}\n')

    def ns(self, us: int) -> int:
        return us * 1000 + self._uptime_ns

    def process(self, us: int, role: str = "rank") -> None:
        shape, is_rank = self.times.shape, role == "rank"
        fields = {
            "v": self._version,
            "run_id": RUN_ID,
            "cycle": self.cycle.number,
            "rank": self.rank,
            **(shape.coordinates(self.rank) if is_rank else {"tp": -1, "pp": -1, "dp": -1}),
            "role": role,
            "instrument": "trainer",
            "host": f"node{self.host:04d}",
            "boot_id": f"boot-{self.host:04d}",
            "pid": 1000 + self.rank,
            "world_size": shape.ranks if is_rank else 0,
            "layout": shape.layout if is_rank else {"tp": 0, "pp": 0, "dp": 0},
            "process_start_ns": self.ns(us),
            "process_start_source": "os",
            "wall_ns": START_WALL_NS + us * 1000 + self._clock_error_ns,
            "monotonic_ns": self.ns(us),
            "anchor_error_ns": 100,
            **({"engine_asked": "torch", "durability": "fsync"} if is_rank else {}),
            "versions": {"python": "3.11.9", "torch": "2.13.0"},
            "environment": {},
            "argv": ["pretrain_gpt.py", "--num-layers", "32"],
        }
        self.write("process", json.dumps(fields, separators=(",", ":"))[1:-1])

    def begin(self, operation: str, us: int, labels: str) -> str:
        """Begins an operation; returns the field by which its other records name it."""
        op = f'"op":{self._next_op},'
        self._next_op += 1
        self.write("operation_begin", f'"operation":"{operation}",{op}{labels}"start_ns":{self.ns(us)}')
        if operation != "startup":
            self._probe(op, "start", us)
        return op

    def end(self, op: str, us: int, facts: str) -> None:
        if facts:
            self._probe(op, "end", us)
        self.write("operation_end", f'{op}"end_ns":{self.ns(us)},"outcome":"ok"{facts}')

    def span(self, op: str, what: str, start: int, window: int, busy: int | None = None, thread: str = "") -> int:
        """A span of phase, detail, file and bytes `what`; returns its end. A `thread` is in the background."""
        begin, end = self.ns(start), self.ns(start + window)
        shorter = f',"duration_ns":{busy * 1000}' if busy is not None and busy != window else ""
        background = f',"thread":"{thread}","blocking":false' if thread else ""
        self.lines.append(f'{{{op}{what},"start_ns":{begin},"end_ns":{end}{shorter}{background}}}\n')
        return start + window

    def iteration(self, step: int, start: int, end: int) -> None:
        window = f'"start_ns":{self.ns(start)},"end_ns":{self.ns(end)}'
        self.write("iteration", f'"step":{step},{window},"loss":{6 - step / 1000}')

    def event(self, phase: str, us: int, detail: str = "") -> None:
        cycle = f'"cycle":{self.cycle.number},' if self.rank < 0 else ""
        moment = f'{cycle}"time_ns":{self.ns(us)},"wall_ns":{START_WALL_NS + us * 1000}'
        self.write("event", f'"operation":"failure","phase":"{phase}",{detail}{moment}')

    def _probe(self, op: str, at: str, us: int) -> None:
        """On one rank of each host, and a sample at the end."""
        if self.rank % RANKS_PER_HOST == 0:
            values = _VALUES % (2_000_000_000 + us, 8_000_000_000 + us, 1_000_000 + us)
            self.write("probe", f'{op}"at":"{at}","time_ns":{self.ns(us)},"values":{values}')
            if at == "end":
                self.write("sample", f'"time_ns":{self.ns(us)},"values":{values}')


def rank_lines(times: Times, cycle: Cycle, rank: int, version: int = SCHEMA_VERSION) -> list[str]:
    """All records of a rank in a cycle, in the order in which they are written."""
    log = RankLines(times, cycle, rank, version)
    startup, moment = _start(log)
    saves = {save.step: save for save in cycle.saves}
    if cycle.first_step in saves:
        _save(log, saves[cycle.first_step])
    if cycle.caught_up == cycle.first_step:
        log.span(startup, '"phase":"caught_up"', moment, 0)
    for step, begin in cycle.iterations.items():
        start = begin + late(rank)
        end = start + times.iteration(step, rank)
        log.iteration(step, start, end)
        if step == cycle.caught_up:
            log.span(startup, '"phase":"caught_up"', moment, end - moment)
        if step in saves:
            _save(log, saves[step])
    return log.lines


def _start(log: RankLines) -> tuple[str, int]:
    """Process start to the end of the first step; returns the operation's fields and that end."""
    times, cycle, rank = log.times, log.cycle, log.rank
    start = moment = cycle.begin + late(rank)
    log.process(start)
    op = log.begin("startup", start, "")
    for phase, took in zip(STARTUP_PHASES, times.startup(cycle.number, rank), strict=True):
        took = cycle.together - moment if phase == "rendezvous" else took
        detail = ',"detail":"world"' if phase == "communicators" else ""
        moment = log.span(op, f'"phase":"{phase}"{detail}', moment, took)
    runtime = f'"engine_used":"{ENGINE}","engine_asked":"torch","optimizer":"FusedAdam","accelerator":"cuda"'
    log.write("runtime", f'{runtime},"backend":"nccl","parameters":1000000')
    if cycle.loaded:
        _load(log)
    begin = loop_start(times, cycle, rank)
    log.iteration(cycle.first_step, begin, cycle.first_step_end)
    log.span(op, '"phase":"first_step"', begin, cycle.first_step_end - begin)
    log.end(op, cycle.first_step_end, "")
    return op, cycle.first_step_end


def _load(log: RankLines) -> None:
    times, cycle, rank = log.times, log.cycle, log.rank
    load = times.load(engine_ready(times, cycle, rank), rank)
    size, tag = times.bytes_per_file(rank), f"global_step{cycle.resumed}"
    op = log.begin("load", load.start, "")
    now = log.span(op, '"phase":"discover"', load.start, load.discover)
    log.write("operation_label", f'{op}"tag":"{tag}","step":{cycle.resumed},"engine":"{ENGINE}"')
    for f in range(times.shape.files):
        file = f'"file":"rank_{rank:05d}_{f}.pt"'
        now = log.span(op, f'"phase":"load","detail":"read",{file},"bytes":{size}', now, load.read[f])
        now = log.span(op, f'"phase":"load","detail":"verify",{file},"bytes":{size}', now, load.verify[f])
        now = log.span(op, f'"phase":"load","detail":"deserialize",{file}', now, load.deserialize[f])
    now = log.span(op, '"phase":"load","detail":"host_to_device"', now, load.copy)
    now = log.span(op, '"phase":"redistribute","detail":"all_gather"', now, load.gather)
    now = log.span(op, '"phase":"barrier"', now, cycle.loaded - now)
    files = times.shape.files
    facts = f',"bytes":{files * size},"num_files":{files}'
    log.end(op, now + TAIL_US, facts)


def _save(log: RankLines, save: Save) -> None:
    times, rank = log.times, log.rank
    part = times.save(save, rank)
    labels = f'"tag":"{save.tag}","step":{save.step},'
    op = log.begin("save", part.start, f'{labels}"engine":"{ENGINE}",')
    now = part.start
    if part.waited:
        now = log.span(op, '"phase":"wait_previous"', now, part.waited)
    now = log.span(op, '"phase":"collect"', now, part.collect)
    now = log.span(op, '"phase":"device_to_host"', now, part.copy)
    _files(log, save, op, now)
    if not save.finished:
        return
    writer = "ckpt-commit" if times.shape.asynchronous else ""
    log.span(op, '"phase":"barrier"', part.arrival, save.left - part.arrival, thread=writer)
    now = save.left
    if rank == 0:
        for detail, took in COMMIT_US.items():
            now = log.span(op, f'"phase":"commit","detail":"{detail}"', now, took, thread=writer)
    else:
        log.span(op, '"phase":"barrier"', now, save.over - now, thread=writer)
    if save.drain_from:
        begin = save.drain_from + late(rank)
        log.span(op, '"phase":"wait_previous"', begin, save.over - begin)
    files = times.shape.files
    facts = f',"bytes":{files * times.bytes_per_file(rank)},"num_files":{files},"durable":true'
    log.end(op, save.end(rank), facts)


def _files(log: RankLines, save: Save, op: str, now: int) -> None:
    """Serializing and writing alternate within one window per file; then each file is synchronised."""
    times, rank = log.times, log.rank
    part, size = times.save(save, rank), times.bytes_per_file(rank)
    writer = "ckpt-writer" if times.shape.asynchronous else ""
    names = [f'"file":"rank_{rank:05d}_{f}.pt"' for f in range(times.shape.files)]
    for f, name in enumerate(names):
        window = part.window(f)
        log.span(op, f'"phase":"serialize",{name}', now, window, part.serialize[f], writer)
        write = f'"phase":"flush","detail":"write",{name},"bytes":{size}'
        now = log.span(op, write, now, window, part.write[f], writer)
    if save.finished:
        for f, name in enumerate(names):
            sync = f'"phase":"flush","detail":"fsync",{name},"bytes":{size}'
            now = log.span(op, sync, now, part.fsync[f], thread=writer)


def supervisor_lines(times: Times, cycle: Cycle, failure: dict[str, int]) -> list[str]:
    """What killed the first cycle and launched the second recorded."""
    log = RankLines(times, cycle, -1)
    log.process(cycle.begin, role="supervisor")
    for phase, us in failure.items():
        log.event(phase, us, '"detail":"sigkill",' if phase == "injected" else "")
    return log.lines
