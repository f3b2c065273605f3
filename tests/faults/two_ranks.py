"""A save, or a start, of two ranks, in one of which a system call fails: both tell the same, and nobody waits for ever.

Each run forks two ranks that meet, as a launcher's do, build the trainer's model with its optimizer divided between
them (data parallel), and save or load. Calls count from when --save is claimed, which concerns rank 0 alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.launch.rendezvous_store import STORE_VARIABLES, RendezvousStore
from tests.dist.zygote import rank_environment
from tests.faults.injection import Fault, Traced, faults_at, run_traced
from tests.faults.launches import Ended, Trained
from tests.faults.repeated import Repeated
from tests.faults.system_calls import KILL
from tests.faults.verdicts import FORMER, MISSED, NEW, SAVE, START, Directory, Verdict, passed_over

_RANKS = (0, 1)


class TwoRanks:
    """An engine that saves from two ranks, and in which of them a call fails."""

    def __init__(
        self, name: str, flags: Sequence[str], rank: int, data: Path, root: Path, like: TwoRanks | None = None
    ) -> None:
        """`like`: one with the same flags, of which this one has the checkpoints and what is known of them."""
        self.name = name
        self._flags, self._rank, self._data = flags, rank, data
        self._begins = f"{root}/begins"
        if like is not None:
            self._place, self._hashes, self._known = like._place, like._hashes, like._known
            return
        self._place = Directory(root, shared_calls=True)
        self._hashes: dict[int, list[str]] = {}  # step -> hashes of the state of each rank
        self._known: dict[str, list[Ended]] = {}
        for step in (1, FORMER, NEW):
            self._hashes[step] = [ended.hashes for ended in self._whole(self._run(SAVE, step, None))]
            if step != NEW:
                self._place.keep()

    def faults(self, of: str) -> list[list[Fault]]:
        """As `Scenario.faults`. Which rank is ahead of the other is chance, and how many calls it makes meanwhile."""
        self._place.reset()
        traced = self._run(of, NEW, None)
        self._whole(traced)
        return faults_at(traced[self._rank].calls)

    def judge(self, of: str, fault: Fault) -> Verdict:
        began = time.monotonic()
        self._place.reset()
        traced = self._run(of, NEW, fault)
        said = [each.result.failed or passed_over(each.result) for each in traced if each.result is not None]
        wrong = self._wrong_with(of, fault, traced)
        told = any(said) or fault.effect == KILL
        outcome = wrong or ("told" if told else "whole")
        hit, what_was_said = traced[self._rank].hit, next(filter(None, said), None)
        return Verdict(self.name, of, fault, hit, outcome, what_was_said, time.monotonic() - began)

    def _wrong_with(self, of: str, fault: Fault, traced: list[Traced]) -> str | None:
        if traced[self._rank].hit is None:
            return MISSED
        for rank in _RANKS:
            if traced[rank].hangs:
                return f"rank {rank} hangs"
        ended = [each.result for each in traced if each.result is not None]
        if fault.effect == KILL:  # then a launcher ends the other
            wholes = [each for each in ended if each.failed is None]
            return self._wrong_with_next([FORMER] if of == START else [NEW] if wholes else [FORMER, NEW])
        for rank in _RANKS:
            if traced[rank].result is None:
                return f"rank {rank} ends with {traced[rank].raised or traced[rank].status}"
        if len({(each.step, each.failed) for each in ended}) > 1:
            return "; ".join(f"rank {rank}: {ended[rank].step} {ended[rank].failed}" for rank in _RANKS)
        if of == SAVE:
            return self._wrong_with_next([FORMER] if ended[0].failed else [NEW])
        return self._wrong_state(ended, [1, FORMER]) or self._wrong_with_next([FORMER])

    def _wrong_state(self, ended: list[Ended], expected: Sequence[int]) -> str | None:
        """What is wrong with what a start has loaded that has not failed."""
        step = ended[0].step
        if ended[0].failed is not None:
            return None
        if step is None or step not in expected:
            return f"loaded iteration {step}"
        if [each.hashes for each in ended] != self._hashes[step]:
            return f"loaded another state than that of iteration {step}"
        if step < FORMER and passed_over(ended[0]) is None:
            return f"loaded iteration {step} without a word"
        return None

    def _wrong_with_next(self, expected: Sequence[int]) -> str | None:
        """What is wrong with what the next launch loads, without a fault."""
        content = self._place.content()
        if content not in self._known:
            traced = self._run(START, NEW, None)
            for rank, each in enumerate(traced):
                if each.result is None:
                    why = "hangs" if each.hangs else f"ends with {each.raised or each.status}"
                    return f"then rank {rank} of a start {why}"
            self._known[content] = [each.result for each in traced]
        ended = self._known[content]
        for rank, each in enumerate(ended):
            if each.failed is not None:
                return f"then rank {rank} of a start fails: {each.failed}"
        wrong = self._wrong_state(ended, expected)
        return wrong and f"then a start {wrong}"

    def _whole(self, traced: list[Traced]) -> list[Ended]:
        for each in traced:
            ended: Ended | None = each.result
            assert ended is not None and ended.failed is None and ended.warnings == [], each
        return [each.result for each in traced]

    def _run(self, of: str, step: int, fault: Fault | None) -> list[Traced]:
        """Of each rank."""
        store = RendezvousStore("127.0.0.1", 0).serve()
        environments = [rank_environment(rank, len(_RANKS), store.port, STORE_VARIABLES) for rank in _RANKS]
        other = 1 - self._rank
        beside = Repeated(lambda: run_traced(self._as(environments[other], of, step), lambda path: False, None))
        try:
            beside.begin()
            mine = run_traced(self._as(environments[self._rank], of, step), self._watch(), fault)
            others = beside.result() or Traced(hangs=True)
        finally:
            beside.end()
            store.close()
        return [mine, others] if self._rank == 0 else [others, mine]

    def _watch(self) -> Callable[[str], bool]:
        begun = False

        def is_watched(path: str) -> bool:
            nonlocal begun
            begun = begun or path == self._begins
            return begun and self._place.is_watched(path)

        return is_watched

    def _as(self, environment: dict[str, str], of: str, step: int) -> Callable[[], Ended]:
        """What the rank of that environment does."""

        def work() -> Ended:
            os.environ.update(environment)
            trained = Trained(self._data, claimed=lambda: os.access(self._begins, os.F_OK))
            location = self._place.location
            config = trained.config(
                "--save", location, "--load", location, "--keep-last", "2", "--verify-restored-state",
                "--save-interval", "1", "--restart-trace", "off", *self._flags,
            )  # fmt: skip
            if of == START:
                return trained.start(config)
            for _ in range(step):
                trained.train()
            return trained.save(config, step)

        return work
