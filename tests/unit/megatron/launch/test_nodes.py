"""The launcher over several nodes: agents and their coordinator, as real processes that are killed and stopped.

All run on this host. What takes hosts of their own is in tests/cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron.launch.cli import parse_arguments, parse_coordinator_arguments
from megatron.launch.messages import LaunchConnection
from megatron.net.handshake import COORDINATOR, ServerSide, connect
from megatron.net.secret import VARIABLE as SECRET_VARIABLE
from megatron.processes.source import what_runs
from restart_trace.cycles import LAUNCH_ID_VARIABLE
from tests.dist.harness import end_all, runs
from tests.unit.megatron.launch import test_nodes
from tests.unit.megatron.launch.test_launch import HEAD, marked, pending, until
from tests.unit.megatron.launch.test_shrink import FLAGS
from tests.unit.trace_helpers import ROOT, SECRET

pytestmark = pytest.mark.slow  # each starts agents and their ranks

# An agent without its imports, which take seconds and are not what is looked at here.
AGENT = """
import sys
from megatron.launch import cli
from megatron.launch.agent import Agent
from restart_trace.startup import Preload
plan = cli.parse_arguments(None)
cli.settle_secret(plan)
sys.exit(Agent(plan, Preload(1, 2, 3)).run())
"""
NEVER_SILENT = "100"  # seconds: no test takes a node for lost that is merely slow
# Where a test waits until a node is silent for so long. The others outlast ten seconds in which the machine stands
# still: their ranks may run for LEASE of this after a beat that was answered, and there are BEATS_PER_TIMEOUT.
SILENT = "20"
RANKS = "2"  # on each node
# A rank that trains until it is told that all is well, or to end with an exit code.
WAIT = """
    import pathlib
    note(f"start_{restart}_{rank}", json.dumps([os.getpid(), *(os.environ[name] for name in NAMES)]))
    while not pathlib.Path("finish").exists():
        time.sleep(0.02)
        if pathlib.Path(f"end_{restart}_{rank}").exists():
            sys.exit(int(pathlib.Path(f"end_{restart}_{rank}").read_text()))
"""
# A rank that saves when it is asked to end, and that a second signal would end at once.
SAVE = """
def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    note(f"saves_{rank}")
    while not pathlib.Path("finish").exists():
        time.sleep(0.01)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
