"""The agent of a node: it has imported everything, and forks, watches and ends ranks as the coordinator says.

There is one thread, so that the process stays forkable. It waits for signals, which also report the end of a rank, and
for messages. It tells that it lives; if its beats are not answered for most of the heartbeat timeout, it is cut off: it
kills its ranks, since others may be about to take their place, and asks to be let in again, as a spare. An agent that
is stopped or hangs is killed, and its ranks with it (lease.py). With --in-process-restart ranks are not ended but have
returned (in_process_restart.py) when an end is told, and start again in the next generation if their place is the same.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron.launch.etcd import MembershipError, StoreAddress
from megatron.launch.failure_trace import FailureTrace
from megatron.launch.health import RepeatedCheck, what_is_wrong
from megatron.launch.lease import Lease
from megatron.launch.membership import LaunchEndedError, OtherLaunchError, command_digest, leader_address
from megatron.launch.messages import BEATS_PER_TIMEOUT, FENCE, LEASE, LaunchConnection
from megatron.launch.plan import Plan
from megatron.launch.ranks import Forks, Ranks
from megatron.launch.rendezvous_store import RendezvousStore
from megatron.launch.supervise import COULD_NOT_RUN, FAILED, say, stop_signals
from megatron.net.handshake import COORDINATOR, AuthenticationError, NoAnswerError, connect
from megatron.net.secret import required_secret
from megatron.peers.memory_slots import hold_slots
from megatron.processes.in_process_restart import REPORT_SIGNAL
from megatron.processes.source import what_runs
from restart_trace.clock import now_ns
from restart_trace.cycles import LAUNCH_ID_VARIABLE
from restart_trace.startup import Preload

if TYPE_CHECKING:
    from megatron.peers.process import CopyProcess

_CONNECT_S = 10.0  # for one attempt
_WELCOME_S = 30.0  # from the connection to the coordinator's first word
_JOIN_S = 60.0  # how long an agent tries to be answered at first, where others may keep the coordinator busy
_REJOIN_S = 600.0  # how long an agent that was cut off tries to be let in again
_REJOIN_POLL_S = 0.5
_FAILOVER_S = 2.0  # in place of the first two where another coordinator may lead by then
_OF_RANKS = frozenset({signal.SIGCHLD, REPORT_SIGNAL})  # signals: a rank has ended, or returned


class Signals:
    """Signals as bytes on a socket, so that one `select` waits for them and for messages."""

    def __init__(self, stopping: Collection[signal.Signals]) -> None:
        """`stopping`: what is waited for besides what ranks cause."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        # What is to be ignored (nohup) stays so.
        caught = {signum for signum in stopping if signal.getsignal(signum) is not signal.SIG_IGN}
        self._before = {signum: signal.getsignal(signum) for signum in caught | _OF_RANKS}
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for signum in self._before:  # from here on the byte is all that tells of one
            signal.signal(signum, lambda *_: None)

    def fileno(self) -> int:
        return self._reader.fileno()

    def received(self) -> set[int]:
        """Numbers of the signals that came since the last call, other than of ranks."""
        found: set[int] = set()
        while True:
            try:
                found |= set(self._reader.recv(4096))
            except BlockingIOError:
                return found - _OF_RANKS

    def give_back(self) -> None:
        """In a forked rank: have signals do what they did before."""
        signal.set_wakeup_fd(-1)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)
        self._reader.close()
        self._writer.close()

    def hold(self) -> None:
        """From here on none is delivered, so that none is lost in a fork."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._before)

    def let_go(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)


@dataclass
class _Generation:
    """One start of the job on this node, from the coordinator's word to the end of all ranks here."""

    number: int
    plan: Plan
    ranks: Ranks
    failed: bool = False  # it was told that a rank here has failed


