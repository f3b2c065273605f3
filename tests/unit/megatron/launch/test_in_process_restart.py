"""In-process restarts: which ranks the launcher keeps, kills and forks; real processes, real signals."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from megatron.launch.cli import parse_arguments
from megatron.launch.ranks import Forks, Ranks
from megatron.net.free_port import free_port
from megatron.processes import in_process_restart
from megatron.startup.injected_faults import HOLD_SIGNAL
from tests.descriptors import open_descriptors
from tests.unit.megatron.launch.test_launch import Job, Start, start, until  # noqa: F401  the fixture

# A rank of the starts before the last waits for another one, over a connection of its process.
SCRIPT = """
import socket, threading, time
from megatron.processes import in_process_restart
here()
found = [os.environ.get("LEFT"), in_process_restart.returns(), in_process_restart.phases()]
note(f"found_{rank}_{restart}", json.dumps(found))
os.environ["LEFT"] = "something"
def gone():
    in_process_restart.another_rank_is_lost()
    sys.exit(1)
if restart == 2:
    sys.exit(0)
listening = socket.create_server(("127.0.0.1", 0))
ours = socket.create_connection(listening.getsockname())
other = listening.accept()[0]
signal.signal(signal.SIGTERM, lambda *_: None)
for name in ("first", "last"):
    in_process_restart.at_return(lambda name=name: note(f"undone_{rank}_{restart}_{name}", time.monotonic()))
"""
WAITS = SCRIPT + "note(f'waits_{rank}_{restart}')\nother.recv(1)\nsys.exit(1)\n"
FLAGS = ("--max-restarts", "2", "--in-process-restart", "--return-timeout", "300", "--nproc-per-node")


@pytest.mark.slow
def test_ranks_that_live_start_again_in_their_processes_and_the_others_are_forked(start: Start) -> None:  # noqa: F811
    job = start(WAITS, *FLAGS, "3")
    for restart in (0, 1):
        for rank in range(3):
            job.note(f"waits_{rank}_{restart}")
        pid = job.pid(restart, restart)
        (job.directory / f"killed_{restart}").write_text(str(time.monotonic()))
        os.kill(pid, signal.SIGKILL)
        for rank in range(3):
            assert (job.pid(rank, restart + 1) == job.pid(rank, restart)) == (rank != restart)
    assert job.wait() == 0, job.said
    assert "starting ranks 1, 2 again in their processes, the others anew: restart 1 of 2" in job.said
    assert job.note("found_0_1") == job.note("found_1_2") == "[null, 0, []]"
    left, returns, phases = json.loads(job.note("found_2_2"))
    assert (left, returns) == (None, 2), "the environment is what the launcher gives"
    returned = [["return", detail] for detail in ("barrier", "undo", "barrier")]
    assert [phase[:2] for phase in phases] == [["abort", None], *returned]
    assert [phase[3] for phase in phases[:3]] == [phase[2] for phase in phases[1:]], "without gaps"
    killed, undone = float(job.note("killed_1")), float(job.note("undone_2_1_first"))
    assert killed < phases[0][2] / 1e9 <= phases[2][2] / 1e9 < undone < phases[2][3] / 1e9 <= phases[3][3] / 1e9
    assert float(job.note("undone_2_0_last")) < float(job.note("undone_2_0_first"))


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--in-process-restart"], []], ids=["in process", "in place"])
def test_all_starts_meet_at_the_port_that_was_given(start: Start, how: list[str]) -> None:  # noqa: F811
    port = str(free_port())
    ends = "note(f'port_{rank}_{restart}', os.environ['MASTER_PORT'])\nif restart == 1:"
    script = WAITS.replace("if restart == 2:", ends)
    job = start(script, "--max-restarts", "1", "--nproc-per-node", "2", "--master-port", port, *how)
    for rank in range(2):
        job.note(f"waits_{rank}_0")
    os.kill(job.pid(1, 0), signal.SIGKILL)
    assert job.wait() == 0, job.said
    assert [job.note(f"port_{rank}_{restart}") for rank in range(2) for restart in range(2)] == [port] * 4


@pytest.mark.slow
def test_a_lost_rank_is_forked_while_the_others_return(start: Start) -> None:  # noqa: F811
    waits = """
def until_it_is_forked():
    while rank == 0 and restart == 0 and not os.path.exists("pid_1_1"):
        time.sleep(0.005)