"""
NAMES = ("WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "LABEL")


class Nodes:
    """A coordinator and its agents; a directory that all share."""

    def __init__(self, directory: Path, script: str = WAIT) -> None:
        self.directory = directory
        (directory / "script.py").write_text(textwrap.dedent(HEAD) + f"NAMES = {NAMES}\n" + textwrap.dedent(script))
        self.started: list[subprocess.Popen[bytes]] = []
        self.arguments: list[str] = []  # of the script

    def coordinate(self, *options: str, name: str = "coordinator", **variables: str) -> subprocess.Popen[bytes]:
        coordinator = self._start(
            name, [sys.executable, "-m", "megatron.launch", "coordinate", "--nproc-per-node", RANKS,
                   "--port-file", "port", *options, "script.py", *self.arguments], **variables,
        )  # fmt: skip
        until(lambda: (self.directory / "port").exists() or coordinator.poll() is not None, "the coordinator's port")
        return coordinator

    def agent(self, number: int, *options: str, where: str | None = None, **variables: str) -> subprocess.Popen[bytes]:
        where = where or f"127.0.0.1:{(self.directory / 'port').read_text().strip()}"
        words = ["--coordinator", where, "--address", "127.0.0.1", "--node-rank", str(number), *options]
        words = words if "--nproc-per-node" in words else ["--nproc-per-node", RANKS, *words]
        command = [sys.executable, "-c", AGENT, *words, "script.py", *self.arguments]
        return self._start(f"agent{number}", command, LABEL=f"node{number}", **variables)

    def _start(self, name: str, command: list[str], **variables: str) -> subprocess.Popen[bytes]:
        inherited = {name: value for name, value in os.environ.items() if name != LAUNCH_ID_VARIABLE}
        known = {"PYTHONPATH": str(ROOT), "MARK": str(self.directory), SECRET_VARIABLE: SECRET}
        environment = inherited | known | variables
        with (self.directory / f"{name}.log").open("ab") as log:
            self.started.append(
                subprocess.Popen(command, cwd=self.directory, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )
        return self.started[-1]

    def said(self, name: str = "coordinator") -> str:
        return (self.directory / f"{name}.log").read_text()

    def ranks(self, restart: int, count: int = 4) -> list[tuple[int, dict[str, str]]]:
        """(pid, environment) of each rank of a start, once all have begun."""
        paths = [self.directory / f"start_{restart}_{rank}" for rank in range(count)]
        until(lambda: all(path.exists() for path in paths), f"{count} ranks of start {restart}; {self.said()}")
        told = [json.loads(path.read_text()) for path in paths]
        return [(pid, dict(zip(NAMES, values, strict=True))) for pid, *values in told]

    def end_rank(self, restart: int, rank: int, code: int) -> None:
        told = self.directory / "told"
        told.write_text(str(code))
        told.rename(self.directory / f"end_{restart}_{rank}")

    def finish(self) -> None:
        (self.directory / "finish").touch()

    def left(self) -> list[psutil.Process]:
        return marked(self.directory)

    def until_gone(self) -> None:
        until(lambda: self.left() == [], f"the end of {self.left()}; {self.said()}")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    end_all(made.left)
    for started in made.started:
        started.wait(300)


def labels(ranks: list[tuple[int, dict[str, str]]]) -> list[str]:
    return [env["LABEL"] for _, env in ranks]


def frame(text: bytes) -> bytes:
    return struct.pack("<IQ", len(text), 0) + text


STRANGERS = (
    b"GET / HTTP/1.0\r\n\r\n",
    frame(b'{"type": "beat"}'),
    frame(b'{"type": "beat", "number": 1}'),
    frame(b'{"type": "signal", "signum": 15}'),
    frame(b'{"type": "hello", "number": "0"}'),
    frame(b'{"type": "ended", "generation": -1, "failures": []}'),
    frame(
        b'{"type": "hello", "number": -1, "address": "a", "host": "h", "ranks": 2, "launch_id": "", "versions": {}, '
        b'"copies": 0, "place": -1, "instance": "other"}'
    ),
    frame(
        b'{"type": "hello", "number": 0, "address": "a", "host": "h", "ranks": 2, "launch_id": "", "versions": {}, '
        b'"copies": 0}'
    ),
    frame(b"[]"),
    frame(b'{"type": "steal"}'),
    struct.pack("<IQ", 16, 1 << 40) + b'{"type": "beat"}',
)


def hello(number: int) -> bytes:
    """Of an agent that fits."""
    fields = {
        "number": number, "address": "a", "host": "h", "ranks": int(RANKS), "launch_id": "", "copies": 0, "place": -1,
        "versions": what_runs() | {"accelerator": os.environ.get("DS_ACCELERATOR", "")}, "instance": "other",
    }  # fmt: skip
    return frame(json.dumps({"type": "hello"} | fields).encode())


def test_what_is_no_agent_is_hung_up_on_and_stops_nothing(nodes: Nodes) -> None:
    """It does not know the secret; or it does, and says what no agent says."""
    coordinator = nodes.coordinate("--nnodes", "2", "--heartbeat-timeout", NEVER_SILENT)
    address = ("127.0.0.1", int((nodes.directory / "port").read_text()))

    def hung_up_on(line: bytes, *, authenticated: bool) -> bool:
        with (
            connect(address, SECRET.encode(), COORDINATOR, 300)
            if authenticated
            else (socket.create_connection(address, 300)) as stranger
        ):
            stranger.settimeout(300)
            stranger.sendall(line if authenticated else line.ljust(100))
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(1 << 16):
                    pass
            return True

    def all_hung_up_on() -> bool:
        return all(hung_up_on(line, authenticated=known) for line in STRANGERS for known in (False, True))

    assert all_hung_up_on()
    agents = [nodes.agent(number) for number in (0, 1)]
    nodes.ranks(0)
    assert all_hung_up_on()
    assert hung_up_on(hello(7), authenticated=False), "it is not told the id of the launch"
    unfit = frame(b'{"type": "unfit", "generation": -1, "why": "w"}')
    assert hung_up_on(hello(8) + unfit + unfit, authenticated=True)
    assert hung_up_on(hello(9) + hello(9), authenticated=True)
    assert hung_up_on(hello(1), authenticated=True), "the number of a node that lives"
    nodes.finish()
    assert coordinator.wait(300) == 0, nodes.said()
    assert [agent.wait(300) for agent in agents] == [0, 0]
    assert "restart" not in nodes.said() and "Traceback" not in nodes.said()
    assert "node 1 (127.0.0.1) is lost" not in nodes.said()
    assert "that number was given to a launcher on" in nodes.said()


def test_an_agent_and_a_coordinator_with_other_secrets_do_not_meet(nodes: Nodes) -> None:
    coordinator = nodes.coordinate("--nnodes", "1", "--heartbeat-timeout", NEVER_SILENT)
    agent = nodes.agent(0, **{SECRET_VARIABLE: "x" * 32})
    assert agent.wait(300) == 2
    assert "what listens there does not know the secret of this launch" in nodes.said("agent0")
    nodes.agent(0)
    nodes.ranks(0, count=2)
    nodes.finish()
    assert coordinator.wait(300) == 0, nodes.said()


def test_a_secret_in_a_file(nodes: Nodes) -> None:
    """The coordinator makes it; others may not read it, and nobody is told it."""
    none = {SECRET_VARIABLE: ""}
    coordinator = nodes.coordinate("--nnodes", "1", "--heartbeat-timeout", NEVER_SILENT, "--secret-file", "s", **none)
    assert nodes.agent(0, **none).wait(300) != 0
    assert f"{SECRET_VARIABLE}: is not set" in nodes.said("agent0")
    file = nodes.directory / "s"
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    assert nodes.agent(0, "--secret-file", "s", **none).wait(300) != 0
    assert "--secret-file s: others may access it (mode 640); chmod 600 s" in nodes.said("agent0")
    file.chmod(0o600)
    nodes.agent(0, "--secret-file", "s", **none)
    nodes.ranks(0, count=2)
    nodes.finish()
    assert coordinator.wait(300) == 0, nodes.said()
    assert file.read_text().strip() not in nodes.said() + nodes.said("agent0")


def test_a_spare_takes_the_place_of_a_node_whose_launcher_is_killed(nodes: Nodes) -> None:
    coordinator = nodes.coordinate(
        "--nnodes", "2", "--spares", "1", "--max-restarts", "2", "--heartbeat-timeout", NEVER_SILENT
    )
    agents = [nodes.agent(number) for number in (2, 1, 0)][::-1]
    before = nodes.ranks(0)
    assert labels(before) == ["node0", "node0", "node1", "node1"]
    assert [env["LOCAL_RANK"] for _, env in before] == ["0", "1", "0", "1"]
    assert all(env["WORLD_SIZE"] == "4" and env["GROUP_WORLD_SIZE"] == "2" for _, env in before)

    os.kill(before[3][0], signal.SIGKILL)  # one rank: all are started again where they were
    again = nodes.ranks(1)
    assert labels(again) == labels(before) and {pid for pid, _ in again}.isdisjoint(pid for pid, _ in before)
    agents[0].kill()  # a node, and the one that serves the rendezvous
    after = nodes.ranks(2)
    assert labels(after) == ["node2", "node2", "node1", "node1"]
    until(lambda: not any(runs(pid) for pid, _ in (*before, *again)), "the end of all earlier ranks")

    nodes.finish()
    assert coordinator.wait(300) == 0, nodes.said()
    assert [agent.wait(300) for agent in agents] == [-signal.SIGKILL, 0, 0]
    nodes.until_gone()
    said = nodes.said()
    assert "ended by SIGKILL on node 1 (127.0.0.1)" in said
    assert "node 0 (127.0.0.1) is lost: its agent has ended" in said
    assert "node 2 (127.0.0.1) takes the place of node rank 0" in said


def test_the_ranks_of_an_agent_that_is_stopped_end(nodes: Nodes) -> None:
    """It is stopped for good, and cannot end them itself; others take their place."""
    coordinator = nodes.coordinate(
        "--nnodes", "2", "--max-restarts", "1", "--spares", "1", "--heartbeat-timeout", SILENT
    )
    agents = [nodes.agent(number) for number in range(3)]
    before = nodes.ranks(0)
    agents[1].send_signal(signal.SIGSTOP)
    after = nodes.ranks(1)
    assert labels(after) == ["node0", "node0", "node2", "node2"]
    until(lambda: not any(runs(pid) for pid, _ in before), "the end of the ranks whose agent is stopped")
    nodes.finish()
    assert coordinator.wait(300) == 0, nodes.said()
    assert [agent.wait(300) for agent in agents] == [0, -signal.SIGKILL, 0]
    nodes.until_gone()
    assert "node 1 (127.0.0.1) is lost: " in nodes.said()


def test_a_signal_to_an_agent_that_is_cut_off_ends_it_while_its_ranks_end() -> None:
    """It would try for minutes to be let in again otherwise."""
    script = """
