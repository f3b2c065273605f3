"""Ranks end with their launcher: real processes, really killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron.processes import parent_process
from tests.dist.harness import HANGS_S, kill_all, runs

ROOT = Path(__file__).resolve().parents[4]
RANK = """
import os, sys, time
from pathlib import Path
from megatron.processes.parent_process import end_with_launcher
out = Path(sys.argv[1])
while len(sys.argv) > 2 and os.getppid() == int(sys.argv[2]):
    time.sleep(0.01)  # until this launcher is gone
def tell(name):
    (out / "draft").write_text(str(os.getpid()))
    (out / "draft").rename(out / name)
tell("started")
end_with_launcher(os.environ, os.environ.get("EXIT_SIGNALS", "").split())
tell("pid")
time.sleep(600)
"""
VARIABLES = {"torchrun": {"TORCHELASTIC_RUN_ID": "none"}, "by hand": {}}


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "rank.py").write_text(RANK)
    yield tmp_path
    started = tmp_path / "started"
    if started.exists():
        kill_all([int(started.read_text())])


def environment(**variables: str) -> dict[str, str]:
    of_launchers = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "CROSS_SIZE", "SLURM_PROCID")
    kept = {name: value for name, value in os.environ.items() if name not in of_launchers}
    return kept | {"PYTHONPATH": str(ROOT)} | variables


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def launcher_of(out: Path, command: list[str], variables: dict[str, str], **own: str) -> subprocess.Popen[bytes]:
    """A Python process that starts `command` with `variables` and waits for it, as torchrun's agent does."""
    script = f"import os, subprocess; subprocess.run({command!r}, env=os.environ | {variables!r})"
    launcher = subprocess.Popen([sys.executable, "-c", script], env=environment(**own))
    wait_for(lambda: (out / "pid").exists() or launcher.poll() is not None)
    return launcher


@pytest.mark.parametrize("python", ["", "import os; del os.pidfd_open\n"], ids=["", "without os.pidfd_open"])
@pytest.mark.parametrize("wrapper", [[], ["sh", "-c", '"$@"; true', "wrapper"]], ids=["", "in a wrapper"])
def test_a_rank_ends_with_the_agent_of_torchrun(out: Path, wrapper: list[str], python: str) -> None:
    """Also from within a wrapper, which does not end by itself; and in a Python that was built with old headers."""
    (out / "rank.py").write_text(python + RANK)
    rank = [*wrapper, sys.executable, str(out / "rank.py"), str(out)]
    launcher = launcher_of(out, rank, VARIABLES["torchrun"])
    pid = int((out / "pid").read_text())
    assert runs(pid)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    wait_for(lambda: not runs(pid))


def test_a_run_id_that_the_user_has_exported_is_in_the_agents_environment_too(out: Path) -> None:
    """As it is where torchrun is started by a rank of another torchrun: what it gives to its ranks tells them apart."""
    given = VARIABLES["torchrun"] | {"TORCHELASTIC_ERROR_FILE": str(out / "error.json")}
    launcher = launcher_of(out, [sys.executable, str(out / "rank.py"), str(out)], given, **VARIABLES["torchrun"])
    pid = int((out / "pid").read_text())
    assert runs(pid)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    wait_for(lambda: not runs(pid))


def test_a_rank_in_a_pid_namespace_of_its_own_runs(out: Path) -> None:
    """It does not see its launcher, which is no sign that it has ended."""
    namespace = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may make no PID namespace")
    rank = [*namespace, sys.executable, str(out / "rank.py"), str(out)]
    launcher = launcher_of(out, rank, VARIABLES["torchrun"])
    try:
        assert (out / "pid").exists()
    finally:
        for child in psutil.Process(launcher.pid).children(recursive=True) if launcher.poll() is None else []:
            child.kill()
        launcher.kill()
        launcher.wait()


SAVING = """
import os, signal, sys
from pathlib import Path
def save(*_):
    (Path(sys.argv[1]) / "saved").touch()
    sys.exit(0)
for name in os.environ.get("EXIT_SIGNALS", "SIGTERM").split():
    signal.signal(signal.Signals[name], save)
"""