in_process_restart.at_return(until_it_is_forked)
"""
    job = start(SCRIPT + waits + WAITS.removeprefix(SCRIPT), *FLAGS, "2")
    for rank in range(2):
        job.note(f"waits_{rank}_0")
    os.kill(job.pid(1), signal.SIGKILL)
    assert job.pid(0, 1) == job.pid(0)
    assert job.pid(1, 1) != job.pid(1)


def test_rank_0_is_forked_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """It claims --save, where ranks that have not returned may still write."""
    forked: list[int] = []
    monkeypatch.setattr(Forks, "_fork", lambda forks, local_rank, of_others: forked.append(local_rank))
    plan = parse_arguments(["--in-process-restart", "--max-restarts", "1", "--nproc-per-node", "4", __file__])
    Forks(plan, 1, 1, None, print).fork_lost(Ranks({1000: 2}))
    assert forked == [1, 3]


@pytest.mark.slow
def test_torch_marks_each_line_of_an_error_once(start: Start) -> None:  # noqa: F811
    """However often its process has started before: each start of torch.distributed wraps sys.excepthook."""
    wraps = """
hook = sys.excepthook
sys.excepthook = lambda *error: (print("wrapped", file=sys.stderr), hook(*error))
if restart == 1 and rank == 0:
    raise ValueError("of this start")
"""
    job = start(f"{SCRIPT}{wraps}{WAITS.removeprefix(SCRIPT)}", *FLAGS, "2")
    for rank in range(2):
        job.note(f"waits_{rank}_0")
    os.kill(job.pid(1), signal.SIGKILL)
    job.pid(0, 2)
    assert job.said.count("wrapped") == 1 and "ValueError: of this start" in job.said


def catches_sigterm(pid: int) -> bool:
    found = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return bool(int(found[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
def test_a_rank_that_misses_another_first_waits_for_the_launchers_word(start: Start) -> None:  # noqa: F811
    job = start(WAITS.replace("other.recv(1)", "if rank == 0 and restart == 0: gone()\nother.recv(1)"), *FLAGS, "2")
    job.note("waits_0_0")
    job.note("waits_1_0")
    until(lambda: not catches_sigterm(job.pid(0)), "the end of the script of rank 0, which catches it")
    (job.directory / "killed").write_text(str(time.monotonic()))
    os.kill(job.pid(1), signal.SIGKILL)
    assert job.pid(0, 1) == job.pid(0)
    _, _, phases = json.loads(job.note("found_0_1"))
    (_, _, _, left), (_, _, begin, asked), *_ = phases
    killed = float(job.note("killed"))
    assert begin == left < killed * 1e9 < asked, "it had left before there was anything to be told"


@pytest.mark.slow
def test_an_error_of_its_own_ends_a_rank(start: Start) -> None:  # noqa: F811
    job = start(
        WAITS.replace("other.recv(1)", "if rank == 1 and restart == 0: sys.exit(3)\nother.recv(1)"), *FLAGS, "2"
    )
    assert job.pid(0, 1) == job.pid(0) and job.pid(1, 1) != job.pid(1)
    assert f"rank 1 (pid {job.pid(1)}): exit code 3" in job.said


@pytest.mark.slow
def test_a_rank_that_does_not_return_is_killed_and_forked_anew(start: Start) -> None:  # noqa: F811
    script = (
        SCRIPT + "note(f'waits_{rank}_{restart}')\nif rank == 0 and restart == 0: time.sleep(LONG)\nother.recv(1)\n"
    )
    job = start(script + "sys.exit(1)\n", *FLAGS, "3", "--return-timeout", "0.5")
    for rank in range(3):
        job.note(f"waits_{rank}_0")
    os.kill(job.pid(1), signal.SIGKILL)
    assert job.pid(0, 1) != job.pid(0)
    # Rank 2 may need longer, too, on a busy machine.
    assert re.search(r"killed after --return-timeout 0\.5, since they had not returned: ranks 0(, 2)?\n", job.said)


def test_a_rank_that_is_killed_at_once_has_time_to_end() -> None:
    """Else the launcher would kill it again, and tell it, until it has ended."""
    with subprocess.Popen(["sleep", "1000"]) as rank:
        ranks = Ranks({rank.pid: 3}, deadline=0.0)
        before = time.monotonic()
        told = ranks.kill_overdue(0.0)
    assert told == "killed after --return-timeout 0, since they had not returned: ranks 3"
    assert ranks.deadline is not None and ranks.deadline >= before + 1


def test_a_rank_that_has_returned_is_not_killed_for_one_that_has_not() -> None:
    with subprocess.Popen(["sleep", "1000"]) as late, subprocess.Popen(["sleep", "1000"]) as returned:
        told = Ranks({late.pid: 1, returned.pid: 2}, deadline=0.0, returned={returned.pid}).kill_overdue(0.0)
        ended, lives = late.wait(300), returned.poll() is None
        returned.kill()
    assert told == "killed after --return-timeout 0, since they had not returned: ranks 1"
    assert ended == -signal.SIGKILL and lives


def test_a_rank_that_cannot_be_told_of_its_start_is_killed_so_that_it_is_forked_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(name: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", fails)
    plan = parse_arguments(["--in-process-restart", "--max-restarts", "1", __file__])
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs, subprocess.Popen(["sleep", "1000"]) as rank:
        before = Ranks({rank.pid: 0}, connections={rank.pid: ours}, returned={rank.pid})
        ranks = Ranks()
        ranks.start_again(before, plan, 1, 1)
        ended = not psutil.pid_exists(rank.pid)
        rank.kill()
    assert ended and ranks.running == before.running == {}


def test_a_rank_that_does_not_get_its_environment_ends() -> None:
    """The kernel drops a descriptor for which a process has no room; without it the rank would wait forever."""
    script = """