import os, signal, socket, subprocess, types
from megatron.launch.agent import Agent, _Generation
from megatron.launch.cli import parse_arguments
from megatron.launch.ranks import Ranks
from restart_trace.startup import Preload
agent = Agent(parse_arguments(["--coordinator", "127.0.0.1:1", "pretrain_gpt.py"]), Preload(1, 2, 3))
rank = subprocess.Popen(["sleep", "1000"])
agent._current = _Generation(0, agent._plan, Ranks({rank.pid: 0}))
agent._connection = types.SimpleNamespace(ended="has ended", close=lambda: None)
os.kill(os.getpid(), signal.SIGTERM)
print(agent._rejoin("the coordinator has ended"))
"""
    environment = os.environ | {SECRET_VARIABLE: SECRET}
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment, check=False,
    )  # fmt: skip
    assert ended.stdout == f"{128 + signal.SIGTERM}\n", ended.stderr


def test_nodes_that_were_not_answered_end_their_ranks_and_come_back(nodes: Nodes) -> None:
    """The coordinator is stopped, as if all links were cut; a spare that was stopped comes back, too."""
    coordinator = nodes.coordinate(
        "--nnodes", "2", "--max-restarts", "1", "--spares", "1", "--heartbeat-timeout", SILENT
    )
    agents = [nodes.agent(number) for number in range(3)]
    before = nodes.ranks(0)
    joined = "node 2 (127.0.0.1) has joined as a spare"
    until(lambda: joined in nodes.said(), nodes.said())
    agents[2].send_signal(signal.SIGSTOP)  # it has no rank, so nothing kills it
    until(lambda: f"node 2 (127.0.0.1) is lost: no heartbeat for {SILENT} s" in nodes.said(), nodes.said())
    agents[2].send_signal(signal.SIGCONT)
    until(lambda: nodes.said().count(joined) >= 2, nodes.said())
    coordinator.send_signal(signal.SIGSTOP)
    until(lambda: not any(runs(pid) for pid, _ in before), "the end of the ranks that were cut off")
    coordinator.send_signal(signal.SIGCONT)
    assert len(set(labels(nodes.ranks(1)))) == 2
    # One may come back later than the job goes on; after its end that would be too late to hear how it ended.
    until(lambda: all(f"node {cut} (127.0.0.1) has joined as a spare" in nodes.said() for cut in (0, 1)), nodes.said())
    nodes.finish()
    assert coordinator.wait(300) == 0, nodes.said()
    assert [agent.wait(300) for agent in agents] == [0, 0, 0]
    nodes.until_gone()
    assert "its coordinator is not heard; its ranks were killed" in nodes.said("agent0") + nodes.said("agent1")


def lose_one_of_two(nodes: Nodes, *flags: str) -> None:
    """Of a launch that ends with it."""
    coordinator = nodes.coordinate("--nnodes", "2", "--max-restarts", "3", "--heartbeat-timeout", SILENT, *flags)
    agents = [nodes.agent(number) for number in range(2)]
    nodes.ranks(0)
    agents[1].kill()
    assert coordinator.wait(300) == 1
    assert agents[0].wait(300) == 1
    nodes.until_gone()


def test_without_a_spare_the_launch_ends_and_says_what_is_missing(nodes: Nodes) -> None:
    lose_one_of_two(nodes)
    assert f"error: 1 of 2 nodes missing (node ranks 1) and no spare came within {SILENT} s" in nodes.said()


def test_why_a_job_cannot_go_on_with_fewer_nodes(nodes: Nodes) -> None:
    nodes.arguments = [*FLAGS.split(), "--zero-stage", "3"]
    lose_one_of_two(nodes, "--allow-shrink")
    assert "--allow-shrink: what --zero-stage 3 has saved, only as many ranks load; start the job" in nodes.said()


@pytest.mark.parametrize(
    ("sent_to", "name"),
    [("coordinator", "SIGTERM"), ("coordinator", "SIGUSR2"), ("an agent", "SIGUSR1"), ("all agents", "SIGUSR1")],
)
def test_a_signal_reaches_the_ranks_of_all_nodes(nodes: Nodes, sent_to: str, name: str) -> None:
    """SIGUSR1 and SIGUSR2 if --exit-signal names them; to the coordinator itself SIGUSR1 says something else."""
    nodes.arguments = ["--exit-signal", "SIGUSR1", "SIGUSR2"]
    coordinator = nodes.coordinate("--nnodes", "2", "--max-restarts", "3", "--heartbeat-timeout", NEVER_SILENT)
    agents = [nodes.agent(number) for number in range(2)]
    nodes.ranks(0)
    for process in {"coordinator": [coordinator], "an agent": agents[1:], "all agents": agents}[sent_to]:
        process.send_signal(signal.Signals[name])
    assert [process.wait(300) for process in (coordinator, *agents)] == [128 + signal.Signals[name]] * 3
    nodes.until_gone()
    assert nodes.said().count(f"{name} was received and passed on to the ranks") == 1


def test_ranks_that_save_get_no_second_signal(nodes: Nodes) -> None:
    """Neither that of another agent nor SIGHUP, as it comes when the ssh of an agent ends."""
    script = nodes.directory / "script.py"
    script.write_text(script.read_text().replace("import pathlib\n", f"import pathlib\n{SAVE}"))
    nodes.coordinate("--nnodes", "2", "--heartbeat-timeout", NEVER_SILENT)
    agents = [nodes.agent(number) for number in range(2)]
    nodes.ranks(0)
    for agent in agents:
        agent.terminate()
    until(lambda: len(list(nodes.directory.glob("saves_*"))) == 4, nodes.said())
    for agent in agents:
        agent.send_signal(signal.SIGHUP)
        until(lambda pid=agent.pid: not pending(pid, signal.SIGHUP), "the agent has taken the signal")
    nodes.finish()
    assert [process.wait(300) for process in nodes.started] == [0, 0, 0], nodes.said()


@pytest.mark.parametrize("launch", [{}, {LAUNCH_ID_VARIABLE: "one_script"}], ids=["by hand", "by one script"])
def test_a_node_that_does_not_fit_is_refused_before_any_rank_starts(launch: dict[str, str], nodes: Nodes) -> None:
    """Once in what a user sees: where one script has started all of them, that is the output of all of them."""
    coordinator = nodes.coordinate("--nnodes", "2", "--heartbeat-timeout", NEVER_SILENT, **launch)
    agents = [nodes.agent(0, **launch), nodes.agent(1, "--nproc-per-node", "3", **launch)]
    assert coordinator.wait(300) == 2
    assert [agent.wait(300) for agent in agents] == [2, 2]
    message = "--nproc-per-node 3, and that of the coordinator is 2"
    assert message in nodes.said()
    assert (message in nodes.said("agent1")) == (not launch)
    assert list(nodes.directory.glob("start_*")) == []


def test_nodes_that_do_not_come_are_named(nodes: Nodes) -> None:
    coordinator = nodes.coordinate("--nnodes", "3", "--join-timeout", "1", "--heartbeat-timeout", NEVER_SILENT)
    assert coordinator.wait(300) == 2
    assert "3 of 3 nodes missing (node ranks 0, 1, 2)" in nodes.said()


def test_a_node_that_fails_before_all_have_joined_ends_the_launch(nodes: Nodes) -> None:
    coordinator = nodes.coordinate("--nnodes", "2", "--heartbeat-timeout", NEVER_SILENT)
    coordinator.send_signal(signal.SIGUSR1)
    assert coordinator.wait(300) == 2
    assert "the launcher of a node ended before all nodes had joined" in nodes.said()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--coordinator", "29400"], "--coordinator 29400: must be HOST:PORT"),
        (["--coordinator", "a:1", "--nnodes", "2"], "--nnodes 2 with --coordinator: the coordinator decides on that"),
        (["--coordinator", "a:1", "--max-restarts", "2"], "--max-restarts 2 with --coordinator: the coordinator"),
        (["--coordinator", "a:1", "--node-rank", "-1"], "--node-rank -1: must be at least 0"),
        (["--health-directory", "/d"], "--health-directory /d: hosts are checked for a coordinator; give"),
        (["--health-interval", "5"], "--health-interval 5.0: hosts are checked for a coordinator; give"),
        (["--coordinator", "a:1", "--health-interval", "0"], "--health-interval 0.0: must be at least 0.1"),
        (
            ["coordinate", "--nnodes", "1", "--replacement-hook", "/no/such"],
            "--replacement-hook /no/such: is no program that can be started; give an executable file",
        ),
        (["--address", "a"], "--address a: other nodes are told of it by a coordinator"),
        (["--secret-file", "f"], "--secret-file f: nobody connects to a launch on one host from elsewhere"),
        (["--bind", "127.0.0.1"], "--bind 127.0.0.1: nobody connects to a launch on one host from elsewhere"),
        (["--coordinator", "a:1", "--bind", "198.51.100.7"], "--bind 198.51.100.7: Cannot assign requested address"),
        (["coordinate", "--nnodes", "1", "--bind", "x.invalid"], "--bind x.invalid: "),
        (["coordinate", "--nnodes", "0"], "--nnodes 0: must be at least 1"),
        (["coordinate", "--nnodes", "1", "--spares", "-1"], "--spares -1: must be at least 0"),
        (["coordinate", "--nnodes", "1", "--heartbeat-timeout", "0"], "--heartbeat-timeout 0.0: must be at least 0.1"),
        (["coordinate", "--nnodes", "1", "--port", "0"], "--port 0: must be from 1 to 65535"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_refused(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    with pytest.raises(SystemExit) as stopped:
        if argv[0] == "coordinate":
            parse_coordinator_arguments([*argv[1:], str(script)])
        else:
            parse_arguments([*argv, str(script)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_host_that_is_not_fit_does_not_join(nodes: Nodes) -> None:
    coordinator = nodes.coordinate("--nnodes", "1", "--heartbeat-timeout", NEVER_SILENT)
    none = nodes.directory / "none"
    agent = nodes.agent(0, "--health-directory", str(none))
    assert agent.wait(300) == 2
    assert f"is not fit for ranks: {none} cannot be written to: No such file or directory" in nodes.said("agent0")
    nodes.agent(0)
    nodes.ranks(0, count=2)
    nodes.finish()
    assert coordinator.wait(300) == 0, nodes.said()
    nodes.until_gone()


HOOK = """\
#!/bin/sh
printf '%s\\n' "$@" "$COORDINATOR_PORT" "$NODES_MISSING" >asked.new
mv asked.new asked
"""


def test_a_host_with_a_fault_is_not_used_again_and_another_one_asked_for(nodes: Nodes) -> None:
    """A rank of node 1 fails, and its disk is gone by then: the launch waits for the host that the hook brings."""
    hook = nodes.directory / "hook"
    hook.write_text(HOOK)
    hook.chmod(0o755)
    coordinator = nodes.coordinate(
        "--nnodes", "2", "--max-restarts", "1", "--heartbeat-timeout", NEVER_SILENT, "--replacement-hook", "./hook"
    )
    disk = nodes.directory / "disk"
    disk.mkdir()
    agents = [nodes.agent(0), nodes.agent(1, "--health-directory", str(disk))]
    before = nodes.ranks(0)
    disk.rmdir()
    os.kill(before[2][0], signal.SIGKILL)
    until(lambda: (nodes.directory / "asked").exists(), f"the hook; {nodes.said()}")
    host, number, why, port, missing = (nodes.directory / "asked").read_text().splitlines()
    assert (host, number, missing) == (socket.gethostname(), "1", "1")
    assert why == f"its host is not used again: {disk} cannot be written to: No such file or directory"
    assert port == (nodes.directory / "port").read_text().strip()
    assert agents[1].wait(300) == 1
    nodes.agent(7)
    assert labels(nodes.ranks(1)) == ["node0", "node0", "node7", "node7"]
    nodes.finish()
    assert coordinator.wait(300) == 0, nodes.said()
    nodes.until_gone()
    assert f"{hook} was asked for a host in the place of {host}" in nodes.said()


def test_a_spare_whose_host_fails_while_it_waits_takes_no_place(nodes: Nodes) -> None:
    """Nor does one that would train on another kind of device than the others."""
    coordinator = nodes.coordinate(
        "--nnodes", "1", "--spares", "1", "--max-restarts", "1", "--heartbeat-timeout", NEVER_SILENT
    )
    disk = nodes.directory / "disk"
    disk.mkdir()
    watched = ("--health-directory", str(disk), "--health-interval", "0.2")
    agents = [nodes.agent(0, DS_ACCELERATOR="cpu"), nodes.agent(1, *watched, DS_ACCELERATOR="cpu")]
    nodes.ranks(0, count=2)
    until(lambda: "node 1 (127.0.0.1) has joined as a spare" in nodes.said(), nodes.said())
    disk.rmdir()
    assert agents[1].wait(300) == 1, nodes.said("agent1")
    fault = f"{disk} cannot be written to: No such file or directory"
    assert f"is not fit to wait for ranks any longer: {fault}" in nodes.said("agent1")
    lost = f"node 1 (127.0.0.1) is lost: its host is not used: {fault}"
    until(lambda: lost in nodes.said(), nodes.said())  # the agent may end before the coordinator says so
    disk.mkdir()
    agents += [nodes.agent(2, DS_ACCELERATOR="cuda"), nodes.agent(3, *watched, DS_ACCELERATOR="cpu")]
    assert agents[2].wait(300) == 2
    assert "runs accelerator cuda (" in nodes.said("agent2")
    until(lambda: "node 3 (127.0.0.1) has joined as a spare" in nodes.said(), nodes.said())
    agents[0].kill()
    assert labels(nodes.ranks(1, count=2)) == ["node3"] * 2
    nodes.finish()
    assert coordinator.wait(300) == 0, nodes.said()
    nodes.until_gone()


REFUSED = "the launch ends: refused input is not retried"


def test_a_start_that_is_refused_ends_the_launch_on_all_nodes(nodes: Nodes) -> None:
    """With its exit status on each, the spare's, too."""
    coordinator = nodes.coordinate(
        "--nnodes", "2", "--spares", "1", "--max-restarts", "3", "--heartbeat-timeout", NEVER_SILENT
    )
    agents = [nodes.agent(number) for number in range(3)]
    nodes.ranks(0)
    until(lambda: "node 2 (127.0.0.1) has joined as a spare" in nodes.said(), nodes.said())
    nodes.end_rank(0, 2, 2)
    assert coordinator.wait(300) == 2, nodes.said()
    assert [agent.wait(300) for agent in agents] == [2, 2, 2]
    nodes.until_gone()
    assert nodes.said().count("exit code 2 on node 1 (127.0.0.1)") == 1
    assert nodes.said().count(REFUSED) == 1 and "restart 1" not in nodes.said()