@pytest.mark.parametrize("signals", ["SIGUSR1", "SIGUSR2 SIGTERM"])
def test_a_rank_of_torchrun_may_save_at_a_signal_that_ends_torchrun(out: Path, signals: str) -> None:
    """As Slurm sends it to all processes of a job step."""
    (out / "rank.py").write_text(SAVING + RANK)
    rank = [sys.executable, str(out / "rank.py"), str(out)]
    launcher = launcher_of(out, rank, VARIABLES["torchrun"] | {"EXIT_SIGNALS": signals})
    pid = int((out / "pid").read_text())
    launcher.send_signal(signal.Signals[signals.split()[0]])
    launcher.wait()
    wait_for(lambda: not runs(pid))
    assert (out / "saved").exists()


@pytest.mark.parametrize(
    ("ends", "signals"),
    [("runner", ""), ("runner", "SIGUSR1"), ("launch", "SIGUSR1")],
    ids=["SIGTERM of the runner", "SIGUSR1 of the runner", "SIGUSR1 of the launcher"],
)
def test_a_rank_of_deepspeed_may_save_when_all_of_the_job_are_asked_to_end(out: Path, ends: str, signals: str) -> None:
    """DeepSpeed's runner ends by SIGTERM at once, while its launcher leaves the ranks 30 s. SIGUSR1 ends both."""
    (out / "rank.py").write_text(SAVING + RANK)
    folder = out / "deepspeed" / "launcher"
    folder.mkdir(parents=True)
    rank = [sys.executable, str(out / "rank.py"), str(out)]
    starts = "import os, subprocess; subprocess.run({!r}, env=os.environ | {!r})"
    (folder / "launch.py").write_text(starts.format(rank, {"CROSS_SIZE": "1"}))
    launcher = [sys.executable, str(folder / "launch.py")]
    (folder / "runner.py").write_text(starts.format(launcher, {}))
    given = {"EXIT_SIGNALS": signals} if signals else {}
    runner = subprocess.Popen([sys.executable, str(folder / "runner.py")], env=environment(**given))
    wait_for((out / "pid").exists)
    pid = int((out / "pid").read_text())
    asked = runner.pid if ends == "runner" else psutil.Process(pid).ppid()
    os.kill(asked, signal.Signals[signals] if signals else signal.SIGTERM)
    runner.wait()
    wait_for(lambda: not runs(pid))
    assert (out / "saved").exists()


def test_elsewhere_than_on_linux_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked_for(*_: object) -> None:
        raise AssertionError("there is no /proc to look into")

    for name in ("launcher_of", "read_text", "_end"):
        monkeypatch.setattr(parent_process, name, asked_for)
    monkeypatch.setattr(sys, "platform", "darwin")
    for variables in (VARIABLES["torchrun"], {"CROSS_SIZE": "1"}, {"SLURM_PROCID": "0"}):
        parent_process.end_with_launcher(variables)


def test_a_process_that_was_started_by_hand_outlives_its_parent(out: Path) -> None:
    launcher = launcher_of(out, [sys.executable, str(out / "rank.py"), str(out)], VARIABLES["by hand"])
    pid = int((out / "pid").read_text())
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    wait_for(lambda: psutil.Process(pid).ppid() != launcher.pid)
    assert runs(pid)


@pytest.mark.parametrize(("started_by", "ends"), [("torchrun", True), ("by hand", False)])
def test_a_rank_whose_launcher_was_gone_before_it_looked(out: Path, started_by: str, ends: bool) -> None:
    """Orphans are adopted by a process that is not Python here, as init is not."""
    adopter = textwrap.dedent(
        f"""
        import ctypes, os, sys
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER; holds across exec
        if os.fork() == 0:
            launcher = str(os.getpid())
            if os.fork() == 0:
                os.environ.update({VARIABLES[started_by]!r})
                os.execv(sys.executable, [sys.executable, {str(out / "rank.py")!r}, {str(out)!r}, launcher])
            os._exit(0)
        os.execvp("sleep", ["sleep", "600"])
        """
    )
    command = [sys.executable, "-c", adopter]
    with (out / "log").open("wb") as log, subprocess.Popen(command, env=environment(), stderr=log) as process:
        try:
            wait_for((out / "started").exists)
            pid = int((out / "started").read_text())
            wait_for(lambda: (out / "pid").exists() or not runs(pid))
            assert (out / "pid").exists() != ends
            assert ("no torchrun runs above this rank, but sleep (pid" in (out / "log").read_text()) == ends
        finally:
            process.kill()
