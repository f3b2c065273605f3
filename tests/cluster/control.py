"""What may be done to the nodes of a cluster, by lines of words: from a terminal, or a program on a node.

`Control` listens on a socket on the file system that all nodes share; `program` is what a drill takes as
--nodes-command (tools/restart_drill/nodes.py), and passes lines to it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cluster.cluster import Cluster, Node

HELP = """\
commands: lose NODE | cut NODE | slow-link NODE [KBIT_PER_S] | slow-disk NODE [KBYTE_PER_S] | repair NODE |
          slow-storage [KBYTE_PER_S] | stop NODE WORD | continue NODE WORD | run NODE COMMAND | spare [SECONDS] |
          nodes | help | exit (or end of input)
repair undoes cut, slow-link and slow-disk, and restarts a lost node; slow-storage limits all nodes in total
(0: no limit); stop and continue reach the processes with WORD in their command line; run prints the output of COMMAND;
spare adds a node, whose monotonic clock is ahead by SECONDS
"""
SLOW_LINK_KBIT, SLOW_DISK_KBYTE, SLOW_STORAGE_KBYTE = 4000, 2000, 200_000
_SOCKET = "control.sock"


class UsageError(ValueError):
    """A line that means nothing."""


def obey(cluster: Cluster, words: list[str]) -> str:
    """Do what a line says; what there is to tell. Raises UsageError, ClusterError, OSError or ValueError."""
    match words:
        case []:
            return ""
        case ["spare", *offset] if len(offset) <= 1:
            cluster.add_node(clock_offset_s=int(*offset))
            return shown(cluster)
        case ["nodes"]:
            return shown(cluster)
        case ["slow-storage", *rest] if len(rest) <= 1:
            cluster.slow_storage(int(rest[0]) if rest else SLOW_STORAGE_KBYTE)
            return ""
        case ["repair", name] if name in cluster.lost:
            cluster.lost[name].repair()
            return ""
        case [action, name, *rest] if name in cluster.nodes:
            return _act(cluster.nodes[name], action, rest)
    raise UsageError(HELP)


def _act(node: Node, action: str, rest: list[str]) -> str:
    match action, rest:
        case "lose", []:
            node.lose()
        case "cut", []:
            node.cut_link()
        case "slow-link", _ if len(rest) <= 1:
            node.slow_link(int(*rest) or SLOW_LINK_KBIT)
        case "slow-disk", _ if len(rest) <= 1:
            node.slow_disk(int(*rest) or SLOW_DISK_KBYTE)
        case "repair", []:
            node.repair()
        case "stop", [word]:
            return f"{node.send(signal.SIGSTOP, word)} processes\n"
        case "continue", [word]:
            return f"{node.send(signal.SIGCONT, word)} processes\n"
        case "run", _ if rest:
            return node.run("bash", "-c", " ".join(rest)).stdout
        case _:
            raise UsageError(HELP)
    return ""


def shown(cluster: Cluster) -> str:
    """A line for each node: how it is entered."""
    from tests.cluster.cluster import enter

    return "".join(
        f"{node.name:8} {node.address:12} {' '.join(enter(node.pid))} env HOME={cluster.home} bash\n"
        for node in cluster.nodes.values()
    )


class Control:
    """Obeys lines that come through a socket in the directory of the cluster, until that ends."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._listening = socket.socket(socket.AF_UNIX)
        directory = os.open(cluster.directory, os.O_PATH)
        self._listening.bind(f"/proc/self/fd/{directory}/{_SOCKET}")  # a path of a socket may have 107 characters
        os.close(directory)
        self._listening.listen(16)
        threading.Thread(target=self._serve, name="control", daemon=True).start()

    @property
    def program(self) -> list[str]:
        """A command that does what the lines on its standard input say."""
        return [sys.executable, "-I", "-S", str(Path(__file__).with_name("tell.py")), str(self._cluster.directory)]

    def close(self) -> None:
        self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                connected, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(connected,), daemon=True).start()

    def _talk(self, connected: socket.socket) -> None:
        with contextlib.suppress(OSError), connected, connected.makefile("rw") as stream:
            for line in stream:
                try:
                    answer = obey(self._cluster, line.split()) + "ok\n"
                except Exception as error:  # the program that asked is to hear of it
                    answer = f"error: {type(error).__name__}: {' '.join(str(error).split())}\n"
                stream.write(answer)
                stream.flush()