def test_a_later_start_that_is_refused_is_tried_once_more(nodes: Nodes) -> None:
    coordinator = nodes.coordinate("--nnodes", "2", "--max-restarts", "5", "--heartbeat-timeout", NEVER_SILENT)
    agents = [nodes.agent(number) for number in range(2)]
    for restart, code in enumerate((1, 2, 1, 2, 2)):
        nodes.ranks(restart)
        nodes.end_rank(restart, 3, code)
    assert coordinator.wait(300) == 2, nodes.said()
    assert [agent.wait(300) for agent in agents] == [2, 2]
    nodes.until_gone()
    assert nodes.said().count(REFUSED) == 1 and "restart 4 of 5" in nodes.said()


class Played(LaunchConnection):
    """The connection of an agent that a test plays."""

    heard: list[str]

    def hears(self, kind: str) -> None:
        """Wait until a message of this type has come."""

        def has_come() -> bool:
            self.heard += [message["type"] for message in self.messages()]
            return kind in self.heard

        until(has_come, f"a message of type {kind}")


def played(nodes: Nodes) -> tuple[subprocess.Popen[bytes], list[Played]]:
    """A coordinator of two nodes and their agents, of which node 0 is to serve the rendezvous."""
    coordinator = nodes.coordinate("--nnodes", "2", "--max-restarts", "3", "--heartbeat-timeout", NEVER_SILENT)
    where = ("127.0.0.1", int((nodes.directory / "port").read_text()))
    agents = [Played(connect(where, SECRET.encode(), COORDINATOR, 300)) for _ in range(2)]
    hello: dict[str, Any] = {"address": "127.0.0.1", "host": "h", "ranks": 2, "launch_id": "", "versions": {}}
    hello |= {"copies": 0, "place": -1, "instance": "one of two"}
    for number, agent in enumerate(agents):
        agent.heard = []
        agent.send("hello", number=number, **hello)
    agents[0].hears("serve")
    return coordinator, agents


