"""The coordinator of a launch over several nodes: it decides who is in a generation, and starts and ends all of it.

It runs where the launch was typed, which no rank needs: losing a node that trains does not lose it (docs/decisions.md).
Agents connect to it, prove that they know the secret of the launch, tell that they live, and do as it says. It has one
thread, which never blocks on an agent, and whose launch no stranger's connection ends (megatron.net.acceptor). With
etcd, others may be started that take over when it is lost (membership.py, which has a thread of its own).

    gathering    agents connect; a generation starts when every node of it has one
    running      ranks run on the members; further agents are spares
    stopping     a rank failed or a member was lost: the others end their ranks, and it is gathered again
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.launch.etcd import MembershipError, StoreAddress
from megatron.launch.failure_trace import FailureTrace
from megatron.launch.membership import LaunchEndedError, Leadership, OtherLaunchError, command_digest
from megatron.launch.messages import SUSPECTED, LaunchConnection
from megatron.launch.ranks import Refusals
from megatron.launch.shrink import NoLayoutError, Shrunk, shrunk
from megatron.launch.supervise import COULD_NOT_RUN, FAILED, say, stop_signals, why_not_again
from megatron.net.acceptor import Acceptor
from megatron.net.handshake import COORDINATOR
from megatron.net.listening import listen_for_hosts
from megatron.net.secret import required_secret
from megatron.processes.source import difference
from restart_trace.clock import now_ns
from restart_trace.cycles import LAUNCH_ID_VARIABLE

_POLL_S = 0.1  # at most, between looks at who is silent
_STOOD_STILL_S = 1.0  # at least, between two of them: this process, or its whole host, was stopped meanwhile
NODE_FAILED_SIGNAL = signal.SIGUSR1  # whoever started the agents saw the command of one end badly
_EXIT_S = 2.0  # for agents to take their exit status
_FIND_S = 5.0  # for agents to find a coordinator that has taken over (agent.py: _FAILOVER_S and _REJOIN_POLL_S)


@dataclass(frozen=True)
class Launch:
    """What is launched: `nodes` agents with `ranks_per_node` ranks each, and `spares` that wait."""

    script: str
    arguments: tuple[str, ...]
    nodes: int
    ranks_per_node: int
    spares: int
    max_restarts: int
    heartbeat_timeout_s: float
    join_timeout_s: float
    port: int
    port_file: Path | None
    launch_id: str
    allow_shrink: bool = False
    replacement_hook: Path | None = None
    membership: StoreAddress | None = None  # where the coordinators of this launch elect their leader
    secret_file: Path | None = None
    address: str = ""  # where agents reach this host
    bind: str | None = None  # where it listens; None: at the addresses of this host that `address` stands for


@dataclass(eq=False)
class Agent:
    """A connected agent. `place`: its node rank in the last generation that it was in, or the one that it asked for."""

    connection: LaunchConnection
    heard: float  # monotonic, s
    number: int = -1  # -1: it has not introduced itself
    address: str = ""
    host: str = ""
    copies: int = 0  # port of the process that holds copies of saves there; 0: none
    place: int | None = None
    in_generation: bool = False  # a member whose ranks have not ended
    failures: list[str] = field(default_factory=list)
    refused: int = 0  # as megatron.launch.ranks.Ranks has it, of this node
    unfit: str | None = None  # why its host is not to be used again
    expects: int | None = None  # of a spare: whose place it was told to prepare for
    instance: str = ""  # tells its process from another one that was given the same number

    def __str__(self) -> str:
        return f"node {self.number} ({self.address})"


class Coordinator:
    """`run` returns the exit status of the launch. Raises OSError if the port is taken, SecretError without one."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        secret = required_secret()
        listening = listen_for_hosts(launch.address, launch.port, launch.bind)
        self._port_number = int(listening[0].getsockname()[1])
        self._acceptor = Acceptor(listening, secret, COORDINATOR)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._acceptor, selectors.EVENT_READ)
        self._agents: list[Agent] = []
        self._joined: set[int] = set()  # numbers of the nodes that have ever been there
        self._expected = launch.nodes + launch.spares  # of which more may come for the first time
        self._first: tuple[str, dict[str, Any]] | None = None  # the first host that was let in, and what it runs
        self._began = time.monotonic()
        self._generation = -1
        self._members: list[Agent] = []
        self._shrunk: Shrunk | None = None  # this generation, if it is not on all nodes
        self._why_no_layout = ""  # that fits the nodes that are left
        self._port: int | None = None  # of the rendezvous of this generation
        self._state = "gathering"
        self._since = self._began  # of the state
        self._turned = math.inf  # when the last turn began
        self._stopped_by: int | None = None
        self._trace = FailureTrace(launch.arguments)
        self._refusals = Refusals()
        self._stop_signals = stop_signals(launch.arguments)
        self._hooks: list[subprocess.Popen[bytes]] = []  # that were asked for a host
        self._leadership: Leadership | None = None
        self._took_over = False  # from another coordinator, and has started no generation yet
        self._waits_for_etcd = False

    def run(self) -> int:
        """Coordinate until all ranks have ended, or none can be started any more."""
        if self._launch.membership is not None:
            code = self._lead(self._launch.membership)
            if code is not None:
                return code
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for signum in self._stop_signals - {NODE_FAILED_SIGNAL}:  # from here on the byte is all that tells of one
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, lambda *_: None)
        self._selector.register(reader, selectors.EVENT_READ)
        signal.signal(NODE_FAILED_SIGNAL, lambda *_: None)
        if self._launch.port_file is not None:  # who reads it may send signals from then on
            _write_at_once(self._launch.port_file, f"{self._port_number}\n")
        while True:
            for key, _ in self._selector.select(_POLL_S):
                if key.fileobj is reader:
                    for signum in set(reader.recv(4096)):
                        self._caught(signum)
            self._accept()
            code = self._turn()
            if code is not None:
                self._dismiss(code)
                return code
            if self._leadership is not None and self._leadership.leader is not None:
                say(f"error: {self._leadership.leader} coordinates this launch now; this coordinator ends")
                return FAILED

    def _lead(self, membership: StoreAddress) -> int | None:
        """Wait until this coordinator leads, and continue the launch; an exit status if it is not to lead."""
        launch = self._launch
        me = (launch.address, self._port_number)
        digest = command_digest(launch.script, launch.arguments)
        self._leadership = Leadership(membership, me, launch.heartbeat_timeout_s, launch.launch_id, digest)
        try:
            known = self._leadership.campaign()
        except LaunchEndedError as ended:
            say(f"{membership}: {ended}")
            return ended.code
        except OtherLaunchError as error:
            say(f"error: --membership {error}")
            return COULD_NOT_RUN
        except MembershipError as error:
            say(f"error: --membership {error}; start etcd there, or leave the flag out, which takes no etcd")
            return COULD_NOT_RUN
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        self._began = self._since = time.monotonic()
        self._generation = known["generation"]
        self._took_over = self._generation >= 0
        if self._took_over:  # some may have been lost before
            self._expected = 0
        self._launch = replace(launch, launch_id=known["launch_id"])
        os.environ[LAUNCH_ID_VARIABLE] = known["launch_id"]
        return None

    def _turn(self) -> int | None:
        """Read what every agent says, then see who is silent, then what follows; an exit status at the end."""
        self._wait_longer_if_stopped()
        # All is read before anybody counts as silent: this process may itself have been held up.
        for agent in list(self._agents):
            self._hear(agent)
            agent.connection.flush()
        for agent in list(self._agents):
            if agent.connection.ended:  # perhaps by what could not be sent to it: it had its last word before
                self._hear(agent)
            silent = time.monotonic() - agent.heard > self._launch.heartbeat_timeout_s
            if agent not in self._agents:
                continue
            if agent.connection.ended:
                self._lose(agent, "its agent has ended")
            elif silent:
                self._lose(agent, f"no heartbeat for {self._launch.heartbeat_timeout_s:g} s")
        self._look_after_hooks()
        self._prepare_spares()
        if self._state == "refused":
            return COULD_NOT_RUN
        if self._state == "gathering":
            return self._gather()
        return self._after_generation()

    def _wait_longer_if_stopped(self) -> None:
        """Wait longer for nodes by the time in which this process stood still: those that came meanwhile are not in."""
        now, before = time.monotonic(), self._turned
        self._turned = now
        if now - before > _STOOD_STILL_S:
            self._began += now - before
            self._since += now - before

    # Agents

    def _accept(self) -> None:
        for connected, _ in self._acceptor.accepted():
            agent = Agent(LaunchConnection(connected), time.monotonic())
            self._agents.append(agent)
            self._selector.register(agent.connection, selectors.EVENT_READ)

    def _hear(self, agent: Agent) -> None:
        """Obey what has arrived of an agent, as long as it is not lost by what it says."""
        for message in agent.connection.messages():
            if agent in self._agents:
                agent.heard = time.monotonic()
                self._obey(agent, message)

    def _obey(self, agent: Agent, message: dict[str, Any]) -> None:
        kind = message["type"]
        if (kind == "hello") != (agent.number < 0):
            agent.connection.ended = "does not introduce itself first, and once"
        elif kind == "hello" and message["number"] >= 0:
            self._welcome(agent, message)
        elif kind == "hello":
            agent.connection.ended = "has a negative number"
        elif kind == "beat":
            agent.connection.send("ack", number=message["number"])
        elif kind == "signal" and message["signum"] in self._stop_signals:
            self._pass_on(message["signum"])
        elif kind == "unfit" and not agent.in_generation:
            agent.connection.send("exit", code=FAILED)
            self._lose(agent, f"its host is not used: {message['why']}")
        elif message.get("generation") == self._generation and agent in self._members:
            self._hear_of_ranks(agent, message)

    def _hear_of_ranks(self, agent: Agent, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "port" and self._state == "running":  # else a node was lost before any rank has started
            self._port = message["port"]
            self._start_ranks()
            self._signal_members()
        elif kind == "cannot":
            say(f"error: {message['why']}")
            self._state = "refused"
        elif kind == "failed":
            self._fail(f"{message['why']} on {agent}", kill=False)
        elif kind == "unfit":
            agent.unfit = message["why"]
        elif kind == "ended" and agent.in_generation:  # a "stop" that arrives after it is answered with another one
            agent.in_generation = False
            agent.failures, agent.refused = message["failures"], message["refused"]
            if agent.failures and self._stopped_by is None:
                self._fail(f"{agent.failures[0]} on {agent}", kill=False)
            if agent.unfit is not None:
                self._lose(agent, f"its host is not used again: {agent.unfit}")

    def _welcome(self, agent: Agent, hello: dict[str, Any]) -> None:
        """Let an agent in that introduces itself, or refuse it."""
        launch = self._launch
        who, why = f"node {hello['number']} ({hello['host']})", None
        if hello["launch_id"] not in ("", launch.launch_id):
            why = f"{who} belongs to launch {hello['launch_id']}, not to {launch.launch_id}"
        elif hello["ranks"] != launch.ranks_per_node:
            why = (
                f"{who}: --nproc-per-node {hello['ranks']}, and that of the "
                f"coordinator is {launch.ranks_per_node}; give both the same"
            )
        elif self._first is not None:
            why = difference([self._first, (hello["host"], hello["versions"])])
        before = [one for one in self._agents if one.number == hello["number"]]
        for other in before:
            if why is None and other.instance != hello["instance"] and not other.connection.ended:
                why = f"{who}: that number was given to a launcher on {other.host}, too; number the nodes from 0 on"
        if why is not None:
            say(f"error: {why}")
            # Of the same launch id are those that one launch script has started, which shows what all of them print.
            together = hello["launch_id"] == launch.launch_id
            agent.connection.send("refuse", why="" if together else why)
            agent.connection.ended = "is refused"
            if self._generation < 0:
                self._state = "refused"
            return
        for other in before:
            self._lose(other, "its agent has connected again", replace=False)
        self._first = self._first or (hello["host"], hello["versions"])
        agent.number, agent.address, agent.host = hello["number"], hello["address"], hello["host"]
        agent.copies, agent.instance = hello["copies"], hello["instance"]
        agent.place = self._place_of(hello)
        if self._took_over and not self._joined:  # until now all may have been connected to the other coordinator
            self._began = self._since = time.monotonic()
        self._joined.add(agent.number)
        agent.connection.send("welcome", heartbeat_timeout_s=launch.heartbeat_timeout_s, launch_id=launch.launch_id)
        if agent.place is None:
            say(f"{agent} has joined as a spare")
            if self._state == "running" and self._port is not None:
                agent.connection.send("wait", copies=self._copies_of_members())

    def _place_of(self, hello: dict[str, Any]) -> int | None:
        """The place of an agent that joins: its number in the first generation; later none, it is a spare.

        After a takeover it keeps the place that it had, and with it the saves and the page cache of its host.
        """
        if self._generation < 0:
            return hello["number"] if hello["number"] < self._launch.nodes else None
        taken = {agent.place for agent in self._agents}
        place = hello["place"]
        return place if self._took_over and place >= 0 and place not in taken else None

    def _lose(self, agent: Agent, why: str, *, replace: bool = True) -> None:
        """Have done with an agent. If it is a member, its ranks count as dead: it kills them before we come to this.

        `replace`: another host is to be asked for.
        """
        self._agents.remove(agent)
        self._selector.unregister(agent.connection)
        agent.connection.close()
        if agent.in_generation:
            agent.in_generation = False
            agent.failures = agent.failures or [f"{agent} is lost: {why}"]
            self._members.remove(agent)
            if self._state != "running":  # what has begun to end was told of
                say(agent.failures[0])
            self._fail(agent.failures[0], kill=True)
        elif agent.number >= 0:
            say(f"{agent} is lost: {why}")
        if replace and agent.number >= 0 and self._generation >= 0:
            self._ask_for_host(agent, why)

    def _prepare_spares(self) -> None:
        """Tell each spare, once, whose place it takes if the nodes that are silent are lost: it fetches their saves."""
        if self._port is None or self._shrunk is not None:
            return
        silence = SUSPECTED * self._launch.heartbeat_timeout_s
        heard = [agent for agent in self._agents if agent.number >= 0 and time.monotonic() - agent.heard <= silence]
        placed = {agent.place: agent for agent in heard if agent.place is not None}
        missing = [place for place in range(self._launch.nodes) if place not in placed]
        for place, spare in zip(missing, self._free(heard), strict=False):
            if spare.expects == place or not spare.copies:
                continue
            spare.expects = place
            # Hosts hold copies of their neighbours' saves (megatron.peers.placement).
            near = sorted((agent for agent in placed.values() if agent.copies), key=lambda agent: _apart(agent, place))
            spare.connection.send("expect", node_rank=place, copies=_copies_of(near))
        if not missing:
            for agent in heard:
                agent.expects = None

    @staticmethod
    def _free(agents: Sequence[Agent]) -> list[Agent]:
        """The spares among them, those that take a place first in front."""
        return sorted((agent for agent in agents if agent.place is None), key=lambda agent: agent.number)

    def _ask_for_host(self, agent: Agent, why: str) -> None:
        """Start the hook, if there is one, and go on. What it brings joins as a spare, by any number that is free."""
        hook = self._launch.replacement_hook
        if hook is None:
            return
        there = sum(other.number >= 0 for other in self._agents)
        told = {
            "COORDINATOR_PORT": str(self._port_number), "NODES_MISSING": str(max(0, self._launch.nodes - there)),
            LAUNCH_ID_VARIABLE: self._launch.launch_id,
        }  # fmt: skip
        try:
            command = [str(hook), agent.host, str(agent.number), why]
            self._hooks.append(subprocess.Popen(command, env=os.environ | told, stdin=subprocess.DEVNULL))
        except OSError as error:
            say(f"error: --replacement-hook {hook}: cannot be started: {error.strerror or error}")
            return
        say(f"{hook} was asked for a host in the place of {agent.host}")

    def _look_after_hooks(self) -> None:
        for hook in [one for one in self._hooks if one.poll() is not None]:
            if hook.returncode:
                say(f"--replacement-hook {self._launch.replacement_hook}: ended with {hook.returncode}: no host comes")
                self._hooks.remove(hook)

    # Generations

    def _gather(self) -> int | None:
        """Start the next generation if there are nodes for it; an exit status if there will not be."""
        launch = self._launch
        if self._generation >= launch.max_restarts and self._took_over:
            say(f"error: the ranks ended with their coordinator, and no restart of {launch.max_restarts} is left")
            return FAILED
        waited = time.monotonic() - self._since
        chosen = self._choose()
        if chosen is not None:
            return self._begin_recorded(chosen, None, waited)
        limit = self._patience()
        if waited <= limit:
            return None
        if launch.allow_shrink and self._generation >= 0:
            chosen, job = self._shrink()
            if job is not None:
                return self._begin_recorded(chosen, job, waited)
        present = {agent.place for agent in self._agents if agent.place is not None}
        missing = [place for place in range(launch.nodes) if place not in present]
        say(
            f"error: {len(missing)} of {launch.nodes} nodes missing (node ranks {_listed(missing)}) and no spare came "
            f"within {limit:g} s; {self._what_helps()}"
        )
        return FAILED if self._generation >= 0 else COULD_NOT_RUN

    def _patience(self) -> float:
        """Seconds to wait for nodes that are missing."""
        launch = self._launch
        if self._generation < 0 or self._hooks:  # at first all nodes import
            return launch.join_timeout_s
        if self._took_over:
            return self._takeover_s() if self._joined else launch.join_timeout_s
        # A node may come back whose link was cut for a moment.
        return launch.join_timeout_s if self._awaits_first() else launch.heartbeat_timeout_s

    def _takeover_s(self) -> float:
        """Seconds in which all agents find a coordinator that has taken over, counted from the first of them."""
        return self._launch.heartbeat_timeout_s + _FIND_S

    def _what_helps(self) -> str:
        if not self._launch.allow_shrink or self._generation < 0:
            return "start the job again on nodes that live, give more hosts than it needs, or --allow-shrink"
        return f"--allow-shrink: {self._why_no_layout}; start the job again on more nodes"

    def _shrink(self) -> tuple[list[Agent], Shrunk | None]:
        """The members of a generation on the nodes that are left, and its layout; None if none fits."""
        launch = self._launch
        known = sorted((agent for agent in self._agents if agent.number >= 0), key=_by_place)
        try:
            if not known:
                raise NoLayoutError("no node is left")
            job = shrunk(launch.arguments, launch.ranks_per_node, launch.nodes, len(known))
        except NoLayoutError as exc:
            self._why_no_layout = str(exc)
            return [], None
        return known[: job.nodes], job

    def _awaits_first(self) -> bool:
        """Whether nodes that were to be there have never been."""
        in_time = time.monotonic() - self._began <= self._launch.join_timeout_s
        return in_time and len(self._joined) < self._expected

    def _choose(self) -> list[Agent] | None:
        """The members of the next generation, by node rank; None if there are too few.

        A node keeps its place, and with it the page cache of what its ranks have saved; spares fill the gaps.
        """
        nodes = self._launch.nodes
        known = [agent for agent in self._agents if agent.number >= 0]
        placed = {agent.place: agent for agent in known if agent.place is not None and agent.place < nodes}
        free = self._free(known)
        limit = self._takeover_s() if self._took_over else self._launch.join_timeout_s
        first_wait = (self._generation < 0 or self._took_over) and time.monotonic() - self._began <= limit
        if first_wait and len(placed) < nodes:
            return None  # a node that still imports, or looks for this coordinator, is not replaced by a spare
        for place in range(nodes):
            if place not in placed and free:
                placed[place] = free.pop(0)
        return [placed[place] for place in range(nodes)] if len(placed) == nodes else None

    def _begin_recorded(self, members: list[Agent], job: Shrunk | None, waited: float) -> int | None:
        """Begin the next generation once etcd has its number; an exit status if that takes too long."""
        launch = self._launch
        if self._leadership is None or self._leadership.record(self._generation + 1, launch.launch_id):
            self._waits_for_etcd = False
            self._begin(members, job)
            return None
        if self._leadership.unreachable and not self._waits_for_etcd:
            self._waits_for_etcd = True
            say(f"all nodes are there; their ranks start once etcd at {launch.membership} answers")
        if waited <= launch.join_timeout_s or self._leadership.leader is not None:
            return None
        say(
            f"error: --membership {launch.membership}: no ranks start without etcd, and it did not answer within "
            f"--join-timeout {launch.join_timeout_s:g}"
        )
        return FAILED if self._generation >= 0 else COULD_NOT_RUN

    def _begin(self, members: list[Agent], job: Shrunk | None) -> None:
        """Have node 0 of the next generation serve its rendezvous; all start when its port is known."""
        self._took_over = False
        if job is not None:
            nodes, launched = len([agent for agent in self._agents if agent.number >= 0]), self._launch.nodes
            say(
                f"{nodes} of {launched} nodes are left, and no spare: going on with {job.layout} on {job.nodes} nodes "
                "(--allow-shrink)"
            )
        self._hooks = [hook for hook in self._hooks if hook.poll() is None]  # of others their host has come, or is late
        self._generation += 1
        self._members, self._shrunk = members, job
        self._state, self._since, self._port = "running", time.monotonic(), None
        if self._generation > 0:
            say(f"starting all ranks again: restart {self._generation} of {self._launch.max_restarts}")
        for agent in self._agents:
            if agent not in members:
                agent.place = None
        for place, agent in enumerate(members):
            if self._generation > 0 and agent.place is None:
                say(f"{agent} takes the place of node rank {place}")
            agent.place, agent.in_generation, agent.failures, agent.refused = place, True, [], 0
        members[0].connection.send("serve", generation=self._generation)

    def _start_ranks(self) -> None:
        # What they hold from before is still there, and the ranks that start now may need it.
        others = [agent for agent in self._agents if agent.number >= 0 and agent not in self._members]
        waiting = [(agent.host, agent.address, agent.copies) for agent in others if agent.copies]
        copies = self._copies_of_members()
        for agent in others:
            agent.connection.send("wait", copies=copies)
        for place, agent in enumerate(self._members):
            agent.connection.send(
                "start",
                generation=self._generation,
                node_rank=place,
                nnodes=len(self._members),
                master_addr=self._members[0].address,
                master_port=self._port,
                max_restarts=self._launch.max_restarts,
                arguments=[] if self._shrunk is None else self._shrunk.arguments,
                waiting=waiting,
                copies=copies,
            )

    def _copies_of_members(self) -> list[list[Any]]:
        return _copies_of([member for member in self._members if member.copies])

    def _fail(self, why: str, *, kill: bool) -> None:
        """End a generation whose rank failed, or whose node is lost (`kill`: no rank can finish anything)."""
        at_ns = now_ns()
        first = self._state == "running"
        if first:
            self._state, self._since = "stopping", time.monotonic()
            say(why)
        if first or kill:
            for agent in self._members:
                if agent.in_generation:
                    agent.connection.send("stop", generation=self._generation, kill=kill, why=why)
        if first:
            self._trace.detected(self._generation, why, at_ns)

    def _after_generation(self) -> int | None:
        """What follows when all ranks have ended; None while some run, or when they are started again."""
        if any(agent.in_generation for agent in self._members):
            return None
        failed = self._state == "stopping" or any(agent.failures for agent in self._members)
        if not failed:
            return 0
        if self._stopped_by is not None:
            return 128 + self._stopped_by
        # A rank on an unfit host, as one that lost its GPU, also ends with exit code 2: its input is not wrong.
        refused = max((agent.refused for agent in self._members if agent.unfit is None), default=0)
        final = self._refusals.final(refused)
        if self._generation >= self._launch.max_restarts:
            return refused or FAILED
        if final:
            say(f"the launch ends: {why_not_again(refused)}")
            return refused
        self._state, self._since = "gathering", time.monotonic()
        return self._gather()

    # The end

    def _caught(self, signum: int) -> None:
        if signum != NODE_FAILED_SIGNAL:
            self._pass_on(signum)
        elif self._generation < 0:
            say("error: the launcher of a node ended before all nodes had joined; its own message says why")
            self._state = "refused"

    def _pass_on(self, signum: int) -> None:
        if self._stopped_by is not None:
            return
        self._stopped_by = signum
        say(f"{signal.Signals(signum).name} was received and passed on to the ranks")
        self._signal_members()
        if self._state == "gathering":
            self._state = "stopping"  # nothing runs: the launch ends

    def _signal_members(self) -> None:
        """Pass on the signal that is to end all ranks, if there is one."""
        for agent in self._members if self._stopped_by is not None else ():
            if agent.in_generation:
                agent.connection.send("signal", signum=self._stopped_by)

    def _dismiss(self, code: int) -> None:
        """Have all agents end with `code`; those that do not listen are left to their nodes."""
        if self._leadership is not None:
            self._leadership.end(code, self._launch.launch_id)
        deadline = time.monotonic() + _EXIT_S
        for agent in self._agents:
            agent.connection.send("exit", code=code)
        while any(not agent.connection.ended for agent in self._agents) and time.monotonic() < deadline:
            self._selector.select(_POLL_S)
            for agent in self._agents:
                agent.connection.flush()
                agent.connection.messages()
        sys.stderr.flush()


def _by_place(agent: Agent) -> tuple[bool, int, int]:
    """Members of the last generation first, in their order."""
    return (agent.place is None, agent.place or 0, agent.number)


def _copies_of(agents: Sequence[Agent]) -> list[list[Any]]:
    """Where their processes that hold copies are reached."""
    return [[agent.host, agent.address, agent.copies] for agent in agents]


def _apart(agent: Agent, place: int) -> int:
    """How many places lie between them."""
    return abs((agent.place or 0) - place)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _write_at_once(path: Path, text: str) -> None:
    """Write a file that a reader sees either not at all or complete."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # a killed launch may have left one, and a link is not followed
    with temporary.open("x") as file:
        file.write(text)
    temporary.rename(path)
