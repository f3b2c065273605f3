"""Who may save into a directory: real processes claim it, are killed, stopped and superseded."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.checkpointing.engines.errors import SaveDirectoryInUseError, SaveDirectorySupersededError
from megatron.checkpointing.store import ownership
from megatron.checkpointing.store.ownership import Owner, Ownership, claim, newest_owner
from megatron.config import ConfigError
from megatron.training.trainer import claim_save_directory
from tests.unit.stalls import stand_still_in_sleep

ROOT = Path(__file__).resolve().parents[5]
CLAIM = """
import sys
from pathlib import Path
from megatron.checkpointing.store.ownership import claim
held = claim(Path(sys.argv[1]))
print(held.generation, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def other_launch(save: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has claimed `save` and holds it until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(save)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip().isdigit()
            yield process
        finally:
            process.kill()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Ownership]:
    mine = claim(tmp_path)
    yield mine
    mine.release()


def on_another_host(save: Path) -> Owner:
    """Have the present owner be seen as one of another host; its heart beats on."""
    owner = newest_owner(save)
    assert owner is not None
    moved = dataclasses.replace(owner, host="elsewhere", boot_id="another")
    (save / ".generations" / f"{owner.generation:08d}").write_text(json.dumps(dataclasses.asdict(moved)))
    return moved


def test_generations_count_up_and_the_newest_owns(tmp_path: Path) -> None:
    assert newest_owner(tmp_path) is None
    first = claim(tmp_path)
    assert first.generation == 1 and newest_owner(tmp_path) == first.owner
    first.check()
    first.release()
    second = claim(tmp_path)
    assert second.generation == 2
    second.check()
    with pytest.raises(SaveDirectorySupersededError) as told:
        first.check()
    for fact in (second.owner.launch_id, second.owner.host, f"pid {os.getpid()}", "generation 2"):
        assert fact in str(told.value)
    with pytest.raises(SaveDirectorySupersededError), first.exclusively():
        raise AssertionError("a superseded launch may change nothing")
    second.release()
    assert sorted(path.name for path in (tmp_path / ".generations").iterdir()) == ["00000002", "lock", "run_id"]


def test_a_second_launch_beside_a_living_one_is_refused(tmp_path: Path) -> None:
    with other_launch(tmp_path) as process:
        with pytest.raises(SaveDirectoryInUseError, match=rf"pid {process.pid}.*--take-over"):
            claim(tmp_path)
        mine = claim(tmp_path, take_over=True)
        assert mine.generation == 2
        mine.release()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_owner_is_followed_at_once(
    tmp_path: Path, signum: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while nobody has reaped it. A busy machine may take longer than PATIENCE_S to end it."""
    monkeypatch.setattr(ownership, "PATIENCE_S", 300.0)
    with other_launch(tmp_path) as process:
        process.send_signal(signum)
        mine = claim(tmp_path)
        assert mine.generation == 2
        mine.release()


def test_a_stopped_owner_is_alive(tmp_path: Path) -> None:
    with other_launch(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(SaveDirectoryInUseError):
            claim(tmp_path)
        process.send_signal(signal.SIGCONT)


def test_another_process_with_the_pid_of_the_owner_is_not_the_owner(tmp_path: Path, held: Ownership) -> None:
    file = tmp_path / ".generations" / "00000001"
    earlier = dataclasses.replace(held.owner, process_start_ticks=1)
    file.write_text(json.dumps(dataclasses.asdict(earlier)))
    claim(tmp_path).release()


def test_an_owner_on_another_host_is_alive_while_its_heart_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with other_launch(tmp_path) as process:
        on_another_host(tmp_path)
        with monkeypatch.context() as patience, pytest.raises(SaveDirectoryInUseError, match="host elsewhere"):
            # Enough for a machine on which the other process seldom gets to run.
            patience.setattr(ownership, "PATIENCE_S", 120.0)
            patience.setattr(ownership, "_STALE_S", 120.0)
            claim(tmp_path)
        process.kill()
        process.wait()
        mine = claim(tmp_path)
        assert mine.generation == 2
        mine.release()


def test_hosts_that_do_not_know_their_boot_are_told_apart_by_heartbeats(
    tmp_path: Path, held: Ownership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers may all be called alike, and show nothing of /proc/sys: a pid then says nothing."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    there = dataclasses.replace(held.owner, boot_id="", pid=ended.pid)
    (tmp_path / ".generations" / "00000001").write_text(json.dumps(dataclasses.asdict(there)))
    monkeypatch.setattr(ownership.clock, "boot_id", lambda: "")
    for limit in ("PATIENCE_S", "_STALE_S"):
        monkeypatch.setattr(ownership, limit, 120.0)  # for a machine on which the heart seldom gets to run
    with pytest.raises(SaveDirectoryInUseError):
        claim(tmp_path)


def test_a_silent_owner_on_another_host_is_not_waited_for(
    tmp_path: Path, held: Ownership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one that has ended by itself nor one whose heart stopped long ago."""

    def no_waiting(*_: object) -> bool:
        raise AssertionError("it waits for a heartbeat")

    monkeypatch.setattr(ownership, "_beats", no_waiting)
    held.release()
    on_another_host(tmp_path)
    for last_beat in (0.0, time.time() - 3600):
        os.utime(tmp_path / ".generations" / f"{newest(tmp_path):08d}", (last_beat, last_beat))
        mine = claim(tmp_path)
        mine.release()
        on_another_host(tmp_path)


def test_other_ranks_know_their_own_launch(tmp_path: Path) -> None:
    ownership.check_not_in_use(tmp_path, "mine", first_of_host=True)
    with other_launch(tmp_path):
        for first_of_host in (True, False):  # on the owner's host all of them look
            with pytest.raises(SaveDirectoryInUseError):
                ownership.check_not_in_use(tmp_path, "mine", first_of_host=first_of_host)
        mine = claim(tmp_path, "mine", take_over=True)
        ownership.check_not_in_use(tmp_path, "mine", first_of_host=True)
        mine.release()


def newest(save: Path) -> int:
    owner = newest_owner(save)
    assert owner is not None
    return owner.generation


def test_of_many_launches_at_once_one_owns(tmp_path: Path) -> None:
    """All of them take over, over and over; every generation is one launch's, and only the last one is sound."""
    claimed: list[Ownership] = []
    threads = [
        threading.Thread(target=lambda: claimed.extend(claim(tmp_path, take_over=True) for _ in range(5)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    generations = [mine.generation for mine in claimed]
    assert len(set(generations)) == len(claimed) == 40
    sound = []
    for mine in claimed:
        with contextlib.suppress(SaveDirectorySupersededError):
            mine.check()
            sound.append(mine.generation)
    assert sound == [max(generations)]
    for mine in claimed:
        mine.release()


def test_without_locks_the_generation_alone_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a file system that has none: real ones are not to be had here."""

    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    test_of_many_launches_at_once_one_owns(tmp_path)


def test_a_holder_that_hangs_does_not_keep_a_successor_waiting(tmp_path: Path, held: Ownership) -> None:
    with held.exclusively():
        mine = claim(tmp_path, take_over=True)  # returns
        with pytest.raises(SaveDirectorySupersededError):
            held.check()
        mine.release()


@pytest.mark.parametrize(
    "content",
    [
        "{",
        *(
            pytest.param(other, marks=pytest.mark.slow)  # a heart is listened for, in vain
            for other in ("", "[]", "null", '{"generation": 1}', '{"generation": 1, "launch_id": "\\u001b[2J"}')
        ),
        pytest.param("[" * 100_000, marks=pytest.mark.slow),
    ],
)
def test_garbage_is_an_owner_that_is_not_known(tmp_path: Path, content: str) -> None:
    """Its number counts all the same, and it is as good as dead once its heart is silent."""
    (tmp_path / ".generations").mkdir()
    (tmp_path / ".generations" / "00000001").write_text(content)
    (tmp_path / ".generations" / "no_number").write_text("")
    owner = newest_owner(tmp_path)
    assert owner is not None and (owner.generation, owner.launch_id) == (1, "unknown")
    mine = claim(tmp_path)
    assert mine.generation == 2
    mine.release()


def test_an_owner_goes_on_after_its_directory_was_emptied(
    tmp_path: Path, held: Ownership, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".generations" / "00000001").unlink()
    with held.exclusively():
        pass
    assert newest_owner(tmp_path) == held.owner and "was emptied" in caplog.text


def test_a_file_that_is_being_written_is_not_another_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may read what rank 0 has created and not filled yet, on a slow machine for longer than they wait."""
    held = claim(tmp_path, "mine")
    file = tmp_path / ".generations" / "00000001"
    content = file.read_text()
    file.write_text("")
    is_alive = ownership._is_alive

    def filled_meanwhile(save_dir: Path, owner: Owner) -> bool:
        assert owner.launch_id == "unknown"
        file.write_text(content)
        return is_alive(save_dir, owner)

    monkeypatch.setattr(ownership, "_is_alive", filled_meanwhile)
    ownership.check_not_in_use(tmp_path, "mine", first_of_host=True)
    held.release()


def test_a_successor_is_named_though_its_file_is_being_written(
    tmp_path: Path, held: Ownership, monkeypatch: pytest.MonkeyPatch
) -> None:
    successor = claim(tmp_path, take_over=True)
    file = tmp_path / ".generations" / "00000002"
    content = file.read_text()
    file.write_text("")
    sleep = time.sleep

    def filled_meanwhile(seconds: float) -> None:
        file.write_text(content)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", filled_meanwhile)
    with pytest.raises(SaveDirectorySupersededError, match=successor.owner.launch_id):
        held.check()
    successor.release()


def test_a_file_that_is_listed_and_not_there_is_looked_for_a_while(tmp_path: Path) -> None:
    """As network file systems list what is gone; here a link that leads nowhere."""
    folder = tmp_path / ".generations"
    folder.mkdir()
    (folder / "00000009").symlink_to(tmp_path / "nowhere")
    looked: list[int] = []
    found = ownership._generations
    with pytest.MonkeyPatch.context() as counted:
        counted.setattr(ownership, "_now_on", lambda save_dir: looked.append(len(found(save_dir))) or time.sleep(0.01))
        owner = newest_owner(tmp_path)
    assert owner is not None and (owner.generation, owner.launch_id) == (9, "unknown")
    assert 1 <= len(looked) <= 50
    mine = claim(tmp_path)
    assert mine.generation == 10
    mine.release()


@pytest.mark.parametrize("name", ["7", "000000007", "\u0663" * 8])
def test_numbers_that_no_launch_writes_are_no_generations(tmp_path: Path, name: str) -> None:
    (tmp_path / ".generations").mkdir()
    (tmp_path / ".generations" / name).write_text("{}")
    assert newest_owner(tmp_path) is None


WITHOUT_SPACE = """
import resource, sys
from pathlib import Path
from megatron.checkpointing.store.ownership import claim
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # every write fails
try:
    claim(Path(sys.argv[1]), take_over=True)
except OSError as error:
    print(error.strerror)
"""


def test_a_claim_that_finds_no_space_supersedes_nobody(tmp_path: Path, held: Ownership) -> None:
    words = [sys.executable, "-c", WITHOUT_SPACE, str(tmp_path)]
    tried = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert tried.stdout.strip() == "File too large"
    held.check()
    assert newest_owner(tmp_path) == held.owner


def test_a_process_that_is_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path, held: Ownership) -> None:
    """It has the descriptor, too: of a data loader's worker, say."""
    with held.exclusively():
        pid = os.fork()
        if pid == 0:
            signal.pause()
    try:
        fd = os.open(tmp_path / ".generations" / "lock", os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # else BlockingIOError
        os.close(fd)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_what_a_killed_process_left_is_removed_by_the_next_launch(tmp_path: Path) -> None:
    """But a young probe may be a living process's on another host."""
    claim(tmp_path).release()
    for name, age_s in ((".probe_old", 3600), (".probe_young", -3600), ("note.txt", 3600)):
        (tmp_path / ".generations" / name).touch()
        modified = time.time() - age_s
        os.utime(tmp_path / ".generations" / name, (modified, modified))
    claim(tmp_path).release()
    left = {path.name for path in (tmp_path / ".generations").iterdir()}
    assert left == {"00000002", "lock", "note.txt", "run_id", ".probe_young"}


def test_a_probe_that_a_launch_removes_is_no_error(
    tmp_path: Path, held: Ownership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is known by then: here each probe is gone before the process that made it can remove it."""
    successor = claim(tmp_path, take_over=True)
    close, removed = os.close, []

    def close_and_remove(fd: int) -> None:
        close(fd)
        for path in (tmp_path / ".generations").glob(".probe_*"):
            path.unlink()
            removed.append(path)

    monkeypatch.setattr(os, "close", close_and_remove)
    with pytest.raises(SaveDirectorySupersededError):
        held.check()
    assert removed
    successor.release()


def test_a_launch_id_of_any_characters_is_read_again(tmp_path: Path) -> None:
    mine = claim(tmp_path, "run\t1\nagain")
    assert newest_owner(tmp_path) == mine.owner
    mine.release()


RANK = """
import os, sys
from types import SimpleNamespace as Some
from megatron.training.trainer import claim_save_directory
rank = int(os.environ["RANK"])
parallel = Some(rank=rank, local_rank=rank)
held = claim_save_directory(Some(checkpoint=Some(save=sys.argv[1], take_over=False), parallel=parallel))
print(rank, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("restarts", ["0", "1"])
def test_ranks_in_wrappers_know_their_own_launch(tmp_path: Path, restarts: str) -> None:
    """A wrapper around each rank makes them children of different processes; agents do not count restarts alike."""
    words = ["sh", "-c", '"$@"; true', "wrapper", sys.executable, "-c", RANK, str(tmp_path)]
    launch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    first = os.environ | launch | {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    with subprocess.Popen(
        words, cwd=ROOT, env=first, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "0\n"
        other = os.environ | launch | {"RANK": "1", "TORCHELASTIC_RESTART_COUNT": restarts}
        ended = subprocess.run(words, cwd=ROOT, env=other, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert ended.stdout == "1\n", ended.stderr
        process.communicate()


@pytest.mark.parametrize(
    ("rank", "made"),
    [(0, Path.touch), (0, os.mkfifo), (0, lambda path: path.symlink_to("nowhere")), (1, Path.touch), (1, os.mkfifo)],
)
def test_what_cannot_be_claimed_is_named(tmp_path: Path, rank: int, made: Callable[[Path], object]) -> None:
    made(tmp_path / ".generations")
    config = SimpleNamespace(
        checkpoint=SimpleNamespace(save=str(tmp_path), take_over=False),
        parallel=SimpleNamespace(rank=rank, local_rank=rank),
    )
    with pytest.raises(ConfigError, match=rf"^--save {tmp_path}: cannot be claimed: .*\.generations: .*another --save"):
        claim_save_directory(config)  # type: ignore[arg-type]


# The id of the run


def test_all_launches_into_a_directory_have_one_id(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first, other = claim(tmp_path), claim(tmp_path / "other")
    for path in (tmp_path / ".generations").iterdir():
        path.unlink()
    first.check()  # which goes on as the owner of what was emptied
    for held in (first, other):
        held.release()
    second = claim(tmp_path)
    second.release()
    assert second.run_id == first.run_id != other.run_id


@pytest.mark.parametrize("content", ["", "x", "0" * 31, "0" * 1000])
def test_a_damaged_id_is_replaced_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str) -> None:
    first = claim(tmp_path)
    first.release()
    (tmp_path / ".generations" / "run_id").write_text(content)
    second = claim(tmp_path)
    second.release()
    assert len(second.run_id) == 32 and second.run_id != first.run_id
    assert "run_id: holds no id" in caplog.text


@pytest.mark.parametrize("linked", [".generations", ".generations/lock"])
def test_no_link_is_followed_to_another_runs_owner(tmp_path: Path, linked: str) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for run in (one, other):
        run.mkdir()
    claim(one).release()
    before = {path.name: path.stat().st_mtime_ns for path in (one / ".generations").iterdir()}
    (other / linked).parent.mkdir(exist_ok=True)
    (other / linked).symlink_to(one / linked)
    with pytest.raises(OSError):
        claim(other)
    assert {path.name: path.stat().st_mtime_ns for path in (one / ".generations").iterdir()} == before


def test_the_heart_does_not_beat_in_another_runs_file(tmp_path: Path) -> None:
    """After cp -as of a whole directory, say."""
    precious = tmp_path / "precious"
    precious.touch()
    os.utime(precious, (1000, 1000))
    held = claim(tmp_path)
    file = tmp_path / ".generations" / "00000001"
    file.unlink()
    file.symlink_to(precious)
    held.release()
    assert precious.stat().st_mtime == 1000


def test_a_heartbeat_counts_that_came_while_the_new_launch_stood_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host was stopped for longer than it looks: it must not take the directory from a launch that lives."""
    first = claim(tmp_path)
    first._ended.set()
    first._heart.join()  # it beats once more, below
    on_another_host(tmp_path)
    file = tmp_path / ".generations" / "00000001"
    monkeypatch.setattr(ownership, "_STALE_S", 120.0)
    stand_still_in_sleep(monkeypatch, 0, lambda before: None if before else os.utime(file, (1e9, 1e9)))
    with pytest.raises(SaveDirectoryInUseError, match="host elsewhere"):
        claim(tmp_path)


def test_a_killed_owner_has_time_to_end_though_the_machine_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    stand_still_in_sleep(monkeypatch, 0, ends.append)
    assert not ownership._outlasts(lambda: len(ends) < 2)


def test_an_owner_has_time_to_write_its_file_though_the_machine_stood_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: Ownership
) -> None:
    file = tmp_path / ".generations" / "00000001"
    content = file.read_bytes()
    file.write_bytes(b"")
    stand_still_in_sleep(monkeypatch, 0, lambda before: file.write_bytes(content if before else b""))
    assert newest_owner(tmp_path) == held.owner


def test_a_lock_is_waited_for_though_the_machine_stood_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: Ownership
) -> None:
    with (tmp_path / ".generations" / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        stand_still_in_sleep(monkeypatch, 0, lambda before: before and fcntl.flock(other, fcntl.LOCK_UN))
        with held.exclusively(), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