def test_ranks_that_ended_before_they_were_to_stop_count_as_they_ended(nodes: Nodes) -> None:
    """An agent answers a "stop" that arrives too late with an end without failures. Both agents are played here."""
    coordinator, agents = played(nodes)
    agents[0].send("port", generation=0, port=1)
    for agent in agents:
        agent.hears("start")
    agents[1].send("failed", generation=0, why="rank 3: exit code 2")
    agents[1].send("ended", generation=0, failures=["rank 3: exit code 2"], refused=2)
    agents[1].hears("stop")
    agents[1].send("ended", generation=0, failures=[], refused=0)
    agents[1].send("beat", number=1)
    agents[1].hears("ack")  # an answer to what follows the second end
    agents[0].send("ended", generation=0, failures=[], refused=0)
    assert coordinator.wait(300) == 2, nodes.said()
    assert nodes.said().count(REFUSED) == 1


def test_a_signal_that_comes_before_the_rendezvous_is_there_ends_the_ranks_that_start(nodes: Nodes) -> None:
    coordinator, agents = played(nodes)
    coordinator.terminate()
    for agent in agents:
        agent.hears("signal")  # at which it has no ranks
        agent.heard.clear()
    agents[0].send("port", generation=0, port=1)
    for agent in agents:
        agent.hears("start")
        agent.hears("signal")
        agent.send("ended", generation=0, failures=["rank 0: ended by SIGTERM"], refused=0)
    assert coordinator.wait(300) == 128 + signal.SIGTERM, nodes.said()