import os, signal, socket
from megatron.processes.in_process_restart import InProcessRestarts
signal.signal(signal.SIGRTMAX, signal.SIG_IGN)
ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
restarts = InProcessRestarts(theirs, os.getpid(), 1)
ours.send(b"start")
restarts.wait_for_start()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "it has too many open files to be given its environment\n" in ended.stderr


@pytest.mark.slow
def test_a_rank_whose_last_start_has_left_a_thread_is_forked_anew(start: Start) -> None:  # noqa: F811
    thread = "threading.Thread(target=time.sleep, args=[LONG], name='stays', daemon=True).start()\n"
    script = f"{SCRIPT}\nin_process_restart._THREADS_S = 0.1\n{thread}"
    job = start(script + WAITS.removeprefix(SCRIPT), *FLAGS, "2")
    job.note("waits_0_0")
    os.kill(job.pid(1), signal.SIGKILL)
    assert job.pid(0, 1) != job.pid(0)
    assert "rank 0 ends instead of starting again in its process: the thread stays of its last start has" in job.said


HOLDS = """
import gc, weakref
gc.disable()
class Held: pass
held = Held()
held.itself = held
known = sys.modules.setdefault('held', [])
note(f"kept_{rank}_{restart}", sum(one() is not None for one in known))
known.append(weakref.ref(held))
ended = threading.Event()
threading.Thread(target=lambda held: ended.wait(), args=[held]).start()
del held
for undo in (ended.set, gc.collect):  # of which the last comes first
    in_process_restart.at_return(undo)
"""


@pytest.mark.slow
def test_what_a_thread_of_the_last_start_held_is_freed(start: Start) -> None:  # noqa: F811
    """Nobody else would: what is there when the next start has imported all is kept from the collector."""
    job = start(SCRIPT + HOLDS + WAITS.removeprefix(SCRIPT), *FLAGS, "2")
    job.note("waits_0_0")
    os.kill(job.pid(1), signal.SIGKILL)
    assert job.pid(0, 1) == job.pid(0)
    assert job.note("kept_0_1") == "0"


LEAKS = """
in_process_restart._MOST_GROWTH = 0
sys.modules.setdefault('leaks', []).append(bytearray(b'x') * (128 << 20))
in_process_restart.note_step()
"""


@pytest.mark.slow
def test_a_thread_that_keeps_nothing_of_its_start_may_stay(start: Start) -> None:  # noqa: F811
    script = """in_process_restart._THREADS_S = 0.1
one = threading.Thread(target=time.sleep, args=[LONG], daemon=True)
one.start()
in_process_restart.let_stay(one)
"""
    job = start(SCRIPT + script + WAITS.removeprefix(SCRIPT), *FLAGS, "2")
    for restart in (0, 1):
        job.note(f"waits_0_{restart}")
        os.kill(job.pid(1, restart), signal.SIGKILL)
        assert job.pid(0, restart + 1) == job.pid(0)


