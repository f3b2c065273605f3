"""Makes each system call of a save, and of a start, fail in each way, and looks at what the next launch finds.

    python -m tests.faults.sweep --processes 2        every fault at every call, in a directory
    python -m tests.faults.sweep --stored --every 7   in object storage, one fault at every seventh call
    python -m tests.faults.sweep --two-ranks --every 7  in one of two ranks
    python -m tests.faults.sweep --scenario lazy --of save --fault 'EIO at rename 2'

A fault is survived if the save is whole, or told as failed with the checkpoint before it intact; and if a start
loads the newest checkpoint that is whole and tells which it has passed over, or ends with an error that is one of
those that the trainer tells by name. Whatever is loaded has the state that was saved, bit for bit.

exit status: 0 all were survived, 1 not, or none was injected
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.engines import EXPECTED
from tests.faults.injection import HANGS_S, Fault, Traced, faults_at, run_traced
from tests.faults.repeated import Repeated
from tests.faults.system_calls import KILL, MEMORY
from tests.faults.verdicts import (
    FORMER,
    MISSED,
    NEW,
    SAVE,
    START,
    Directory,
    Place,
    Prefix,
    Verdict,
    digest,
    passed_over,
)
from tests.huge_pages import gather_memory

if TYPE_CHECKING:
    from tests.faults.launches import Ended, Trained
    from tests.faults.two_ranks import TwoRanks

# Storage that does not answer costs the time that the client waits: by default two minutes.
_SOON = ["--storage-deadline", "5"]
_SHARING = ["--checkpoint-files-per-node", "1"]
# Name -> flags. `memory` keeps saves in slots, of which calls count, too.
SCENARIOS: dict[str, list[str]] = {
    **{engine: ["--checkpoint-engine", engine] for engine in EXPECTED},
    "lazy-buffered": ["--checkpoint-engine", "lazy", "--direct-io", "off", "--checkpoint-durability", "none"],
    "lazy-zstd": ["--checkpoint-engine", "lazy", "--checkpoint-compression", "zstd"],
    "torch-stored": ["--checkpoint-engine", "torch", *_SOON],
    "lazy-stored": ["--checkpoint-engine", "lazy", *_SOON],
    "torch-rank-0": ["--checkpoint-engine", "torch"],
    "torch-rank-1": ["--checkpoint-engine", "torch"],
    "lazy-rank-0": ["--checkpoint-engine", "lazy"],
    "lazy-rank-1": ["--checkpoint-engine", "lazy"],
    "lazy-shared": ["--checkpoint-engine", "lazy", *_SHARING],
    "lazy-shared-rank-0": ["--checkpoint-engine", "lazy", *_SHARING],
    "lazy-shared-rank-1": ["--checkpoint-engine", "lazy", *_SHARING],
}
# What a launcher sets for one rank.
_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "LOCAL_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
}  # fmt: skip
_WHOLE = ("torch", "lazy")  # one that is synchronous, and one that is not: all calls on --save count
STORED = ("torch-stored", "lazy-stored")  # in object storage
TWO_RANKS = {name: int(name[-1]) for name in SCENARIOS if "-rank-" in name}  # -> the one in which a call fails
_ONE_RANK = [name for name in SCENARIOS if name not in STORED and name not in TWO_RANKS]  # in a directory
_SLOTS = f"{MEMORY}megatron_slot"


@dataclass
class Scenario:
    """One engine that saves to a place of its own, with two checkpoints there before each fault."""

    name: str
    trained: Trained
    place: Place
    hashes: Mapping[int, str]  # step -> hashes of its state
    known: dict[str, Ended] = field(default_factory=dict)  # what a start makes of what is there, by its content
    slots: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        place = self.place
        self.config = self.trained.config(
            "--save", place.location, "--load", place.location, "--keep-last", "2", "--verify-restored-state",
            "--save-interval", "1", "--restart-trace", "off", *place.flags, *SCENARIOS[self.name],
        )  # fmt: skip
        self._next_launch = Repeated(self._start_from_nothing)

    def _start_from_nothing(self) -> Ended:
        self.trained.forget()
        return self.trained.start(self.config)

    def prepare(self, step: int) -> None:
        """Save the live state as that of `step`; what is there then is what each fault begins with."""
        ended = self._result(self._traced(lambda: self.trained.save(self.config, step), None))
        assert ended.failed is None, ended.failed
        self.place.keep()
        self.slots = slot_contents()

    def reset(self) -> None:
        self.place.reset()
        restore_slots(self.slots or [b""] * len(slot_contents()))

    def run(self, of: str, fault: Fault | None) -> Traced:
        self.reset()
        if of == SAVE:
            return self._traced(lambda: self.trained.save(self.config, NEW), fault)
        return self._traced(lambda: self.trained.start(self.config), fault)

    def _traced(self, function: Callable[[], Ended], fault: Fault | None) -> Traced:
        def is_watched(path: str) -> bool:
            return path.startswith(_SLOTS) or self.place.is_watched(path)

        return run_traced(function, is_watched, fault, sockets=self.place.has_sockets)

    def _result(self, traced: Traced) -> Ended:
        assert traced.raised is None and traced.result is not None, traced.raised or f"status {traced.status}"
        return traced.result

    def faults(self, of: str) -> list[list[Fault]]:
        """Of each call, in the order of a run without a fault: all that can happen to it.

        How many calls a socket takes is chance: of several runs the shortest, whose calls most others have, too.
        """
        return faults_at(min((self._calls(of) for _ in range(3 if self.place.has_sockets else 1)), key=len))

    def _calls(self, of: str) -> Sequence[str]:
        traced = self.run(of, None)
        ended = self._result(traced)
        assert ended.failed is None and ended.warnings == [], ended
        return traced.calls

    def judge(self, of: str, fault: Fault) -> Verdict:
        began = time.monotonic()
        traced = self.run(of, fault)
        wrong, said = self._wrong_with(of, fault, traced)
        ended: Ended | None = traced.result
        outcome = wrong or ("told" if said is not None or ended is None else "whole")
        return Verdict(self.name, of, fault, traced.hit, outcome, said, time.monotonic() - began)

    def _wrong_with(self, of: str, fault: Fault, traced: Traced) -> tuple[str | None, str | None]:
        """(what is wrong or None, what was said of a failure or None)."""
        ended: Ended | None = traced.result
        if traced.hit is None:
            return MISSED if self.place.has_sockets else "the fault hit no call", None
        if traced.hangs:
            return "hangs", None
        if traced.raised is not None:
            return f"ends with {traced.raised}", None
        if ended is None and fault.effect != KILL:
            return f"ended with status {traced.status}", None
        said = None if ended is None else ended.failed
        if fault.effect == KILL:
            self._next_launch.end()  # what a crash leaves is judged by a new process, as it will be
        if of == START:
            return self._wrong_with_start(ended), said or passed_over(ended)
        return self._wrong_with_save(ended), said

    def _wrong_with_start(self, ended: Ended | None) -> str | None:
        if ended is not None and ended.failed is None:
            if ended.step == 0:
                return "started from iteration 0"
            if ended.hashes != self.hashes[ended.step or 0]:
                return f"loaded another state than that of iteration {ended.step}"
            if ended.step != FORMER and passed_over(ended) is None:
                return f"loaded iteration {ended.step} without a word"
        return self._wrong_with_next([FORMER])

    def _wrong_with_save(self, ended: Ended | None) -> str | None:
        if ended is None:  # killed
            return self._wrong_with_next([FORMER, NEW])
        expected = [NEW] if ended.failed is None else [FORMER]
        if self.config.checkpoint.checkpoint_engine != "memory":
            return self._wrong_with_next(expected)
        # A save that storage has refused may be whole in memory.
        wrong = self._wrong_with_next([*expected, NEW])
        restore_slots([b""] * len(slot_contents()))
        return wrong or self._wrong_with_next(expected)

    def _wrong_with_next(self, expected: Sequence[int]) -> str | None:
        """What is wrong with what the next launch loads, without a fault."""
        content = digest(
            {"place": self.place.content().encode()} | {f"slot {n}": c for n, c in enumerate(slot_contents())}
        )
        if content not in self.known:
            ended = self._next_launch()
            if ended is None or ended.failed is not None or ended.step not in expected:
                self._next_launch.end()  # a new process has the last word
                ended = self._next_launch()
            if ended is None:
                return "then a start ends by itself, or not at all: see above"
            self.known[content] = ended
        ended = self.known[content]
        if ended.failed is not None:
            return f"then a start fails: {ended.failed}"
        if ended.step is None or ended.step not in expected:
            return f"then a start loads iteration {ended.step}"
        if ended.hashes != self.hashes[ended.step]:
            return f"then a start loads another state than that of iteration {ended.step}"
        return None


def _slot_files() -> list[int]:
    from megatron.peers.memory_slots import held_slots

    return [fd for mine in held_slots() or [] for slot in mine for fd in (slot.data, slot.record_file)]


def slot_contents() -> list[bytes]:
    return [os.pread(fd, os.fstat(fd).st_size, 0) for fd in _slot_files()]


def restore_slots(contents: Sequence[bytes]) -> None:
    for fd, content in zip(_slot_files(), contents, strict=True):
        os.ftruncate(fd, 0)
        os.pwrite(fd, content, 0)


def _import_all() -> None:
    """Import what a rank imports, as a rank. A second call takes almost no time."""
    os.environ |= _ENVIRONMENT
    from megatron.training.heavy_imports import import_for_forks

    import_for_forks()


@contextlib.contextmanager
def prepared(names: Sequence[str], root: Path) -> Iterator[Sequence[Scenario | TwoRanks]]:
    """The scenarios, each with checkpoints of two steps; the live state is that of a third.

    Those of TWO_RANKS need a process without an engine, which has threads: they cannot come with others.
    """
    _import_all()
    from megatron.checkpointing.engines.registry import engine_class
    from megatron.checkpointing.store import ownership
    from megatron.checkpointing.store.bucket import generations
    from megatron.peers.memory_slots import hold_slots
    from tests.dist import forked_writers
    from tests.faults import launches

    # A heartbeat is a call that comes in a slow run and not in a fast one: faults are numbered by the calls of another.
    ownership.HEARTBEAT_S = generations.HEARTBEAT_S = HANGS_S
    ownership.PATIENCE_S = generations.PATIENCE_S = 0.1  # of a start that looks for one: there is no other launch
    for name in names:
        engine_class(SCENARIOS[name][1])  # imported once
    hold_slots(1)
    forked_writers.install()
    launches.copy_data(root / "data")
    if TWO_RANKS.keys() & names:
        from tests.faults.two_ranks import TwoRanks

        made: dict[tuple[str, ...], TwoRanks] = {}  # flags -> the first with them
        scenarios = []
        for name in names:
            flags = tuple(SCENARIOS[name])
            like = made.get(flags)
            scenarios.append(TwoRanks(name, flags, TWO_RANKS[name], root / "data", root / name, like))
            made.setdefault(flags, scenarios[-1])
        gather_memory()
        yield scenarios
        return
    trained = launches.Trained(root / "data")
    hashes: dict[int, str] = {}
    with contextlib.ExitStack() as held:
        if any(name in STORED for name in names):
            from tests.object_storage import environment_of, serving

            held.enter_context(environment_of(held.enter_context(serving()).environment()))
        scenarios = [Scenario(name, trained, _place(name, root), hashes) for name in names]
        for step in (1, FORMER, NEW):
            trained.train()
            hashes[step] = trained.hashes()
            for scenario in scenarios if step != NEW else ():
                scenario.reset()
                scenario.prepare(step)
        gather_memory()
        yield scenarios


def _place(name: str, root: Path) -> Place:
    return Prefix(name, root / name) if name in STORED else Directory(root / name, shared_calls=name in _WHOLE)


def chosen(calls: Sequence[Sequence[Fault]], every: int) -> list[Fault]:
    """All faults; or of every N-th call one, each in its turn, so that a sample has all kinds."""
    if every == 1:
        return [fault for faults in calls for fault in faults]
    return [faults[turn % len(faults)] for turn, faults in enumerate(calls[every - 1 :: every])]


def table(verdicts: Sequence[Verdict]) -> str:
    """Of each scenario and operation: the faults, how many saves or starts were whole, failed by name, and broke."""
    rows: dict[tuple[str, str, str], Counter[str]] = {}
    for verdict in verdicts:
        key = (verdict.scenario, verdict.of, verdict.fault.operation)
        rows.setdefault(key, Counter())["broken" if verdict.broken else verdict.outcome] += 1
    lines = ["scenario               of     operation   faults  whole   told missed broken"]
    for (name, of, operation), counts in sorted(rows.items()):
        figures = (sum(counts.values()), counts["whole"], counts["told"], counts[MISSED], counts["broken"])
        lines.append(f"{name:22} {of:6} {operation:10} " + "".join(f"{figure:7}" for figure in figures))
    return "\n".join(lines)


def run(options: argparse.Namespace, root: Path, out: Path, share: int = 0) -> None:
    """Judge the faults of `share` of `--processes`, but for what `out` has from a sweep before.

    On one core: a call that is traced hands over to the tracer and back, and between two cores that takes 0.4 ms.
    """
    cores = sorted(os.sched_getaffinity(0))
    present = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[36])  # proc(5): where it runs
    os.sched_setaffinity(0, {present if options.processes == 1 else cores[share % len(cores)]})
    done = {verdict.key for verdict in read(out) if verdict.survived}
    with prepared(options.scenario, root / str(share)) as scenarios, out.open("ab", buffering=0) as file:
        for scenario, of in itertools.product(scenarios, (SAVE, START) if options.of is None else (options.of,)):
            faults = chosen(scenario.faults(of), 1 if options.fault else options.every)
            if options.fault is not None:
                faults = [fault for fault in faults if str(fault) == options.fault]
            for fault in faults:
                if share_of(fault, options.processes) == share and (scenario.name, of, fault) not in done:
                    line = json.dumps(dataclasses.asdict(scenario.judge(of, fault)))
                    file.write(f"{line}\n".encode())  # in one write: other processes write there, too


def share_of(fault: Fault, processes: int) -> int:
    """Which of the processes judges it: by the fault itself, as each lists them anew, and those of sockets differ."""
    return zlib.crc32(str(fault).encode()) % processes


def read(out: Path) -> list[Verdict]:
    """The newest verdict on each fault in a file of --out; none if it is not there."""
    lines = out.read_text().splitlines(keepends=True) if out.exists() else []
    told = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may not be whole
    verdicts = [Verdict(**each | {"fault": Fault(**each["fault"])}) for each in told]
    return list({verdict.key: verdict for verdict in verdicts}.values())


def run_beside(options: argparse.Namespace, root: Path, out: Path) -> bool:
    """`run` in so many processes; False if one of them has ended early."""
    if options.processes == 1:
        run(options, root, out)
        return True
    _import_all()  # once for all of them
    os.environ.pop("MASTER_PORT")  # each is rank 0 of a launch of its own
    forks = multiprocessing.get_context("fork")
    processes = [forks.Process(target=run, args=(options, root, out, n)) for n in range(options.processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return all(process.exitcode == 0 for process in processes)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """`scenario` has the names of all that are chosen."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one fault at every N-th call (default: all)")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--scenario", action="append", choices=[*SCENARIOS], help="default: one rank, in a directory")
    group.add_argument("--stored", action="store_true", help="those in object storage: most of a second each")
    group.add_argument("--two-ranks", action="store_true", help="those of two ranks: more than a second each")
    parser.add_argument("--of", choices=[SAVE, START], help="default: both")
    parser.add_argument("--fault", metavar="TEXT", help="one alone, as the report names it")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="each on a core (default: 1)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="a JSON line for each fault; those that it has are not injected again"
    )
    parser.add_argument("--root", type=Path, metavar="DIR", help="where to save (default: below /dev/shm)")
    options = parser.parse_args(argv)
    options.scenario = options.scenario or [
        *(STORED if options.stored else TWO_RANKS if options.two_ranks else _ONE_RANK)
    ]
    if TWO_RANKS.keys() & options.scenario and not TWO_RANKS.keys() >= {*options.scenario}:
        parser.error("--scenario: those of two ranks need a sweep of their own")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    with contextlib.ExitStack() as held:
        # In memory: what a disk does with what is written there is not asked, and it would take its time.
        directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        root = options.root or Path(held.enter_context(tempfile.TemporaryDirectory(prefix="faults_", dir=directory)))
        out = options.out or root / "verdicts.jsonl"
        ended = run_beside(options, root, out)
        verdicts = read(out)
    for verdict in verdicts:
        if verdict.broken:
            what = f"{verdict.scenario} {verdict.of}: {verdict.fault} ({verdict.hit}): {verdict.outcome}"
            print(what if verdict.said is None else f"{what}; it said: {verdict.said}")
    print(table(verdicts))
    injected = [verdict for verdict in verdicts if verdict.outcome != MISSED]
    if not injected:
        print("no fault was injected: there are fewer calls than --every, or none of the name that --fault gives")
    return 0 if ended and injected and not any(verdict.broken for verdict in injected) else 1


if __name__ == "__main__":
    raise SystemExit(main())
