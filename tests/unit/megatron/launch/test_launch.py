"""The launcher: what ranks find, how they end together, and that nothing is left; real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron.launch.cli import parse_arguments
from restart_trace.startup import PRELOAD_VARIABLE, Preload, preload_of
from tests.dist.harness import end_all, processes_with
from tests.unit.trace_helpers import ROOT

pytestmark = pytest.mark.slow  # most tests start a launcher

# The launcher without its imports, which take seconds and are not what is looked at here.
SUPERVISE = """
import sys
from megatron.launch.cli import parse_arguments
from megatron.launch.supervise import supervise
from restart_trace.startup import Preload
sys.exit(supervise(parse_arguments(None), Preload(1, 2, 3)))
"""
# What the scripts of the tests begin with: each rank of each start leaves its process id.
HEAD = """
import json, os, signal, subprocess, sys, time
LONG = 900  # seconds: nothing ends by itself while a test waits for it
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def note(name, text=""):
    with open(f".{name}", "w") as file:
        file.write(str(text))
    os.rename(f".{name}", name)
def here():
    note(f"pid_{rank}_{restart}", os.getpid())
"""


class Job:
    """A launcher that supervises ranks of a script, in a directory of its own."""

    def __init__(self, directory: Path, script: str, *options: str) -> None:
        self.directory = directory
        (directory / "script.py").write_text(textwrap.dedent(HEAD) + textwrap.dedent(script))
        self.output = directory / "output"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SUPERVISE, *options, "script.py", "--flag", "value"],
                cwd=directory, env=os.environ | {"PYTHONPATH": str(ROOT), "MARK": str(directory)},
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def wait(self) -> int:
        """Exit status; nothing of the launch may be left then."""
        code = self.process.wait(300)
        until(lambda: self.left() == [], f"the end of {self.left()}; {self.said}")  # what is killed takes a while
        return code

    @property
    def said(self) -> str:
        return self.output.read_text()

    def left(self) -> list[psutil.Process]:
        return marked(self.directory)

    def note(self, name: str) -> str:
        """What a rank noted under `name`, once it has."""
        path = self.directory / name
        until(path.exists, f"{name}; {self.said}")
        return path.read_text()

    def pid(self, rank: int, restart: int = 0) -> int:
        return int(self.note(f"pid_{rank}_{restart}"))


def marked(directory: Path) -> list[psutil.Process]:
    """Processes whose environment has MARK set to `directory`."""
    return processes_with("MARK", str(directory))


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[Job] = []

    def run(script: str, *options: str) -> Job:
        jobs.append(Job(tmp_path, script, *options))
        return jobs[-1]

    yield run
    for job in jobs:
        end_all(job.left)
        job.process.wait(300)


def test_a_rank_finds_what_torchrun_would_have_given_it(start: Start) -> None:
    job = start(
        """
        import atexit
        atexit.register(note, f"left_{rank}")
        ignored = [s.name for s in signal.Signals if signal.getsignal(s) is signal.SIG_IGN]
        note(f"found_{rank}", json.dumps({
            "env": dict(os.environ), "argv": sys.argv, "name": __name__, "file": __file__,
            "group": os.getpgid(0) == os.getpid(), "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "ignored": ignored,
        }))
        """,
        "--nproc-per-node", "2", "--nnodes", "2", "--node-rank", "1", "--master-addr", "node0", "--master-port", "1234",
    )  # fmt: skip
    assert job.wait() == 0, job.said
    for local_rank, rank in enumerate((2, 3)):
        found = json.loads(job.note(f"found_{rank}"))
        expected = {
            "RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "node0",
            "MASTER_PORT": "1234", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            PRELOAD_VARIABLE: "1:2:3",
        }  # fmt: skip
        assert {name: found["env"][name] for name in expected} == expected
        assert found["argv"] == ["script.py", "--flag", "value"] and found["name"] == "__main__"
        assert found["group"] and found["blocked"] == 0
        # As Python itself starts; and what these tests were started with, SIGHUP under nohup for one.
        inherited = {s.name for s in signal.Signals if signal.getsignal(s) is signal.SIG_IGN}
        assert set(found["ignored"]) <= {"SIGPIPE", "SIGXFSZ"} | inherited
        assert job.note(f"left_{rank}") == ""  # as any program, with what it has registered for its end


def test_the_others_end_with_the_first_that_fails(start: Start) -> None:
    job = start(
        """
        here()
        if rank == 1:
            while not os.path.exists("pid_0_0"): time.sleep(0.01)
            sys.exit(3)
        time.sleep(LONG)
        """,
        "--nproc-per-node", "2",
    )  # fmt: skip
    pid = job.pid(1)
    assert job.wait() == 1
    assert f"rank 1 (pid {pid}): exit code 3; the others were stopped" in job.said
    assert "restart" not in job.said.split("exit code 3")[1]


def test_an_exception_is_shown_and_fails_the_launch(start: Start) -> None:
    job = start("raise ValueError('broken')", "--nproc-per-node", "1")
    assert job.wait() == 1
    assert "ValueError: broken" in job.said and "exit code 1" in job.said


def test_a_killed_rank_is_started_again_with_all_others(start: Start) -> None:
    """In place: by the same launcher, on another port, and told that nothing was imported for it this time."""
    job = start(
        """
        note(f"told_{rank}_{restart}", json.dumps(dict(os.environ)))
        here()
        if restart < 2:
            subprocess.Popen(["sleep", str(LONG)])
            time.sleep(LONG)
        """,
        "--nproc-per-node", "2", "--max-restarts", "3",
    )  # fmt: skip
    for restart, victim in enumerate((1, 0)):
        pids = [job.pid(rank, restart) for rank in (0, 1)]
        os.kill(pids[victim], signal.SIGKILL)
        assert job.pid(0, restart + 1) not in pids
        assert not any(psutil.pid_exists(pid) for pid in pids)
        said = f"rank {victim} (pid {pids[victim]}): ended by SIGKILL"
        until(lambda said=said: said in job.said, said)
    assert job.wait() == 0, job.said  # and `wait` finds none of the processes that the ranks had started
    assert "restart 1 of 3" in job.said and "restart 2 of 3" in job.said
    told = [json.loads(job.note(f"told_0_{restart}")) for restart in range(3)]
    assert [PRELOAD_VARIABLE in environment for environment in told] == [True, False, False]
    assert len({environment["MASTER_PORT"] for environment in told}) == 3
    assert {environment["TORCHELASTIC_MAX_RESTARTS"] for environment in told} == {"3"}


def test_the_rendezvous_listens_before_a_rank_runs_and_ends_with_the_ranks(start: Start) -> None:
    job = start(
        """
        import socket
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
        note(f"told_{rank}_{restart}", json.dumps(dict(os.environ)))
        processes = ["ps", "--ppid", str(os.getppid()), "-o", "comm="]
        # The port listens before the process that serves it has its name.
        while "rendezvous" not in subprocess.run(processes, capture_output=True, text=True).stdout.split():
            time.sleep(0.01)
        sys.exit(restart == 0)
        """,
        "--max-restarts", "1",
    )  # fmt: skip
    assert job.wait() == 0, job.said  # and `wait` finds no process left
    for restart in range(2):
        told = json.loads(job.note(f"told_0_{restart}"))
        assert (told["MASTER_ADDR"], told["TORCHELASTIC_USE_AGENT_STORE"]) == ("127.0.0.1", "True")


def test_a_master_port_that_is_taken_is_named(start: Start) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        job = start("here()", "--master-port", str(port))
        assert job.wait() == 2
    assert f"error: --master-port {port}: the rendezvous cannot be served there: Address already in use" in job.said
    assert not (job.directory / "pid_0_0").exists()


def test_restarts_are_counted(start: Start) -> None:
    job = start("here(); sys.exit(5)", "--max-restarts", "1")
    assert job.wait() == 1
    assert job.said.count("exit code 5") == 2 and not (job.directory / "pid_0_2").exists()


REFUSED = "refused input is not retried"


def test_a_start_that_is_refused_is_not_tried_again(start: Start) -> None:
    """One rank says so by its exit code; the others wait, as for rank 0 to tell the reason."""
    job = start(
        """
        here()
        if rank == 1:
            sys.exit(2)
        time.sleep(LONG)
        """,
        "--nproc-per-node", "2", "--max-restarts", "3",
    )  # fmt: skip
    pid = job.pid(1)
    assert job.wait() == 2
    assert job.said.splitlines() == [f"[launch] rank 1 (pid {pid}): exit code 2; the others were stopped; {REFUSED}"]
    assert not (job.directory / "pid_0_1").exists()


@pytest.mark.parametrize(
    ("codes", "restarts", "code", "said"),
    [
        ((2,), 0, 2, 0),
        ((3, 2, 2), 5, 2, 1),  # what has been accepted may be refused for a moment: it is tried once more
        ((3, 2, 3, 2, 0), 5, 0, 0),
        ((3, 2), 1, 2, 0),
        ((3, 2, 3), 2, 1, 0),
    ],
)
def test_a_later_start_that_is_refused_is_tried_once_more(
    codes: tuple[int, ...], restarts: int, code: int, said: int, start: Start
) -> None:
    job = start(f"here(); sys.exit({codes}[restart])", "--max-restarts", str(restarts))
    assert job.wait() == code, job.said
    assert job.said.count(REFUSED) == said
    assert (job.directory / f"pid_0_{len(codes) - 1}").exists()
    assert not (job.directory / f"pid_0_{len(codes)}").exists()


@pytest.mark.parametrize(("handled", "code"), [(True, 0), (False, 128 + signal.SIGTERM)])
def test_a_signal_is_passed_on_and_restarts_nothing(start: Start, handled: bool, code: int) -> None:
    job = start(
        f"""
        if {handled}:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        here()
        time.sleep(LONG)
        """,
        "--nproc-per-node", "2", "--max-restarts", "3",
    )  # fmt: skip
    for rank in (0, 1):
        job.pid(rank)
    job.process.terminate()
    assert job.wait() == code
    assert "SIGTERM was received and passed on" in job.said and "restart 1" not in job.said


def test_ranks_that_save_get_no_second_signal(start: Start) -> None:
    """As SIGHUP when the terminal of a launcher closes that was asked to end before."""
    job = start(
        """
        import pathlib
        def save(*_):
            note("saves")
            while not pathlib.Path("saved").exists():
                time.sleep(0.01)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        here()
        time.sleep(LONG)
        """,
        "--nproc-per-node", "1",
    )  # fmt: skip
    job.pid(0)
    job.process.terminate()
    job.note("saves")
    for signum in (signal.SIGHUP, signal.SIGINT):
        job.process.send_signal(signum)
        until(lambda number=signum: not pending(job.process.pid, number), "the launcher has taken the signal")
    (job.directory / "saved").touch()
    assert job.wait() == 0
    assert job.said.count("was received and passed on") == 1 and "SIGTERM" in job.said


def pending(pid: int, signum: int) -> bool:
    """Whether a signal waits to be taken: SigPnd and ShdPnd of proc_pid_status(5)."""
    masks = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "Pnd:" in line]
    return any(int(mask, 16) >> (signum - 1) & 1 for mask in masks)


def test_a_rank_that_does_not_end_is_killed_after_the_timeout(start: Start) -> None:
    job = start(
        """
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        here()
        if rank == 1:
            while not os.path.exists("pid_0_0"): time.sleep(0.01)
            sys.exit(1)
        time.sleep(LONG)
        """,
        "--nproc-per-node", "2", "--shutdown-timeout", "0.5",
    )  # fmt: skip
    assert job.wait() == 1, job.said
    assert "killed after --shutdown-timeout 0.5, since they had not ended after SIGTERM: ranks 0\n" in job.said


def test_a_launcher_under_nohup_goes_on_without_its_terminal(start: Start) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = start("""
            here()
            while not os.path.exists("go"): time.sleep(0.01)
        """)
    finally:
        signal.signal(signal.SIGHUP, before)
    job.pid(0)
    job.process.send_signal(signal.SIGHUP)
    (job.directory / "go").touch()
    assert job.wait() == 0, job.said


def test_ranks_end_with_a_launcher_that_is_killed(start: Start) -> None:
    job = start("here(); time.sleep(LONG)", "--nproc-per-node", "2")
    for rank in (0, 1):
        job.pid(rank)
    job.process.kill()
    assert job.process.wait(300) == -signal.SIGKILL
    until(lambda: not job.left(), "ranks outlive their launcher")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nproc-per-node", "0"], "--nproc-per-node 0: must be at least 1"),
        (["--nproc_per_node", "gpu"], "invalid int value: 'gpu'"),
        (["--nnodes", "2"], "--nnodes 2: needs --master-addr, the host of node 0"),
        (["--nnodes", "2", "--master-addr", "a", "--node-rank", "2"], "--node-rank 2: must be from 0 to --nnodes"),
        (
            ["--nnodes", "2", "--master-addr", "a", "--max-restarts", "1"],
            "--max-restarts 1 with --nnodes 2: launchers of several nodes do not agree on restarts by",
        ),
        (["--max-restarts", "-1"], "--max-restarts -1: must be at least 0"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout -1.0: must be at least 0"),
        (["--shutdown-timeout", "inf"], "--shutdown-timeout inf: must be at least 0, and finite"),
        (["--master-port", "70000"], "--master-port 70000: must be from 1 to 65535"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_refused(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text("")
    with pytest.raises(SystemExit) as stopped:
        parse_arguments([*argv, str(tmp_path / "script.py")])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_script_that_cannot_be_launched_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([str(tmp_path / "train.py")])
    assert f"{tmp_path / 'train.py'}: no such file" in capsys.readouterr().err
    (tmp_path / "train.py").write_text("")
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("")
    with pytest.raises(SystemExit):
        parse_arguments([str(tmp_path / "train.py")])
    said = capsys.readouterr().err
    assert "has its own megatron package beside it" in said and f"start {tmp_path / 'megatron' / 'launch'}" in said


def test_one_node_has_no_fixed_port() -> None:
    script = str(ROOT / "pretrain_gpt.py")
    assert parse_arguments([script]).master_port is None
    assert parse_arguments(["--nnodes", "2", "--master-addr", "a", script]).master_port == 29500
    assert parse_arguments(["--master-port", "5", script, "--lr", "1"]).arguments == ("--lr", "1")


def test_a_rank_that_is_alone_has_the_threads_of_a_process_that_was_not_forked(tmp_path: Path) -> None:
    """What computes as modules are imported must not start them before the fork."""
    (tmp_path / "script.py").write_text("import torch\nprint('threads', torch.get_num_threads())\n")
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env["PYTHONPATH"] = str(ROOT)
    launch = ["-m", "megatron.launch", "--nproc-per-node", "1"]
    forked, plain = (
        subprocess.run([sys.executable, *how, "script.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
        for how in (launch, [])
    )
    assert (forked.returncode, plain.returncode) == (0, 0), forked.stderr
    assert forked.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]


def test_what_was_done_before_the_fork_survives_the_environment() -> None:
    preload = Preload(10, 200, 3000)
    assert preload_of({PRELOAD_VARIABLE: preload.to_text()}) == preload
    assert preload_of({}) is None


@pytest.mark.parametrize(
    ("words", "keeps"),
    [
        (["--checkpoint-engine", "memory"], True),
        (["--checkpoint-engine=memory"], True),
        (["--save", "in_memory"], False),
    ],
)
def test_only_a_run_that_asks_for_it_has_memory_held_for_it(tmp_path: Path, words: list[str], keeps: bool) -> None:
    """Descriptors are scarce where a host has many ranks."""
    (tmp_path / "script.py").touch()
    assert parse_arguments([str(tmp_path / "script.py"), *words]).keeps_saves is keeps