@pytest.mark.slow
def test_a_process_that_grows_is_replaced(start: Start) -> None:  # noqa: F811
    """What its starts leave behind is compared with what the first had left."""
    job = start(SCRIPT + LEAKS + WAITS.removeprefix(SCRIPT), *FLAGS, "2")
    for restart, pid in enumerate((job.pid(0), job.pid(0))):
        job.note(f"waits_0_{restart}")
        assert job.pid(0, restart) == pid
        os.kill(job.pid(1, restart), signal.SIGKILL)
    assert job.pid(0, 2) != job.pid(0)
    assert "rank 0 ends instead of starting again in its process: it has grown from " in job.said


@pytest.mark.slow
def test_what_a_start_without_a_step_has_left_is_no_measure_of_others(start: Start) -> None:  # noqa: F811
    """As where a rank is lost in a load: weights and gradients have no memory then."""
    later = f"if restart:\n{textwrap.indent(LEAKS, '    ')}"
    job = start(SCRIPT + later + WAITS.removeprefix(SCRIPT), *FLAGS, "2")
    for restart in (0, 1):
        job.note(f"waits_0_{restart}")
        os.kill(job.pid(1, restart), signal.SIGKILL)
        assert job.pid(0, restart + 1) == job.pid(0)


@pytest.mark.slow
def test_a_process_that_has_returned_as_often_as_it_may_is_replaced(start: Start) -> None:  # noqa: F811
    job = start(WAITS, *FLAGS, "3", "--max-returns", "1")
    for restart in (0, 1):
        for rank in range(3):
            job.note(f"waits_{rank}_{restart}")
        os.kill(job.pid(2, restart), signal.SIGKILL)
        for rank in range(2):
            assert (job.pid(rank, restart + 1) == job.pid(rank, restart)) == (restart == 0)
    assert "killed, since their processes have returned --max-returns 1 times: ranks 0, 1\n" in job.said
    assert "starting all ranks again: restart 2 of 2" in job.said


def test_a_process_returns_as_often_as_was_tried_unless_it_is_told_otherwise() -> None:
    flags = ["--in-process-restart", "--max-restarts", "1"]
    assert parse_arguments([*flags, __file__]).max_returns == 100
    assert parse_arguments([*flags, "--max-returns", "7", __file__]).max_returns == 7


@pytest.mark.slow
def test_a_rank_whose_script_undoes_nothing_is_forked_anew(start: Start) -> None:  # noqa: F811
    script = WAITS.replace("in_process_restart.at_return", "(lambda undo: None)")
    job = start(script, *FLAGS, "2")
    for rank in range(2):
        job.note(f"waits_{rank}_0")
    os.kill(job.pid(1), signal.SIGKILL)
    assert job.pid(0, 1) != job.pid(0)


@pytest.mark.slow
def test_a_stopped_rank_returns(start: Start) -> None:  # noqa: F811
    job = start(WAITS, *FLAGS, "2")
    for rank in range(2):
        job.note(f"waits_{rank}_0")
    os.kill(job.pid(0), signal.SIGSTOP)
    os.kill(job.pid(1), signal.SIGKILL)
    assert job.pid(0, 1) == job.pid(0)


RETURNS_LATE = WAITS.replace(
    "other.recv(1)", "while rank == 2 and not os.path.exists('go'): time.sleep(0.01)\nother.recv(1)"
)


def where_one_has_returned(start: Start, *flags: str, script: str = RETURNS_LATE) -> Job:  # noqa: F811
    """Of three ranks rank 1 has been killed, 0 has returned, and 2 does so when the file `go` is there."""
    job = start(script, *FLAGS, "3", *flags)
    for rank in range(3):
        job.note(f"waits_{rank}_0")
    os.kill(job.pid(1), signal.SIGKILL)
    job.note("undone_0_0_first")
    return job


NOTES_ITS_RETURN = """
starts = in_process_restart._here[0]._starts
class Told:
    put = starts.put
    def get(self):
        note(f"returned_{rank}_{restart}")
        return starts.get()
in_process_restart._here[0]._starts = Told()
"""


