"""The soak of one engine: one fault after the other, saves without faults, and what is left at the end."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from megatron.config.uris import below

from .. import command as commands
from ..checkpoints import checkpoints_at, left_files
from ..drill import run_drill
from ..facts import CycleFacts, facts_of
from ..injection_points import TraceTail, stage_begun_by
from ..launch import GRACE_S, DrillError, recorded_ranks
from ..nodes import LOST, TAKES_A_SPARE
from ..plan import Injection, Plan, PlannedInjection
from ..reference import reference_of
from ..supervisors import AgentsOnNodes, Supervisor
from ..verify import check_losses, verdicts
from .growth import MIB, OTHERS, RANKS, RESTARTS, SAVES, Samples
from .hosts import Hosts, private_tmpdir
from .result import EngineResult, Goal
from .schedule import in_order, random_injection_point
from .snapshot import Snapshot

KEPT = 3  # checkpoints: a fault may damage the newest, and end the ranks while they remove the one before it
SETTLED = 4  # commits after the last restart before the ranks are sampled
WITHOUT_FAULTS = 16  # minimum number of commits after that
SAMPLES = 32  # minimum number of samples of each host's ranks after that; on one host, one after each commit
_ON_NODES_AT_ONCE = 4  # samples: it takes a second to reach a node
_AT_RESTARTS = 8  # snapshots in each cycle, of which the minimum is one sample
_TIME_OF_FAULTS = 2 / 3  # part of --minutes
PERSIST_INTERVAL = 4  # of engine memory
_UNLIMITED = 1_000_000
_POLL_S = 0.01


@dataclass(frozen=True)
class SoakOptions:
    """What the soaks of all engines have in common.

    `base`: the plan without faults; its checkpoints are those of all engines, its command is the training's, its
    supervisor LAUNCH or IN_PROCESS.
    `memory_MiB`: allowed growth of each process, and of the ranks of a host in total. `own_shm`: this process has a
    private /dev/shm. `hosts`: the nodes, if any, spares included.
    """

    base: Plan
    faults: tuple[str, ...]
    seed: int
    memory_MiB: float
    own_shm: bool
    hosts: tuple[str, ...] = ()
    spares: int = 0


class EngineSoak:
    def __init__(self, options: SoakOptions, engine: str, goal: Goal) -> None:
        self._options, self._goal = options, goal
        self.result = EngineResult(engine)
        self._rng = random.Random(f"{options.seed}/{engine}")
        self._faults = in_order(options.faults, options.seed, goal.first)
        self._plan = _plan(options, engine)
        self._injections: list[Injection] = []
        self._lost_nodes = 0
        self._samples = Samples()
        self._tail = TraceTail(self._plan.trace_dir, 0)
        self._commits = 0  # of the current cycle

    def run(self) -> EngineResult:
        self._begin = time.monotonic()
        with private_tmpdir() as self._temporary:
            run_drill(self._plan, self._schedule, self._injections)
        checkpoints = checkpoints_at(self._plan.checkpoints)
        self.result.shared_memory = "checked" if self._options.own_shm else "not checked on this host: needs root"
        self.result.leaked += left_files(checkpoints, KEPT)
        self._check_growth()
        self._check_trace()
        if self.result.passed:
            checkpoints.remove()  # the next engine may need the space
        self.result.seconds = time.monotonic() - self._begin
        return self.result

    def _schedule(self, supervisor: Supervisor) -> Generator[PlannedInjection, None, None]:
        """Faults for the time or the restarts of the goal, each followed by checks; then saves without faults."""
        options, seconds = self._options, self._goal.seconds or 0.0
        nodes = supervisor.nodes if isinstance(supervisor, AgentsOnNodes) else None
        self._supervisor = supervisor
        self._hosts = Hosts(self._temporary, own_shm=options.own_shm, nodes=nodes, names=options.hosts)
        try:
            supervisor.start(0)
            while self._faults_go_on(self._begin + _TIME_OF_FAULTS * seconds):
                yield self._plan_injection()
                if supervisor.launch.exit_code is not None:
                    self._check_hosts_after(self._injections[-1].fault)
                cycle = len(self._injections)
                supervisor.start(cycle)
                self._tail, self._commits = TraceTail(self._plan.trace_dir, cycle), 0
            self._train_without_faults(self._begin + seconds)
            self._end()
        finally:
            self._hosts.remove_temporary()

    # Faults

    def _faults_go_on(self, until: float) -> bool:
        """Until the restarts of the goal are done or, without that number, until this time (monotonic, s)."""
        if self._goal.restarts is not None:
            return len(self._injections) < self._goal.restarts
        return not self._injections or time.monotonic() <= until

    def _plan_injection(self) -> PlannedInjection:
        """The next fault. If it comes during training, this cycle makes its share of the saves of the goal before."""
        commits = max(2, (self._goal.saves - WITHOUT_FAULTS - SETTLED) // (self._goal.restarts or _UNLIMITED))
        fault = next(fault for fault in self._faults if not self._takes_last_spare(fault))
        plan, injections = self._plan, self._injections
        # A fault during the restart after damage may end the launcher, and the damaged slot with it, before a rank has
        # reported the damage.
        in_training = not injections or (plan.saves.in_memory and injections[-1].damaged is not None)
        point = random_injection_point(
            fault, self._rng, on_nodes=plan.on_nodes, in_training=in_training, supervisor=plan.supervisor
        )
        if isinstance(self._supervisor, AgentsOnNodes):
            self._lost_nodes += fault == LOST
            self._supervisor.nodes.which = (self._rng.choice((0, -1)),)
            if fault in TAKES_A_SPARE:
                self._supervisor.on_nodes.await_spare(plan.limit_s)
        if point.during_restart:
            return PlannedInjection(fault, point)
        self._await_commits(1 if injections or not plan.saves.in_memory else PERSIST_INTERVAL)
        self._sample(RESTARTS, _AT_RESTARTS)
        self._count_commits()  # the snapshots took time
        return PlannedInjection(fault, point, max(commits, self._commits + 1))

    def _takes_last_spare(self, fault: str) -> bool:
        """Lost nodes do not return. The last spare is for nodes whose links are cut, which do."""
        return fault == LOST and self._lost_nodes + 1 >= self._options.spares

    # Checks while it runs

    def _await_commits(self, number: int) -> None:
        """Wait until this cycle has made `number` commits."""
        launch = self._supervisor.launch
        limit_s = self._plan.limit_s
        deadline = time.monotonic() + limit_s
        while self._count_commits() < number:
            if launch.exit_code is not None:
                raise DrillError(f"the launch ended with exit code {launch.exit_code}; see {launch.log_path}")
            if time.monotonic() > deadline:
                raise DrillError(
                    f"no {number} checkpoints were committed within {limit_s:g} s; raise --time-limit, or see"
                    f" {launch.log_path}"
                )
            time.sleep(_POLL_S)

    def _count_commits(self) -> int:
        """The number of commits of this cycle."""
        self._commits += sum(stage_begun_by(record) == "after-commit" for record in self._tail.new_records())
        return self._commits

    def _sample(self, over: str, times: int) -> None:
        """Sample what the launch uses on all hosts, and report orphaned processes."""
        launch_id, cycle = self._supervisor.launch.id, len(self._injections)
        _, ranks = recorded_ranks(self._plan.trace_dir, cycle)
        snapshots = self._hosts.snapshots(launch_id, times)
        for host, found in snapshots.items():
            # There is one sample in each cycle: work in progress, such as a copy of a save, would look like growth.
            for snapshot in [Snapshot.minimum(found)] if over == RESTARTS else found:
                self._samples.add(over, host, snapshot, ranks)
        orphans = self._hosts.new_orphans(launch_id, snapshots, GRACE_S)
        self.result.leaked += [f"cycle {cycle}: {line}" for line in orphans]

    def _train_without_faults(self, until: float) -> None:
        """Until the saves of the goal and all samples are made, and at least until this time (monotonic, s)."""
        before = sum(len(facts.committed) for facts in facts_of(self._plan.trace_dir).values()) - self._commits
        wanted = max(SETTLED + WITHOUT_FAULTS, self._goal.saves - before)
        self._await_commits(SETTLED)
        while self._samples.of_each_host() < SAMPLES or time.monotonic() < until or self._count_commits() < wanted:
            self._await_commits(self._commits + 1)
            self._sample(SAVES, _ON_NODES_AT_ONCE if self._plan.on_nodes else 1)

    def _end(self) -> None:
        """End the training with SIGTERM, as a user does: the ranks must save once more and end with 0."""
        supervisor, launch = self._supervisor, self._supervisor.launch
        asked = supervisor.on_nodes.coordinator() if isinstance(supervisor, AgentsOnNodes) else launch.launcher()
        launch.send(signal.SIGTERM, asked)
        code = launch.wait(self._plan.limit_s)
        if code != 0:
            self.result.wrong.append(f"after SIGTERM the launch ended with {code}")
        try:
            launch.wait_until_gone(GRACE_S)
        except DrillError as error:
            self.result.leaked.append(str(error))
        self._check_hosts_after("the end")

    def _check_hosts_after(self, event: str) -> None:
        found = self._hosts.left_over(self._supervisor.launch.id, GRACE_S)
        self.result.leaked += [f"after {event}, cycle {len(self._injections)}: {line}" for line in found]

    # Checks at the end

    def _check_growth(self) -> None:
        growth = self._samples.growth()
        self.result.samples = self._samples.by_name()
        for whose in (RANKS, OTHERS):
            grown = [one.memory for key, one in growth.items() if key[0] == whose]
            self.result.growth[whose] = max(grown, default=0) / MIB
        for (_, over, name), one in growth.items():
            self.result.leaked += [f"{name}: {line} of {over}" for line in one.excess(self._options.memory_MiB)]

    def _check_trace(self) -> None:
        """Check every restart as a drill does, and all losses against a run without faults."""
        result, cycles, injections = self.result, facts_of(self._plan.trace_dir), self._injections
        steps = max(step for facts in cycles.values() for step in facts.losses)
        base, spare = self._options.base, steps // 4  # the next engine may train for a little longer
        reference = reference_of(base.command, base.out, steps, self._plan.limit_s, spare=spare)
        losses = check_losses(cycles, reference.facts, 0.0)
        result.compared = sum(check.compared for check in losses.values())
        for injection, verdict in zip(injections, verdicts(injections, cycles, losses), strict=True):
            result.verified += not verdict.wrong
            name = f"cycle {injection.cycle}, {injection.fault} at {injection.injection_point}"
            result.wrong += [f"{name}: {line}" for line in verdict.wrong]
        different = losses[max(cycles)].different
        result.wrong += [line for line in different if not any(line in other for other in result.wrong)]
        if len(cycles) != len(injections) + 1:
            result.wrong.append(f"{len(cycles)} starts after {len(injections)} faults")
        result.lost += lost_checkpoints(cycles, injections)
        result.saves = sum(len(facts.committed) for facts in cycles.values())
        result.restarts = len(injections)
        result.faults = dict(Counter(injection.fault for injection in injections))


def lost_checkpoints(cycles: dict[int, CycleFacts], injections: Sequence[Injection]) -> list[str]:
    """A message for each fault after which the newest save that rank 0 had recorded before it no longer existed.

    If the fault damaged that save, the one before must exist. If it ended all saves in memory, those since the last
    save to storage may be lost.
    """
    found = []
    committed = [0]  # steps of the saves that exist, the newest last
    for injection in injections:
        committed += cycles[injection.cycle].committed
        in_memory = injection.expected_tier is not None
        may_lose = (injection.lost_at_most or 0) - 1 if in_memory else 0
        at_least = committed[-2 if injection.damaged is not None else -1] - may_lose
        if injection.expected_step < at_least:
            newest = f"iteration {at_least} was saved, the newest that exists is {injection.expected_step}"
            found.append(f"cycle {injection.cycle}, {injection.fault}: {newest}")
        committed = [injection.expected_step]
    return found


def _plan(options: SoakOptions, engine: str) -> Plan:
    """The plan of the soak of an engine."""
    base = options.base
    plan = replace(
        base, faults=options.faults, restarts=_UNLIMITED, launches_again=True, out=base.out / engine,
        checkpoints=below(base.checkpoints, engine), persist_interval=PERSIST_INTERVAL, echo=False,
    )  # fmt: skip
    flags = ("--keep-last", str(KEPT), "--exit-signal-handler")
    plan = commands.with_commands(plan, base.command, engine, flags=flags)
    if not commands.repeats_exactly(plan.command):
        raise DrillError("the soak compares losses bit for bit, and this training on GPUs need not repeat them")
    return plan