def test_a_node_that_is_lost_while_ranks_end_is_told_of(nodes: Nodes) -> None:
    _, agents = played(nodes)
    agents[0].send("port", generation=0, port=1)
    agents[1].hears("start")
    agents[1].send("failed", generation=0, why="rank 3: exit code 1")
    agents[0].hears("stop")
    agents[0].close()
    until(lambda: "node 0 (127.0.0.1) is lost: its agent has ended" in nodes.said(), nodes.said())
    assert nodes.said().count("is lost") == 1


def test_ranks_do_not_start_once_a_node_of_theirs_is_lost(nodes: Nodes) -> None:
    """They would claim --save beside those of the next start, which no agent would know of."""
    _, agents = played(nodes)
    agents[1].close()
    agents[0].hears("stop")
    agents[0].send("port", generation=0, port=1)  # it was on its way
    agents[0].send("beat", number=1)
    agents[0].hears("ack")
    assert "start" not in agents[0].heard


def test_what_a_rank_refuses_on_a_host_with_a_fault_is_no_input(nodes: Nodes) -> None:
    """As a rank does that finds no GPU: another host takes the place, in the first start, too."""
    coordinator = nodes.coordinate(
        "--nnodes", "2", "--spares", "1", "--max-restarts", "1", "--heartbeat-timeout", NEVER_SILENT
    )
    disk = nodes.directory / "disk"
    disk.mkdir()
    agents = [nodes.agent(0), nodes.agent(1, "--health-directory", str(disk)), nodes.agent(2)]
    nodes.ranks(0)
    until(lambda: "node 2 (127.0.0.1) has joined as a spare" in nodes.said(), nodes.said())
    disk.rmdir()
    nodes.end_rank(0, 2, 2)
    assert labels(nodes.ranks(1)) == ["node0", "node0", "node2", "node2"]
    nodes.finish()
    assert coordinator.wait(300) == 0, nodes.said()
    assert [agent.wait(300) for agent in agents] == [0, 1, 0]
    nodes.until_gone()