@pytest.mark.slow
def test_a_rank_that_a_drill_holds_returns_when_it_is_let_go(start: Start) -> None:  # noqa: F811
    allowed = "from megatron.startup.injected_faults import allow_injected_faults\nallow_injected_faults()\n"
    job = start(WAITS.replace("signal.signal(", allowed + "signal.signal("), *FLAGS, "2")
    for rank in range(2):
        job.note(f"waits_{rank}_0")
    os.kill(job.pid(1), HOLD_SIGNAL)
    os.kill(job.pid(0), signal.SIGKILL)
    job.note("undone_1_0_first")  # all but what holds it
    let_go = time.monotonic()
    os.kill(job.pid(1), HOLD_SIGNAL)
    *_, phases = json.loads(job.note("found_1_1"))
    assert phases[2][:2] == ["return", "undo"] and let_go < phases[2][3] / 1e9


@pytest.mark.slow
def test_a_rank_that_is_stopped_after_it_has_returned_starts_again(start: Start) -> None:  # noqa: F811
    script = RETURNS_LATE.replace("signal.signal(", NOTES_ITS_RETURN + "signal.signal(")
    job = where_one_has_returned(start, script=script)
    job.note("returned_0_0")
    os.kill(job.pid(0), signal.SIGSTOP)
    (job.directory / "go").touch()
    assert job.pid(0, 1) == job.pid(0)


@pytest.mark.slow
def test_a_rank_that_dies_after_it_has_returned_is_forked_anew(start: Start) -> None:  # noqa: F811
    job = where_one_has_returned(start)
    os.kill(job.pid(0), signal.SIGKILL)
    until(lambda: not psutil.pid_exists(job.pid(0)), "the end of rank 0")  # else it may end in the next start
    (job.directory / "go").touch()
    assert job.pid(2, 1) == job.pid(2) and job.pid(0, 1) != job.pid(0)


@pytest.mark.slow
def test_a_signal_to_the_launcher_ends_ranks_that_return(start: Start) -> None:  # noqa: F811
    """Rank 2, too, which passes over the signal as it leaves."""
    job = where_one_has_returned(start, "--shutdown-timeout", "1000")
    job.process.send_signal(signal.SIGTERM)
    (job.directory / "go").touch()
    assert job.wait() == 128 + signal.SIGTERM, job.said
    assert not (job.directory / "pid_0_1").exists()


