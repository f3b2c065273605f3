"""Nodes on one machine, each in Linux namespaces of its own, with real sshd on each.

Everything lives within one outer PID namespace. Its first process ends with the process that holds the cluster, SIGKILL
included, and the kernel then kills every other process of the namespace; network devices, mounts and /dev/shm of the
nodes go with their namespaces. So nothing has a name outside, nothing has to be removed, and clusters do not meet.

What a node has of its own: host name, address, /dev/shm, /run, local disk (`Cluster.local_disk`, a size-limited tmpfs),
process ids, and, where the kernel can do it, a monotonic clock. What all share: the file system of the machine, which
stands for the parallel file system; root's home directory is `Cluster.home`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.cluster.control import Control
from tests.cluster.links import Links
from tests.cluster.probe import SYSTEM_PATH, has_time_namespaces
from tests.cluster.throttle import Throttle
from tests.dist.harness import HANGS_S, wait_for

_NETWORK = "10.77.0"
_INTERFACE = "eth0"
_SSH_PORT = 22

_SSHD_CONFIG = """\
HostKey {etc}/host_key
AuthorizedKeysFile /run/authorized_keys
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PidFile none
MaxStartups 100
PrintMotd no
"""
_SSH_CONFIG = """\
Host *
    IdentityFile {etc}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {etc}/known_hosts
    ConnectTimeout 5
"""
_NODE_SETUP = """\
hostname {name}
mount -t tmpfs -o size={shm_mib}m none /dev/shm
mount -t tmpfs -o size=64m none /run
mount -t tmpfs -o size={disk_mib}m none {local_disk}
for file in hosts passwd shadow ssh/ssh_config; do
    mount --bind {etc}/"$(basename "$file")" /etc/$file