def test_a_hook_that_fails_is_named_and_not_waited_for(nodes: Nodes) -> None:
    hook = nodes.directory / "hook"
    hook.write_text("#!/bin/sh\nexit 3\n")
    hook.chmod(0o755)
    coordinator = nodes.coordinate(
        "--nnodes", "2", "--max-restarts", "1", "--heartbeat-timeout", SILENT, "--replacement-hook", "./hook"
    )
    agents = [nodes.agent(number) for number in (0, 1)]
    nodes.ranks(0)
    agents[1].kill()
    assert coordinator.wait(300) == 1
    assert f"--replacement-hook {hook}: ended with 3: no host comes" in nodes.said()
    assert f"error: 1 of 2 nodes missing (node ranks 1) and no spare came within {SILENT} s" in nodes.said()
    nodes.until_gone()


def test_an_agent_that_is_hung_up_on_comes_again(nodes: Nodes) -> None:
    """As one that had to give way to strangers at a crowded port. A relay stands for that port."""
    coordinator = nodes.coordinate("--nnodes", "1", "--heartbeat-timeout", NEVER_SILENT)
    with socket.create_server(("127.0.0.1", 0)) as relay:
        port = int((nodes.directory / "port").read_text())
        agent = nodes.agent(0, where=f"127.0.0.1:{relay.getsockname()[1]}")
        for _ in range(2):
            relay.accept()[0].close()
        client, _ = relay.accept()
        with client, socket.create_connection(("127.0.0.1", port)) as server, ThreadPoolExecutor(2) as pool:
            pool.submit(pump, client, server)
            pool.submit(pump, server, client)
            nodes.ranks(0, 2)
            nodes.finish()
            assert [process.wait(300) for process in (coordinator, agent)] == [0, 0], nodes.said("agent0")


