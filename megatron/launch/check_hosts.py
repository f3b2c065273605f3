"""Compares the hosts of a launch before any rank is started: what each runs, and whether it can meet the others.

    python -m megatron.launch.check_hosts tell --place N [...]       on a host: one line about it
    python -m megatron.launch.check_hosts judge < LINES              those of all hosts: what is wrong, as one message
    python -m megatron.launch.check_hosts meet --place N --nodes M   on each host of a launch that is typed on each
    python -m megatron.launch.check_hosts refuse --why TEXT [...]    in place of `meet`, on a host that will not train

The launch scripts call it. `meet` uses the port of the rendezvous before a launcher does: host 0 listens there until
all have connected. A host that was refused earlier connects too and sends the reason, so that no host waits for it. No
host imports torch for this. With MEGATRON_LAUNCH_SECRET the hosts prove to each other that they know it; without it,
any process that reaches the port can take part, and a line says so.

exit status: 0 nothing is wrong; 1 something is, which is printed; 2 wrong command line
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron.launch.messages import LaunchConnection
from megatron.net.acceptor import Acceptor
from megatron.net.handshake import MEETING, connect
from megatron.net.listening import EVERYWHERE, listen_for_hosts, listen_on
from megatron.net.secret import VARIABLE, SecretError, launch_secret
from megatron.net.tls import TlsSettingsError, take_files
from megatron.processes.source import difference, what_runs
from restart_trace.command_line import CommandParser

_POLL_S = 0.1
_SAY_AFTER_S = 5.0
_LEAVE_S = 2.0
_CONNECT_S = 5.0
# After a refusal, connected hosts are told at once; this is how long to wait for the other hosts in order to tell them.
_TELL_S = 60.0
_SHOWN = 8


@dataclass(frozen=True)
class Host:
    """What one host tells. `place`: its number in the launch; rank 0 runs on the first."""

    place: int
    name: str
    runs: dict[str, str]
    unknown: str = ""  # the setting with a name that it does not know, and why
    taken: str = ""  # the setting with the port that cannot be listened on there, and why


def what_is_wrong(hosts: Sequence[Host]) -> str | None:
    """One message about all hosts, or None: the first of what keeps them from meeting, then how they differ."""
    hosts = sorted(hosts, key=lambda host: host.place)
    unknown = [host.name for host in hosts if host.unknown]
    if unknown:
        setting, _, why = next(host.unknown for host in hosts if host.unknown).partition(": ")
        where = f"{', '.join(unknown[:_SHOWN])}{' ...' if len(unknown) > _SHOWN else ''}"
        return f"{setting}: {where} cannot resolve it ({why}); give a name or an address that every host knows"
    if hosts and hosts[0].taken:
        setting, _, why = hosts[0].taken.partition(": ")
        name = setting.partition("=")[0]
        return f"{setting}: {why} on {hosts[0].name}, where rank 0 runs; set {name} to a port that is free there"
    for one, other in zip(hosts, hosts[1:], strict=False):
        if one.place == other.place:
            return f"NODE_RANK={one.place}: was given on {one.name} and on {other.name}; number the hosts from 0 on"
    return difference([(host.name, host.runs) for host in hosts])


def tell(place: int, address: str | None, port: str | None) -> Host:
    """About this host. `address`, `port`: settings, as NAME=VALUE; None: not to be looked at."""
    unknown = taken = ""
    if address is not None:
        try:
            socket.getaddrinfo(_value(address), None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            unknown = f"{address}: {getattr(error, 'strerror', None) or error}"
    if port is not None:
        try:
            listen_on(EVERYWHERE, int(_value(port))).close()
        except OSError as error:
            taken = f"{port}: {_why_not_listened(error)}"
    return Host(place, socket.gethostname(), what_runs(), unknown, taken)


def _value(setting: str) -> str:
    return setting.partition("=")[2]


def _why_not_listened(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another process listens there"
    return f"cannot be listened on ({os.strerror(error.errno) if error.errno else error})"


def meet(mine: Host, nodes: int, address: str, port: str, at_most_s: float) -> str | None:
    """Wait for the launches on all hosts, at most so long; what is wrong, the same on all of them, or None."""
    deadline = time.monotonic() + at_most_s
    if mine.unknown:
        return what_is_wrong([mine])
    if mine.place == 0:
        if launch_secret() is None:
            print(
                f"{VARIABLE} is not set: any process that reaches port {_value(port)} of this host can end the launch; "
                "give all nodes the same, such as the output of `openssl rand -hex 32`",
                file=sys.stderr,
            )
        try:
            return _Meeting(mine, nodes, _value(address)).hold(port, deadline)
        except OSError as error:
            return what_is_wrong([replace(mine, taken=f"{port}: {_why_not_listened(error)}")])
    here = {"place": mine.place, "host": mine.name, "runs": mine.runs}
    return _ask_first(address, port, deadline, "here", here, mine.name)


def refuse(why: str, first: bool, nodes: int | None, address: str, port: str, at_most_s: float) -> None:
    """Tell the other hosts that this host was refused, and why. `first`: it is host 0. `nodes`: None if unknown.

    Does nothing if the other hosts cannot be reached.
    """
    deadline = time.monotonic() + min(at_most_s, _TELL_S)
    why = " ".join(why.split())
    if not first:
        _ask_first(address, port, deadline, "refused", {"why": why}, socket.gethostname())
        return
    with contextlib.suppress(OSError):
        _Meeting(Host(0, socket.gethostname(), {}), nodes, _value(address), why).hold(port, deadline)


def _secret() -> bytes:
    """Of the launch; empty without one, which proves nothing."""
    return (launch_secret() or "").encode()


class _Meeting:
    """Host 0's part: it hears from all other hosts, compares them, and tells all. `refusal`: why a host was refused.

    `address`: by which they reach this host.
    """

    def __init__(self, mine: Host, nodes: int | None, address: str, refusal: str | None = None) -> None:
        self._mine = mine
        self._address = address
        self._nodes = nodes
        self._refusal = refusal
        self._strangers: list[LaunchConnection] = []
        self._waiting: dict[LaunchConnection, Host] = {}
        self._told: list[LaunchConnection] = []

    def hold(self, port: str, deadline: float) -> str | None:
        """What is wrong, or None; all have been told. Raises OSError if the port cannot be listened on."""
        began, said = time.monotonic(), False
        acceptor = Acceptor(listen_for_hosts(self._address, int(_value(port))), _secret(), MEETING)
        with contextlib.closing(acceptor):
            while not self._all_came() and time.monotonic() < deadline:
                select.select([acceptor, *self._strangers, *self._waiting], [], [], _POLL_S)
                self._strangers += [LaunchConnection(connected) for connected, _ in acceptor.accepted()]
                was_refused = self._refusal is not None
                self._hear()
                if self._refusal is not None:
                    self._tell(self._refusal)
                    deadline = deadline if was_refused else min(deadline, time.monotonic() + _TELL_S)
                if not said and time.monotonic() - began > _SAY_AFTER_S:
                    said = True
                    print(self._waits_for(), file=sys.stderr)
        wrong = self._judge()
        self._tell(wrong or "")
        _wait_until_left(self._told)
        return wrong

    def _all_came(self) -> bool:
        return self._nodes is not None and len(self._waiting) + len(self._told) >= self._nodes - 1

    def _hear(self) -> None:
        for connection in self._strangers:
            for message in connection.messages():
                if message["type"] == "here":
                    self._waiting[connection] = Host(message["place"], message["host"], message["runs"])
                elif message["type"] == "refused":
                    self._waiting[connection] = Host(-1, "", {})
                    self._refusal = self._refusal or message["why"]
        for connection in self._waiting:
            connection.messages()
        self._waiting = {connection: host for connection, host in self._waiting.items() if not connection.ended}
        self._strangers = [one for one in self._strangers if not one.ended and one not in self._waiting]

    def _tell(self, wrong: str) -> None:
        for connection in self._waiting:
            connection.send("compared", wrong=wrong)
        self._told += self._waiting
        self._waiting = {}

    def _judge(self) -> str | None:
        if self._refusal is not None:
            return self._refusal
        wrong = what_is_wrong([self._mine, *self._waiting.values()])
        if wrong is None and not self._all_came():
            return f"{self._missing()} did not come; start this script on every node"
        return wrong

    def _waits_for(self) -> str:
        if self._refusal is None:
            return f"waiting for {self._missing()}"
        return f"telling the other nodes, as they come: {self._refusal}"

    def _missing(self) -> str:
        there = {0, *(host.place for host in self._waiting.values())}
        missing = [str(place) for place in range(self._nodes or 0) if place not in there]
        shown = f"{', '.join(missing[:_SHOWN])}{' ...' if len(missing) > _SHOWN else ''}"
        return f"NODE_RANK {shown} of {self._nodes} nodes"


def _wait_until_left(connections: Sequence[LaunchConnection]) -> None:
    """So that the port is free at once: it is the end which closes first that keeps it."""
    deadline = time.monotonic() + _LEAVE_S
    left = [connection for connection in connections if not connection.ended]
    while left and time.monotonic() < deadline:
        select.select(left, [], [], _POLL_S)
        for connection in left:
            connection.flush()
            connection.messages()
        left = [connection for connection in left if not connection.ended]
    for connection in connections:
        connection.close()


def _ask_first(address: str, port: str, deadline: float, kind: str, content: dict[str, Any], name: str) -> str | None:
    """Say something to host 0 from the host `name`; what is wrong, as that says, or that it was not met; or None."""
    why, began, told = "what listens there does not answer", time.monotonic(), False
    while time.monotonic() < deadline:
        if not told and time.monotonic() - began > _SAY_AFTER_S:
            told = True
            print(f"waiting for NODE_RANK 0 at {address} {port}: {why}", file=sys.stderr)
        try:
            opened = connect((_value(address), int(_value(port))), _secret(), MEETING, _CONNECT_S)
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(_POLL_S)
            continue
        connection = LaunchConnection(opened)
        connection.send(kind, **content)
        while not connection.ended and time.monotonic() < deadline:
            select.select([connection], [], [], _POLL_S)
            connection.flush()
            for message in connection.messages():
                if message["type"] == "compared":
                    connection.close()
                    return message["wrong"] or None
        connection.close()
        time.sleep(_POLL_S)
    return (
        f"{address} {port}: the launch of NODE_RANK 0 was not met there from {name} ({why}); start it on that host, or "
        f"set {address.partition('=')[0]} to the host where it runs"
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m megatron.launch.check_hosts",
        description="Compares the hosts of a launch before any rank is started; called by the launch scripts.",
        epilog="exit status: 0 nothing is wrong; 1 something is, which is printed; 2 wrong command line",
    )
    parser.add_argument("action", choices=["tell", "judge", "meet", "refuse"])
    parser.add_argument(
        "--place", type=int, default=0, metavar="N", help="number of this host in the launch; refuse: 0, or any other"
    )
    parser.add_argument("--address", metavar="NAME=HOST", help="setting with the name that this host must know")
    parser.add_argument("--port", metavar="NAME=PORT", help="setting with the port that must be free on host 0")
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="of meet, and of refuse if known: how many hosts there are"
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of meet: seconds to wait for them")
    parser.add_argument("--why", default="", metavar="TEXT", help="of refuse: which host was refused, and why")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Do one of the four; the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        launch_secret()
        if args.action in ("meet", "refuse"):
            take_files({})
    except (SecretError, TlsSettingsError) as error:
        print(error)
        return 1
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as it is for what a script starts with &
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if args.action == "tell":
        print(json.dumps(asdict(tell(args.place, args.address, args.port))))
        return 0
    if args.action == "judge":
        wrong = what_is_wrong([Host(**json.loads(line)) for line in sys.stdin if line.strip()])
    elif args.address is None or args.port is None:
        parser.error(f"{args.action}: needs --address and --port")
    elif args.action == "refuse":
        refuse(args.why, args.place == 0, args.nodes, args.address, args.port, args.timeout)
        return 0
    else:
        if args.nodes is None:
            parser.error("meet: needs --nodes")
        wrong = meet(tell(args.place, args.address, None), args.nodes, args.address, args.port, args.timeout)
    if wrong is not None:
        print(wrong)
    return 0 if wrong is None else 1


if __name__ == "__main__":
    sys.exit(main())