done
mkdir -m 755 /run/sshd
cp {etc}/user_key.pub /run/authorized_keys
ip link set lo up
ip link set {interface} address {hardware}
ip address add {address}/24 dev {interface}
ip link set {interface} up
/usr/sbin/sshd -f {etc}/sshd_config
"""


class ClusterError(RuntimeError):
    """A command that sets the cluster up has failed; the message holds the command and what it said."""


class Node:
    """One node of a cluster. `pid`: its first process, as seen from outside."""

    def __init__(self, cluster: Cluster, name: str, number: int, clock_offset_s: int) -> None:
        self.name = name
        self.number = number
        self.address = f"{_NETWORK}.{number}"
        self._cluster = cluster
        self._link = f"veth{number}"
        self._disk = Throttle(f"{cluster.pid}_{name}", cluster.directory)
        clock = ["--time", "--monotonic", str(clock_offset_s)] if clock_offset_s else []
        # Nested in the cluster's PID namespace, so that it ends with that; but with a /proc that shows pids outside.
        outer = ["nsenter", "--target", str(cluster.pid), "--pid", "--net"]
        self._init, self.pid = start_init(
            [*outer, "unshare", "--pid", "--net", "--mount", "--uts", "--ipc", *clock, "--fork", "--kill-child"]
        )  # fmt: skip

    def command(self, *argv: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> list[str]:
        """The command that runs `argv` on this node, with the environment of a login and `env`."""
        variables = self._cluster.login_environment | dict(env or {})
        assignments = [f"{name}={value}" for name, value in variables.items()]
        directory = ["--chdir", str(cwd or self._cluster.home)]
        return [*enter(self.pid), "env", "--ignore-environment", *directory, *assignments, *map(str, argv)]

    def run(
        self, *argv: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this node to its end. Raises ClusterError if it fails, unless `check` is False."""
        return run(self.command(*argv, env=env, cwd=cwd), check=check)

    def start(
        self, *argv: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a command on this node; its output goes to the file `log`."""
        with log.open("wb") as output:
            command = self.command(*argv, env=env, cwd=cwd)
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)

    def processes(self) -> dict[int, str]:
        """Pid as seen from outside -> command line, of all processes of this node but its first one and its sshd."""
        found = self.everything()
        del found[self.pid]
        return {pid: command for pid, command in found.items() if command and "sshd: /usr/sbin/sshd" not in command}

    def everything(self) -> dict[int, str]:
        """As `processes`, of all."""
        mine = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):  # it may end meanwhile
                if os.readlink(f"/proc/{pid}/ns/pid") == mine:
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found

    def send(self, signum: int, word: str) -> int:
        """Send a signal to every process of this node with `word` in its command line; returns to how many."""
        pids = [pid for pid, command in self.processes().items() if word in command]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        return len(pids)

    def lose(self) -> None:
        """All processes of the node end at once; its shared memory, its local disk and its link are gone.

        The link goes first, as when power fails: no connection is closed, so no peer hears of it.
        """
        self.cut_link()
        os.kill(self.pid, signal.SIGKILL)
        self._init.wait()  # unshare and nsenter wait for it, and it for all processes of its namespace
        self._disk.free()
        self._cluster.forget(self)

    def cut_link(self) -> None:
        """Nothing comes or goes any more; the processes live on."""
        self._cluster.links.cut(self._link)

    def repair(self) -> None:
        """Undo `slow_disk` and what `repair_link` undoes; a node that was lost is started again, empty."""
        if self.name not in self._cluster.nodes:
            self._cluster.revive(self)
            return
        self.repair_link()
        self._disk.free()

    def repair_link(self) -> None:
        """Undo `cut_link` and `slow_link`."""
        self._cluster.network("ip", "link", "set", self._link, "up")
        self._cluster.network("tc", "qdisc", "delete", "dev", self._link, "root", check=False)
        self.run("tc", "qdisc", "delete", "dev", _INTERFACE, "root", check=False)

    def slow_link(self, kbit_per_s: int) -> None:
        """Limit the link to this rate in each direction."""
        # Bytes of a millisecond. Less than the kernel's own packets of 64 KiB makes this machine's processors cut these
        # up: at 1 Gbit/s they are busy with little else.
        burst = max(8000, kbit_per_s // 8)
        limit = ["root", "tbf", "rate", f"{kbit_per_s}kbit", "burst", str(burst), "latency", "400ms"]
        self._cluster.network("tc", "qdisc", "replace", "dev", self._link, *limit)
        self.run("tc", "qdisc", "replace", "dev", _INTERFACE, *limit)

    def slow_disk(self, kbyte_per_s: int) -> None:
        """Limit what the processes of the node write to the disk of the machine, page cache apart.

        Raises ClusterError where the kernel cannot (see throttle.py).
        """
        self._disk.throttle(self.everything(), kbyte_per_s)

    def release(self) -> None:
        """Give back what the machine keeps for a node that has ended."""
        self._disk.free()

    def bring_up(self, shm_mib: int, disk_mib: int) -> None:
        """Plug the link in, make the mounts and start sshd; returns when that listens."""
        cluster = self._cluster
        # A node of this number that was lost: the kernel takes its time to remove what was its own.
        cluster.network("ip", "link", "delete", self._link, check=False)
        cluster.network(
            "ip", "link", "add", self._link, "type", "veth", "peer", "name", _INTERFACE, "netns", str(self.pid)
        )
        cluster.network("ip", "link", "set", self._link, "master", "br0", "up")
        setup = _NODE_SETUP.format(
            name=self.name,
            address=self.address,
            interface=_INTERFACE,
            hardware=f"02:00:00:00:00:{self.number:02x}",  # that of a lost node which comes back: peers remember it
            etc=cluster.etc,
            local_disk=cluster.local_disk,
            shm_mib=shm_mib,
            disk_mib=disk_mib,
        )
        self.run("bash", "-ec", setup)
        wait_for(lambda: _SSH_PORT in self.listening(), f"sshd of {self.name}")

    def listening(self) -> set[int]:
        """TCP ports (IPv4) on which something listens on this node; /proc/PID/net/tcp, proc(5)."""
        rows = [line.split() for line in Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]]
        return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


class Cluster:
    """Nodes `node0`, `node1`, ... and `login`, where nothing is computed; use it as a context manager.

    `directory` is on a disk, is empty, and is seen by all nodes; it stays when the cluster ends.
    Raises ClusterError if the machine refuses (see probe.py).
    """

    def __init__(self, directory: Path, nodes: int, *, shm_mib: int = 1024, disk_mib: int = 64) -> None:
        self.directory = directory.resolve()
        self.etc = self.directory / "etc"
        self.home = self.directory / "home"
        self.local_disk = self.directory / "local"
        self.login_environment = {
            "PATH": SYSTEM_PATH, "HOME": str(self.home), "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
        }  # fmt: skip
        self._sizes = (shm_mib, disk_mib)
        self._number = 0
        self.nodes: dict[str, Node] = {}
        self.lost: dict[str, Node] = {}
        self.services: list[Callable[[Node], None]] = []  # start what runs on a node, when a lost one comes back
        self.control: Control
        for made in (self.etc, self.home, self.local_disk):
            made.mkdir(parents=True)
        self._write_etc()
        self._init, self.pid = start_init(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--net", "--mount", "--fork", "--kill-child"]
        )
        self._storage = Throttle(f"{self.pid}_storage", self.directory)
        try:
            self.network("ip", "link", "add", "br0", "type", "bridge")
            self.network("ip", "link", "set", "br0", "up")
            self.links = Links(self.pid)
            self.login = self._add("login", 0)
            for _ in range(nodes):
                self.add_node()
            self.control = Control(self)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.control.close()
        self.links.close()
        self.close()

    def close(self) -> None:
        """End every process of the cluster; its namespaces, and all that is in them, go with them."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._init.wait()
        for node in self.nodes.values():
            node.release()
        self._storage.free()

    def slow_storage(self, kbyte_per_s: int) -> None:
        """Limit what all nodes together read from the disk of the machine, and what they write; 0: no limit any more.

        A node that is added or comes back later is not limited. Raises OSError where the kernel cannot.
        """
        self._storage.free()
        if kbyte_per_s:
            pids = [pid for node in self.nodes.values() for pid in node.everything()]
            self._storage.throttle(pids, kbyte_per_s, reads=True)

    def add_node(self, *, clock_offset_s: int = 0) -> Node:
        """One node more: a spare. Its monotonic clock is ahead of the others' by `clock_offset_s`.

        Raises ClusterError if the kernel has no time namespaces and an offset is asked for.
        """
        if clock_offset_s and not has_time_namespaces():
            raise ClusterError(f"clock_offset_s={clock_offset_s}: this kernel has no time namespaces")
        return self._add(f"node{self._number}", clock_offset_s)

    def _add(self, name: str, clock_offset_s: int) -> Node:
        number = self._number + 1 if name != "login" else 250
        self._number += name != "login"
        return self._start(name, number, clock_offset_s)

    def _start(self, name: str, number: int, clock_offset_s: int) -> Node:
        node = Node(self, name, number, clock_offset_s)
        self.nodes[name] = node
        self._write_hosts()
        node.bring_up(*self._sizes)
        return node

    def forget(self, node: Node) -> None:
        """Its name stays in /etc/hosts, as that of a machine which is down does."""
        del self.nodes[node.name]
        self.lost[node.name] = node

    def revive(self, node: Node) -> Node:
        """Start a lost node again: the same name and address, and nothing of what it had."""
        del self.lost[node.name]
        started = self._start(node.name, node.number, 0)
        for start in self.services:
            start(started)
        return started

    def network(self, *argv: str, check: bool = True) -> None:
        """Run a command where the bridge is."""
        run(["nsenter", "--target", str(self.pid), "--net", *argv], check=check)

    @property
    def compute_nodes(self) -> list[Node]:
        return [node for node in self.nodes.values() if node is not self.login]

    def _write_etc(self) -> None:
        for name, text in (("sshd_config", _SSHD_CONFIG), ("ssh_config", _SSH_CONFIG)):
            (self.etc / name).write_text(text.format(etc=self.etc))
        others = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")]
        (self.etc / "passwd").write_text("\n".join([f"root:x:0:0:root:{self.home}:/bin/bash", *others, ""]))
        (self.etc / "shadow").write_text("root:*:19000:0:99999:7:::\n")  # not locked, and no password fits
        for key in ("host_key", "user_key", "other_key"):
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", key, "-f", str(self.etc / key)])
        (self.etc / "known_hosts").write_text("* " + (self.etc / "host_key.pub").read_text())
        (self.etc / "hosts").touch()

    def _write_hosts(self) -> None:
        known = self.nodes | self.lost
        lines = ["127.0.0.1 localhost", *(f"{node.address} {node.name}" for node in known.values())]
        (self.etc / "hosts").write_text("\n".join([*lines, ""]))  # in place: it is mounted on every node


def enter(pid: int) -> list[str]:
    """The command that runs another one in all namespaces of process `pid`."""
    return ["nsenter", "--target", str(pid), "--all"]


def start_init(wrapper: Sequence[str]) -> tuple[subprocess.Popen[str], int]:
    """Start init.py in new namespaces, which `wrapper` makes; what was started, and init's pid as seen from here.

    Raises ClusterError with what the wrapper said if it fails.
    """
    script = str(Path(__file__).with_name("init.py"))
    started = subprocess.Popen(
        [*wrapper, sys.executable, "-I", "-S", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"PATH": SYSTEM_PATH},
        text=True,
    )
    assert started.stdout is not None
    line = started.stdout.readline()
    if not line.strip().isdigit():
        rest = started.communicate()[0]
        raise ClusterError(f"{' '.join(wrapper)}: {line}{rest}")
    return started, int(line)


def run(command: Sequence[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command with nothing on its standard input. Raises ClusterError if it fails, unless `check` is False."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANGS_S, env={"PATH": SYSTEM_PATH}
    )
    if check and done.returncode != 0:
        raise ClusterError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done