LAST_WORD = """
import select, time
from pathlib import Path
class Late(Agent):
    def _look_after_health(self):
        \"\"\"In the turn in which the coordinator has its last word, once that turn has looked for messages.\"\"\"
        if self._was_let_in:
            Path("let_in").touch()
            while not Path("said").exists():
                time.sleep(0.01)
            while self._connection.ended is None:
                self._connection.send("beat", number=0)
Agent = Late
"""


def test_an_exit_status_counts_that_came_before_the_connection_broke(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between an agent's look for messages and a message of its own, which is then reset."""
    monkeypatch.setattr(test_nodes, "AGENT", AGENT.replace("plan =", f"{LAST_WORD}\nplan ="))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        agent = nodes.agent(0, where=f"127.0.0.1:{listening.getsockname()[1]}")
        server = ServerSide(listening.accept()[0], SECRET.encode(), COORDINATOR)
        until(lambda: server.go_on() is True, "the agent's handshake")
    connection = LaunchConnection(server.connected)
    until(lambda: connection.messages() != [], "the agent's hello")
    connection.send("welcome", heartbeat_timeout_s=1000.0, launch_id="launch0")
    until((nodes.directory / "let_in").exists, "the agent's turn")
    connection.send("exit", code=7)
    server.connected.shutdown(socket.SHUT_RDWR)
    connection.close()
    (nodes.directory / "said").touch()
    assert agent.wait(300) == 7, nodes.said("agent0")


def pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(1 << 16):
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)


def test_a_coordinator_that_cannot_be_reached_is_named(nodes: Nodes) -> None:
    (nodes.directory / "port").write_text("1")
    agent = nodes.agent(0)
    assert agent.wait(300) == 2
    assert "error: --coordinator 127.0.0.1:1: cannot be reached from" in nodes.said("agent0")
