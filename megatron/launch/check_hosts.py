"""Compares the hosts of a launch before any rank is started: what each runs, and whether it can meet the others.

    python -m megatron.launch.check_hosts tell --place N [...]       on a host: one line about it
    python -m megatron.launch.check_hosts judge < LINES              those of all hosts: what is wrong, as one message
    python -m megatron.launch.check_hosts meet --place N --nodes M   on each host of a launch that is typed on each

The launch scripts call it. `meet` uses the port of the rendezvous before a launcher does: host 0 listens there until
all have come. No host imports torch for this.

exit status: 0 nothing is wrong; 1 something is, which is printed; 2 wrong command line
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from megatron.launch.messages import Connection
from megatron.processes.rendezvous_store import listen_on
from megatron.processes.source import difference, what_runs
from restart_trace.command_line import CommandParser

_POLL_S = 0.1
_SAY_AFTER_S = 5.0
_LEAVE_S = 2.0
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
            listen_on("", int(_value(port))).close()
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
        return _receive_all(mine, nodes, port, deadline)
    return _ask_first(mine, address, port, deadline)


def _receive_all(mine: Host, nodes: int, port: str, deadline: float) -> str | None:
    try:
        listening = listen_on("", int(_value(port)))
    except OSError as error:
        return what_is_wrong([Host(mine.place, mine.name, mine.runs, taken=f"{port}: {_why_not_listened(error)}")])
    hosts: dict[Connection, Host] = {}
    strangers: list[Connection] = []
    began, told = time.monotonic(), False
    with listening:
        while len(hosts) < nodes - 1 and time.monotonic() < deadline:
            ready, _, _ = select.select([listening, *hosts, *strangers], [], [], _POLL_S)
            if listening in ready:
                strangers.append(Connection(listening.accept()[0]))
            for connection in strangers:
                for message in connection.receive():
                    if message["type"] == "here":
                        hosts[connection] = Host(message["place"], message["host"], message["runs"])
            for connection in hosts:
                connection.receive()
            hosts = {connection: host for connection, host in hosts.items() if not connection.ended}
            strangers = [one for one in strangers if not one.ended and one not in hosts]
            if not told and time.monotonic() - began > _SAY_AFTER_S:
                told = True
                print(f"waiting for NODE_RANK {_missing(hosts.values(), nodes)} of {nodes} nodes", file=sys.stderr)
    wrong = what_is_wrong([mine, *hosts.values()])
    if wrong is None and len(hosts) < nodes - 1:
        missing = _missing(hosts.values(), nodes)
        wrong = f"NODE_RANK {missing} of {nodes} nodes did not come; start this script on every node"
    for connection in hosts:
        connection.send("compared", wrong=wrong or "")
    _wait_until_left(list(hosts))
    return wrong


def _missing(hosts: Iterable[Host], nodes: int) -> str:
    there = {0, *(host.place for host in hosts)}
    missing = [str(place) for place in range(nodes) if place not in there]
    return f"{', '.join(missing[:_SHOWN])}{' ...' if len(missing) > _SHOWN else ''}"


def _wait_until_left(connections: Sequence[Connection]) -> None:
    """So that the port is free at once: it is the end which closes first that keeps it."""
    deadline = time.monotonic() + _LEAVE_S
    left = connections
    while left and time.monotonic() < deadline:
        select.select(left, [], [], _POLL_S)
        for connection in left:
            connection.flush()
            connection.receive()
        left = [connection for connection in left if not connection.ended]
    for connection in connections:
        connection.close()


def _ask_first(mine: Host, address: str, port: str, deadline: float) -> str | None:
    why, began, told = "what listens there does not answer", time.monotonic(), False
    while time.monotonic() < deadline:
        if not told and time.monotonic() - began > _SAY_AFTER_S:
            told = True
            print(f"waiting for NODE_RANK 0 at {address} {port}: {why}", file=sys.stderr)
        try:
            opened = socket.create_connection((_value(address), int(_value(port))), timeout=5)
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(_POLL_S)
            continue
        connection = Connection(opened)
        connection.send("here", place=mine.place, host=mine.name, runs=mine.runs)
        while not connection.ended and time.monotonic() < deadline:
            select.select([connection], [], [], _POLL_S)
            connection.flush()
            for message in connection.receive():
                if message["type"] == "compared":
                    connection.close()
                    return message["wrong"] or None
        connection.close()
        time.sleep(_POLL_S)
    return (
        f"{address} {port}: the launch of NODE_RANK 0 was not met there from {mine.name} ({why}); start it on that "
        f"host, or set {address.partition('=')[0]} to the host where it runs"
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m megatron.launch.check_hosts",
        description="Compares the hosts of a launch before any rank is started; called by the launch scripts.",
        epilog="exit status: 0 nothing is wrong; 1 something is, which is printed; 2 wrong command line",
    )
    parser.add_argument("action", choices=["tell", "judge", "meet"])
    parser.add_argument("--place", type=int, default=0, metavar="N", help="number of this host in the launch")
    parser.add_argument("--address", metavar="NAME=HOST", help="setting with the name that this host must know")
    parser.add_argument("--port", metavar="NAME=PORT", help="setting with the port that must be free on host 0")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="of meet: how many hosts there are")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of meet: seconds to wait for them")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Do one of the three; the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if args.action == "tell":
        print(json.dumps(asdict(tell(args.place, args.address, args.port))))
        return 0
    if args.action == "judge":
        wrong = what_is_wrong([Host(**json.loads(line)) for line in sys.stdin if line.strip()])
    else:
        if args.address is None or args.port is None:
            parser.error("meet: needs --address and --port")
        mine = tell(args.place, args.address, None)
        wrong = meet(mine, args.nodes, args.address, args.port, args.timeout)
    if wrong is not None:
        print(wrong)
    return 0 if wrong is None else 1


if __name__ == "__main__":
    sys.exit(main())