@pytest.mark.slow
def test_none_returns_where_no_restart_is_left(start: Start) -> None:  # noqa: F811
    job = start(WAITS.replace("lambda *_: None", "signal.SIG_DFL"), "--max-restarts", "1", *FLAGS[2:], "2")
    for restart in (0, 1):
        for rank in range(2):
            job.note(f"waits_{rank}_{restart}")
        os.kill(job.pid(1, restart), signal.SIGKILL)
    assert job.wait() == 1, job.said
    until(lambda: "the others were stopped" in job.said, job.said)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--in-process-restart"], "--in-process-restart: is about restarts; give --max-restarts, too"),
        (["--in-process-restart", "--max-restarts", "1", "--standby"], "--in-process-restart with --standby: both"),
        (
            ["--in-process-restart", "--max-restarts", "1", "--nnodes", "2", "--master-addr", "n"],
            "launchers of several nodes do not agree on restarts by themselves; give --coordinator",
        ),
        (["--return-timeout", "3"], "--return-timeout 3: ranks return with --in-process-restart alone; give it, too"),
        (
            ["--in-process-restart", "--max-restarts", "1", "--return-timeout", "-1"],
            "--return-timeout -1.0: must be at",
        ),
        (["--max-returns", "5"], "--max-returns 5: ranks return with --in-process-restart alone; give it, too"),
        (["--in-process-restart", "--max-restarts", "1", "--max-returns", "0"], "--max-returns 0: must be at least 1"),
        (
            ["--in-process-restart", "--max-restarts", "1", "--return-timeout", "nan"],
            "--return-timeout nan: must be at least 0, and finite",
        ),
    ],
)
def test_it_is_refused_where_it_cannot_be(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments([*flags, __file__])
    assert ended.value.code == 2 and message in " ".join(capsys.readouterr().err.split())


TRANSFERS = """
import os, socket, threading, time, weakref
from megatron.processes import in_process_restart as restart

listening = socket.create_server(("127.0.0.1", 0))
ours = socket.create_connection(listening.getsockname())
other = listening.accept()[0]

def waits():
    one = threading.Thread(target=restart.wait_for_transfers, args=[threading.Event()], daemon=True)
    one.start()
    one.join(0.3)
    return one

restart._SENT_S = restart._READ_S = 600.0
waits().join()  # nothing is under way
turn_s, restart._turn_s = restart._turn_s, lambda: 600.0
assert waits().is_alive(), "where a rank may wait so long for a processor, nothing is said by its silence"
restart._turn_s = turn_s
other.sendall(b"part of a message")
waiting = waits()
assert waiting.is_alive(), "what has arrived was not read"
ours.recv(100)
waiting.join()
restart._READ_S = 0.0
other.sendall(b"part of a message")
waits().join()  # it is not waited for without end
ours.recv(100)

restart._READ_S = 600.0
store = socket.create_server(("127.0.0.1", 0))
restart.spare_connections_to(f"http://localhost:{store.getsockname()[1]}/bucket")
if os.fork() == 0:  # in another process, as all connections of this one are shut
    of_store = store.accept()[0]
    of_store.sendall(b"an object")  # nobody waits until that is read
    of_store.sendall(of_store.recv(100))
    os._exit(0)
to_store = socket.create_connection(store.getsockname())
launcher, rank = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
restart.InProcessRestarts(rank, 0, 600.0)
class Saves:
    def are_lost(self):
        called.set()
called, saves = threading.Event(), Saves()
restart.when_shut(saves.are_lost)
of_this_start = weakref.ref(saves)
del saves
other.sendall(b"part of a message")
launcher.send(restart.RETURN)
while not restart.is_asked():
    time.sleep(0.01)
time.sleep(0.3)
other.sendall(b"the rest")
assert len(ours.recv(25, socket.MSG_WAITALL)) == 25
assert ours.recv(1) == b"", "it is shut then"
called.wait()
assert to_store.recv(9) == b"an object", "this one goes to no rank"
to_store.sendall(b"a request")
assert to_store.recv(100) == b"a request"
while of_this_start() is not None:  # the thread goes on into the next start, and keeps nothing of this one
    time.sleep(0.01)
"""


def test_connections_are_shut_when_nothing_is_under_way() -> None:
    """Else gloo would wait without end for the rest of a message. In a process of its own: all its sockets count."""
    done = subprocess.run([sys.executable, "-c", TRANSFERS], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_descriptor_that_is_no_socket_any_more_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may close a socket after it was listed, and open a file in its place."""
    with (tmp_path / "file").open("wb") as file:
        before = open_descriptors()
        with monkeypatch.context() as patched:
            patched.setattr(in_process_restart.os, "readlink", lambda _: "socket:[1]")
            patched.setattr(in_process_restart.os, "listdir", lambda _: [str(file.fileno())])
            in_process_restart.shut_connections()
        assert open_descriptors() - before == set()
        file.write(b"still open")


RETURNS = """
import os, socket, threading, time
from megatron.processes import in_process_restart as restart

listening = socket.create_server(("127.0.0.1", 0))
ours = socket.create_connection(listening.getsockname())
other = listening.accept()[0]
launcher, rank = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
restarts = restart.InProcessRestarts(rank, 0, 600.0)

def asked():
    launcher.send(restart.RETURN)
    restarts._asked.wait()

def leaves():
    try:
        restart.check_not_asked()
    except restart.AskedToReturnError:
        restart.shut_if_nothing_is_exchanged()
    other.setblocking(False)
    try:
        return other.recv(1) == b""
    except BlockingIOError:
        return False

def starts_again():
    restarts._launcher = os.getpid()
    restarts.follows(restart.AskedToReturnError())
    restart.send_start(launcher, {"NEXT": "1"})
    assert restarts.wait_for_start() == {"NEXT": "1"}
    os._exit(0)
"""


def returning(script: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: all its sockets count."""
    return subprocess.run(
        [sys.executable, "-c", RETURNS + script], capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.parametrize(
    ("before", "shut"),
    [
        ("", True),
        ("restart.know_exchanges(lambda: True)", False),
        ("restart.note_error()", False),  # one of its exchanges may have ended half way
    ],
)
def test_connections_are_shut_at_once_where_nothing_was_exchanged(before: str, shut: bool) -> None:
    """Else the rank would wait for a moment in which it is sure that nothing is under way."""
    done = returning(
        f"restart._QUIET_S = restart._READ_S = 600.0\nasked()\n{before}\nassert leaves() is {shut}\nos._exit(0)"
    )
    assert done.returncode == 0, done.stderr


def test_the_quiet_time_is_30_ms_where_running_threads_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_process_restart._turn_s() >= 0
    monkeypatch.setattr(in_process_restart, "Path", lambda name: Path("/proc/no" + name))
    assert in_process_restart._turn_s() == pytest.approx(0.03)


def test_what_was_sent_to_a_lost_host_is_not_waited_for() -> None:
    """A filter drops what comes to the other end, so that nothing that is sent there is acknowledged."""
    done = returning("""
import ctypes, fcntl, struct, termios
drop = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0, no byte of the packet
SO_ATTACH_FILTER = 26
other.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(drop)))
restart._SENT_S = 600.0
lost_after, restart._LOST_AFTER = restart._LOST_AFTER, 256
ours.sendall(b"to a lost host")
assert restart._has_bytes(ours, [termios.TIOCOUTQ]), "it may still arrive"
restart._LOST_AFTER = lost_after
restart._wait_until_sent()
restart.wait_for_transfers(threading.Event())
assert any(fcntl.ioctl(ours, termios.TIOCOUTQ, bytes(4))), "it has not arrived"
os._exit(0)
""")
    assert done.returncode == 0, done.stderr


def test_a_transfer_is_seen_that_begins_after_the_machine_stood_still() -> None:
    """Other ranks were stopped as well: that nothing came proves nothing."""
    done = returning("""
clock, restart._READ_S = time.monotonic, 7200.0
class Left:
    looks = 0
    def wait(self, _):
        self.looks += 1
        if self.looks == 1:
            time.monotonic = lambda: clock() + 3600.0
        elif self.looks == 2:
            other.sendall(b"part of a message")
        else:
            print("waits", flush=True)
            os._exit(0)
restart.wait_for_transfers(Left())
""")
    assert done.stdout == "waits\n", done.stderr


def test_a_rank_ends_whose_exchange_does_not_end_with_its_connection() -> None:
    """gloo wakes no wait for a message of which a part has arrived: it would be killed after --return-timeout."""
    done = returning(
        "restart._STUCK_ROUNDS = 0\nrestart.know_exchanges(lambda: True)\nasked()\nthreading.Event().wait()"
    )
    assert done.returncode == 1
    assert "an exchange of which a part had arrived does not end with its connection\n" in done.stderr


def test_a_rank_that_exchanges_nothing_has_time_to_return() -> None:
    """It may compute for long before it sees that it is asked."""
    done = returning("""
restart._STUCK_ROUNDS = restart._SHUT_AGAIN_S = 0
count, shut = 0, restart.shut_connections
def counted():
    global count
    count += 1
    if count == 100:
        os._exit(0)
    shut()
restart.shut_connections = counted
asked()
threading.Event().wait()
""")
    assert done.returncode == 0, done.stderr


def test_a_launcher_that_ends_with_a_rank_s_word_unread_is_no_error() -> None:
    done = returning("""
(listening_to_launcher,) = [one for one in threading.enumerate() if one.name == "in-process-restart"]
rank.send(restart.RETURNED)
launcher.close()
listening_to_launcher.join()
os._exit(0)
""")
    assert (done.returncode, done.stderr) == (0, "")


def test_no_thread_waits_for_a_rank_that_has_ended_before_it_asked_the_first_of_its_host() -> None:
    """Else the first one would wait for the thread, and end."""
    done = returning("""
import signal
from megatron.startup.once_per_host import once_per_host
signal.signal(signal.SIGRTMAX, signal.SIG_IGN)
restart._THREADS_S = 1.0
environment = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0", "RESTART_TRACE_LAUNCH_ID": str(os.getpid())}
assert once_per_host(lambda: "found", environment, 600.0) == "found"
asked()
starts_again()
""")
    assert done.returncode == 0, done.stderr


def test_an_error_of_a_call_is_told_and_the_rank_still_hears_of_its_start() -> None:
    done = returning("""
import signal
signal.signal(signal.SIGRTMAX, signal.SIG_IGN)
called = threading.Event()
restart.when_shut(called.set)
restart.when_shut(lambda: [].pop())
asked()
called.wait()
starts_again()
""")
    assert done.returncode == 0, done.stderr
    assert "IndexError: pop from empty list" in done.stderr