class Agent:
    """Runs until the coordinator ends the launch; see the head of the module. Raises SecretError without a secret."""

    def __init__(self, plan: Plan, preloaded: Preload) -> None:
        self._plan = plan
        self._preloaded = preloaded
        self._secret = required_secret()
        self._instance = secrets.token_hex(8)
        self._lease = Lease()
        self._signals = Signals(stop_signals(plan.arguments))
        self._connection: LaunchConnection | None = None
        self._store: RendezvousStore | None = None
        self._copies: CopyProcess | None = None  # where the ranks keep saves in memory
        self._current: _Generation | None = None
        self._before: _Generation | None = None  # if ranks of it have returned, and wait for the next start
        self._check = RepeatedCheck(plan.health_interval_s, self._what_is_wrong_with_spare)  # while no ranks run here
        self._trace = FailureTrace(plan.arguments)
        self._stopped_by: int | None = None
        self._was_let_in = False
        self._place = -1  # the node rank of this node in the newest generation; -1: it is a spare
        self._leader: tuple[str, int] | None = None  # the coordinator that etcd named last
        self._timeout_s = 0.0  # the heartbeat timeout, once the coordinator has told it
        self._beats: dict[int, float] = {}  # number of a beat that was not answered yet -> when it was sent
        self._number_of_beat = 0
        self._last_beat = 0.0
        self._lease_until = 0.0

    def run(self) -> int:
        """The exit status. In a rank it does not return, but raises SystemExit."""
        if self._plan.keeps_saves:
            hold_slots(self._plan.nproc_per_node)
            from megatron.peers.process import CopyProcess  # whose checksums `restart-launch --help` may be without

            self._copies = CopyProcess(self._plan.address, self._plan.bind, self._plan.towards)
        wrong = self._what_is_wrong()
        if wrong is not None:
            say(f"error: {socket.gethostname()} is not fit for ranks: {wrong}; mend it, or leave the host out")
            return COULD_NOT_RUN
        code = self._join()
        if code is not None:
            return code
        while True:
            code = self._turn()
            if code is not None:
                self._kill_all()
                self._close_store()
                if self._copies is not None:
                    self._copies.close()
                return code

    def _turn(self) -> int | None:
        """Wait for the next thing that happens, and deal with it; an exit status if that was the last one."""
        connection = self._connection
        assert connection is not None
        select.select([connection, self._signals], [], [], self._until_next())
        for signum in self._signals.received():
            self._pass_on(signum)
        code = self._hear(connection)
        if code is not None:
            return code
        self._look_after_ranks()
        self._look_after_copies()
        self._look_after_health()
        if connection.ended:  # perhaps by a message that could not be sent: the other end had its last word before
            code = self._hear(connection)
            if code is not None:
                return code
        now = time.monotonic()
        if connection.ended or now > self._lease_until:
            return self._rejoin("the coordinator has ended" if connection.ended else "its coordinator is not heard")
        if self._timeout_s and now >= self._next_beat_at():
            self._beat(now)
        connection.flush()
        return None

    # The connection

    def _join(self) -> int | None:
        """Connect for the first time; an exit status if that is not possible."""
        waits = False
        began = time.monotonic()
        while True:
            try:
                self._connect()
                return None
            except (OSError, LaunchEndedError, OtherLaunchError) as error:
                # With etcd, the coordinator may not be there yet: an earlier launch of this name may have ended.
                moves = isinstance(self._plan.coordinator, StoreAddress)
                unreachable = isinstance(error, MembershipError) and not waits
                # Strangers may have taken its place: they give way to it in a later attempt.
                hung_up = isinstance(error.__cause__ or error, (ConnectionResetError, BrokenPipeError))
                crowded = hung_up or isinstance(error, TimeoutError)
                final = not (moves or crowded) or unreachable or isinstance(error, OtherLaunchError)
                if final or time.monotonic() - began > (_REJOIN_S if moves else _JOIN_S):
                    self._say_unreachable(error)
                    return COULD_NOT_RUN
                if not waits:
                    say(f"{socket.gethostname()} waits for a coordinator of {self._plan.coordinator_name}: {error}")
                waits = True
            stop = self._stopped_within(_REJOIN_POLL_S)
            if stop is not None:
                return stop

    def _say_unreachable(self, error: Exception) -> None:
        where, host = self._plan.coordinator_name, socket.gethostname()
        if isinstance(error, OtherLaunchError):
            say(f"error: --coordinator {error}")
        elif isinstance(error, MembershipError):
            say(f"error: --coordinator {error}; etcd must be reached from {host}, or give the coordinator's HOST:PORT")
        elif isinstance(self._plan.coordinator, StoreAddress):
            say(f"error: --coordinator {where}: {host} has found no coordinator in {_REJOIN_S:g} s: {error}; start one")
        elif isinstance(error, AuthenticationError):
            say(f"error: --coordinator {where}, from {host}: {error}")
        elif isinstance(error, (NoAnswerError, ConnectionResetError)):
            say(
                f"error: --coordinator {where}, from {host}: {error}, for {_JOIN_S:g} s: it is stopped, connections of "
                "strangers keep it busy, or it is another program"
            )
        else:
            say(
                f"error: --coordinator {where}: cannot be reached from {host}: "
                f"{getattr(error, 'strerror', None) or error}; give an address of the launching host that every node "
                "reaches (COORDINATOR_ADDR of the launch scripts)"
            )

    def _stopped_within(self, seconds: float) -> int | None:
        """Wait; an exit status if a signal comes that is to end this process."""
        select.select([self._signals], [], [], seconds)
        stop = self._signals.received()
        return 128 + min(stop) if stop else None

    def _coordinator(self) -> tuple[str, int]:
        """Where the coordinator listens. Raises the exceptions of `leader_address`."""
        where = self._plan.coordinator
        assert where is not None
        if not isinstance(where, StoreAddress):
            return where
        try:
            self._leader = leader_address(where, command_digest(self._plan.script, self._plan.arguments))
        except MembershipError:
            if self._leader is None:
                raise
            # It leads still, as far as anybody can know: without etcd nobody takes over.
        return self._leader

    def _connect(self) -> None:
        """Connect and introduce this node. Raises OSError, and the exceptions of `_coordinator`."""
        # Read before the connection is there, which counts as silent until it has said something.
        # A host whose driver has failed would train on its processors.
        mine = what_runs() | {"accelerator": os.environ.get("DS_ACCELERATOR", "")}
        moves = isinstance(self._plan.coordinator, StoreAddress)
        opened = connect(self._coordinator(), self._secret, COORDINATOR, _FAILOVER_S if moves else _CONNECT_S)
        self._connection = LaunchConnection(opened)
        self._lease_until = time.monotonic() + (_FAILOVER_S if moves else _WELCOME_S)
        self._timeout_s, self._beats = 0.0, {}
        self._connection.send(
            "hello",
            number=self._plan.node_rank,
            address=self._plan.address,
            host=socket.gethostname(),
            ranks=self._plan.nproc_per_node,
            launch_id=os.environ.get(LAUNCH_ID_VARIABLE, ""),
            versions=mine,
            copies=0 if self._copies is None else self._copies.port,
            place=self._place,
            instance=self._instance,
        )

    def _beat(self, now: float) -> None:
        assert self._connection is not None
        self._last_beat, self._number_of_beat = now, self._number_of_beat + 1
        self._beats[self._number_of_beat] = now
        self._connection.send("beat", number=self._number_of_beat)

    def _next_beat_at(self) -> float:
        return self._last_beat + self._timeout_s / BEATS_PER_TIMEOUT

    def _answered(self, number: int) -> None:
        """The coordinator has received this beat: it counts this node as alive since then at the earliest."""
        sent = self._beats.get(number)
        if sent is not None:
            self._lease_until = sent + LEASE * self._timeout_s
            if self._current is not None:
                self._allow_ranks()
            self._beats = {other: at for other, at in self._beats.items() if other > number}

    def _allow_ranks(self) -> None:
        """Have this process killed if it neither prolongs its lease nor kills its ranks."""
        self._lease.allow_until(self._lease_until + (FENCE - LEASE) * self._timeout_s)

    def _until_next(self) -> float:
        """Seconds until something has to be done without being told."""
        times = [self._lease_until, self._check.next_at]
        if self._timeout_s:
            times.append(self._next_beat_at())
        if self._current is not None and self._current.ranks.deadline is not None:
            times.append(self._current.ranks.deadline)
        return max(0.0, min(times) - time.monotonic())

    def _rejoin(self, why: str) -> int | None:
        """End the start, and connect anew; an exit status if the coordinator is not there any more."""
        assert self._connection is not None
        was_running = self._current is not None
        code = self._leave_coordinator()
        if code is not None:
            return code
        self._connection.close()
        if was_running or self._connection.ended:
            ranks = "have returned" if self._before is not None else "were killed"
            say(f"{socket.gethostname()}: {why}{f'; its ranks {ranks}' if was_running else ''}")
        wrong = self._what_is_wrong()
        if wrong is not None:
            say(f"error: {socket.gethostname()} does not join again: {wrong}")
            return FAILED
        deadline = time.monotonic() + _REJOIN_S
        while time.monotonic() < deadline:
            try:
                self._connect()
                return None
            except LaunchEndedError as ended:
                return ended.code
            except OtherLaunchError as error:
                say(f"error: --coordinator {error}")
                return FAILED
            except OSError as error:
                moves = isinstance(self._plan.coordinator, StoreAddress)
                gone = isinstance(error, (ConnectionRefusedError, AuthenticationError))
                if gone and not moves:  # nobody of this launch listens there any more
                    return FAILED if self._was_let_in else COULD_NOT_RUN
            stop = self._stopped_within(_REJOIN_POLL_S)
            if stop is not None:
                return stop
        say(f"error: {socket.gethostname()}: the coordinator was not reached again within {_REJOIN_S:g} s")
        return FAILED

    # What the coordinator says

    def _hear(self, connection: LaunchConnection) -> int | None:
        """Obey what has arrived; an exit status if that is the end."""
        for message in connection.messages():
            code = self._obey(message)
            if code is not None:
                return code
        return None

    def _obey(self, message: dict[str, Any]) -> int | None:
        kind = message["type"]
        if kind == "ack":
            self._answered(message["number"])
        elif kind == "welcome":
            self._was_let_in = True
            self._timeout_s = message["heartbeat_timeout_s"]
            self._lease_until = time.monotonic() + LEASE * self._timeout_s
            os.environ.setdefault(LAUNCH_ID_VARIABLE, message["launch_id"])
            self._look_after_copies()
        elif kind == "refuse":
            if message["why"]:
                say(f"error: {message['why']}")
            return COULD_NOT_RUN
        elif kind == "serve":
            self._serve(message["generation"])
        elif kind == "start":
            self._start(message)
        elif kind == "wait":
            self._place = -1
            self._kill_returned("this node is a spare now")
            if self._copies is not None:
                self._copies.prepare_like(message["copies"])
        elif kind == "expect":
            if self._copies is not None:
                self._copies.expect(message["node_rank"], message["copies"])
        elif kind == "stop":
            self._stop(message)
        elif kind == "signal":
            self._stopped_by = self._stopped_by or message["signum"]
            if self._current is not None:
                self._current.ranks.end(message["signum"], self._plan.shutdown_timeout_s)
        elif kind == "exit":
            return int(message["code"])
        return None

    def _serve(self, generation: int) -> None:
        """Serve the rendezvous of a generation, whose node 0 this is."""
        assert self._connection is not None
        self._close_store()
        try:
            plan = self._plan
            self._store = RendezvousStore(plan.address, plan.master_port or 0, plan.bind, plan.towards).serve()
        except OSError as error:
            why = (
                f"--master-port {self._plan.master_port}: the rendezvous cannot be served there on "
                f"{self._plan.address}: {error.strerror}; name a port that is free on every node, or none"
            )
            self._connection.send("cannot", generation=generation, why=why)
            return
        self._connection.send("port", generation=generation, port=self._store.port)

    def _start(self, message: dict[str, Any]) -> None:
        """Fork the ranks of a generation."""
        number = message["generation"]
        plan = replace(
            self._plan,
            nnodes=message["nnodes"],
            node_rank=message["node_rank"],
            master_addr=message["master_addr"],
            master_port=message["master_port"],
            max_restarts=message["max_restarts"],
            arguments=(*self._plan.arguments, *message["arguments"]),
        )
        if number == 0 and plan.in_process_restart and not plan.max_restarts:
            say(f"{socket.gethostname()}: --in-process-restart: no effect, the coordinator has --max-restarts 0")
        if self._store is not None and plan.node_rank != 0:
            self._close_store()
        if self._store is not None:
            plan = replace(plan, master_addr=self._store.master_addr)
        if self._copies is not None:
            self._copies.tell_of_waiting(message["waiting"])
        self._trace.before_restart(number)
        began_ns = now_ns()
        preloaded = self._preloaded if number == 0 else None
        if self._copies is not None:
            self._copies.tell_members(message["copies"])
        before = self._take_returned(plan)
        self._allow_ranks()
        self._signals.hold()
        forks = Forks(plan, number, message["master_port"], preloaded, self._become_child)
        forks.complete(before)
        self._signals.let_go()
        self._current, self._place = _Generation(number, plan, forks.ranks), plan.node_rank
        self._trace.relaunched(began_ns)

    def _take_returned(self, plan: Plan) -> Ranks | None:
        """Those of the start before, if any has returned that keeps its number and layout; others are killed."""
        before = self._before
        if before is None:
            return None
        if before.plan.node_rank != plan.node_rank:
            self._kill_returned("this node has another place now")
        elif (before.plan.nnodes, before.plan.arguments) != (plan.nnodes, plan.arguments):
            self._kill_returned("the job has another layout now")
        else:
            stay = ", ".join(str(before.ranks.running[pid]) for pid in sorted(before.ranks.returned))
            say(f"{socket.gethostname()}: starting ranks {stay} again in their processes, others anew")
            self._before = None
            return before.ranks
        return None

    def _become_child(self, _local_rank: int) -> None:
        self._leave_agent()
        if self._copies is not None:
            self._copies.close_in_child()

    def _leave_agent(self) -> None:
        """In a forked process: connection, lease and signals are the agent's."""
        assert self._connection is not None
        self._connection.close()
        self._lease.close_in_child()
        self._signals.give_back()

    def _stop(self, message: dict[str, Any]) -> None:
        """End the ranks of a generation; one that has none running here is told to have ended."""
        assert self._connection is not None
        at_ns = now_ns()
        current = self._current
        if current is None or current.number != message["generation"]:
            self._connection.send("ended", generation=message["generation"], failures=[], refused=0)
            return
        # Without the ranks of a lost node no rank can finish a step or a save: there is nothing to wait for.
        self._end_start(current, signal.SIGKILL if message["kill"] else signal.SIGTERM)
        self._note_detected(current, message["why"], at_ns)

    def _end_start(self, current: _Generation, signum: int) -> None:
        """Have its ranks return, if they may start again in their processes, else end by a signal."""
        ranks, plan = current.ranks, current.plan
        if ranks.refused or ranks.ended_by is not None or not plan.returns_after(current.number):
            ranks.end(signum, plan.shutdown_timeout_s)
        elif not current.failed:  # else they have been asked
            killed = ranks.ask_back(plan.return_timeout_s, plan.max_returns)
            if killed is not None:
                say(killed)

    def _note_detected(self, current: _Generation, why: str, at_ns: int) -> None:
        if not current.failed:
            current.failed = True
            self._trace.detected(current.number, why, at_ns)

    # The ranks

    def _look_after_ranks(self) -> None:
        """See which ranks have ended; tell of the first that failed at once, and when none is left."""
        current = self._current
        if current is None:
            return
        assert self._connection is not None
        ranks = current.ranks
        self._see_to(ranks)
        if ranks.failures and not current.failed and self._stopped_by is None:
            at_ns = now_ns()
            self._connection.send("failed", generation=current.number, why=ranks.failures[0])
            self._end_start(current, signal.SIGTERM)
            self._note_detected(current, ranks.failures[0], at_ns)
        if ranks.settled:
            if current.failed:
                self._trace.stopped()
            wrong = self._what_is_wrong() if ranks.failures else None
            if wrong is not None:
                self._connection.send("unfit", generation=current.number, why=wrong)
            ended = {"failures": ranks.failures, "refused": ranks.refused}
            self._connection.send("ended", generation=current.number, **ended)
            self._have_ended(current)

    def _look_after_copies(self) -> None:
        """Have the process that holds copies of saves run, once it is known of which launch; again if it has ended."""
        if self._copies is None or not self._was_let_in or self._copies.runs():
            return
        if self._copies.started:
            say(
                f"{socket.gethostname()}: the process that holds copies of other hosts' saves has ended, and they are "
                "gone; it is started again"
            )
        self._signals.hold()
        self._copies.start(self._leave_agent)
        self._signals.let_go()

    def _look_after_health(self) -> None:
        """While no ranks run here, have the host checked now and then, and tell of what is wrong with it."""
        wrong = self._check.result()
        if self._current is not None or not self._timeout_s:
            self._check.postpone()  # not as soon as ranks have ended: others may be about to start
            return
        if wrong is not None:
            assert self._connection is not None
            say(f"error: {socket.gethostname()} is not fit to wait for ranks any longer: {wrong}")
            self._connection.send("unfit", generation=-1, why=wrong)
        elif self._check.due:
            self._signals.hold()
            self._check.begin(self._leave_for_check)
            self._signals.let_go()

    def _leave_for_check(self) -> None:
        self._become_child(0)

    def _what_is_wrong(self) -> str | None:
        return what_is_wrong(self._plan.health_directory)

    def _what_is_wrong_with_spare(self) -> str | None:
        wrong = self._what_is_wrong()
        return wrong if wrong is not None or self._copies is None else self._copies.lack_of_memory()

    def _pass_on(self, signum: int) -> None:
        """A signal to this process: for the ranks of all nodes."""
        assert self._connection is not None
        self._stopped_by = self._stopped_by or signum
        self._connection.send("signal", signum=signum)
        if self._current is not None:
            self._current.ranks.end(signum, self._plan.shutdown_timeout_s)

    def _see_to(self, ranks: Ranks) -> None:
        """See which have returned or ended, and kill those that should have."""
        ranks.hear()  # before: one that has returned may have ended since
        ranks.reap()
        killed = ranks.kill_overdue(self._plan.shutdown_timeout_s if ranks.ended_by else self._plan.return_timeout_s)
        if killed is not None:
            say(killed)

    def _have_ended(self, current: _Generation) -> None:
        """No rank trains any more; some may have returned."""
        self._current, self._before = None, current if current.ranks.running else None
        self._lease.allow_until(None)

    def _leave_coordinator(self) -> int | None:
        """Kill the ranks, or have them return where another coordinator may start them again; an exit status if a
        signal ends this process meanwhile."""
        assert self._connection is not None
        if not (isinstance(self._plan.coordinator, StoreAddress) and self._connection.ended):
            return self._kill_all()
        if self._current is None:
            return None
        self._end_start(self._current, signal.SIGKILL)
        return self._wait_for_end(self._current)

    def _kill_all(self) -> int | None:
        """Kill the ranks, if there are any, and wait for their end; an exit status as of `_leave_coordinator`."""
        self._kill_returned(None)
        if self._current is None:
            return None
        self._current.ranks.end(signal.SIGKILL, self._plan.shutdown_timeout_s)
        return self._wait_for_end(self._current)

    def _wait_for_end(self, current: _Generation) -> int | None:
        code, ranks = None, current.ranks
        self._note_detected(current, "cut off from the coordinator", now_ns())
        while not ranks.settled:
            code = code or self._stopped_within(0.01)
            # Others may take their place then.
            if ranks.ended_by is None and (code is not None or time.monotonic() >= self._lease_until):
                ranks.end(signal.SIGKILL, self._plan.shutdown_timeout_s)
            self._see_to(ranks)
        self._have_ended(current)
        self._trace.stopped()
        return code

    def _kill_returned(self, why: str | None) -> None:
        """Kill ranks that wait for the next start, if there are any. `why`: to be told."""
        before, self._before = self._before, None
        if before is not None:
            before.ranks.kill_now()
            if why is not None:
                say(f"{socket.gethostname()}: ranks that had returned were killed: {why}")

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
