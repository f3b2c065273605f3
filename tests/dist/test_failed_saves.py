"""A save that fails is reported by name on all ranks, leaves no trace on disk, and training goes on."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.parallel.topology import Layout
from tests.dist.harness import LLAMA_STYLE, Run, Zygote, losses, records
from tests.dist.storage import small_disk
from tests.dist.tiny_runs import Launcher, saving

TWO = Layout(tp=2, pp=1, dp=1)
MODEL = [
    *LLAMA_STYLE, "--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "96", "--num-attention-heads", "4",
    "--seq-length", "16", "--bf16",
]  # fmt: skip
TRAINING = [
    "--micro-batch-size", "1", "--global-batch-size", "1", "--train-iters", "4", "--lr", "1e-3",
    "--log-interval", "1",
]  # fmt: skip
ONE = Layout(tp=1, pp=1, dp=1)
SCRIPT = str(Path(__file__).with_name("scripts") / "disturbed_saves.py")
KILLED = str(Path(__file__).with_name("scripts") / "killed_when_written.py")
CHECKPOINT_BYTES = 1_900_000  # of one rank: 14 for each parameter
DISK_BYTES = 16 << 20


@pytest.fixture
def launcher(zygote: Zygote, dataset: list[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, dataset, tmp_path)


@dataclass(frozen=True)
class Disk:
    """Where to save, and how that place is made to have no room."""

    directory: Path
    fill: str
    free: str
    error: str  # what the operating system says then
    is_real: bool


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk of our own that can really be full; where none may be mounted, a limit on the size of files."""
    with small_disk(tmp_path / "disk", DISK_BYTES) as mounted:
        if mounted:
            print(f"the full disk is a tmpfs of {DISK_BYTES} bytes")
            where, error = tmp_path / "disk" / "run", "OSError: [Errno 28] No space left on device"
            yield Disk(where, "fill:200000", "free", error, True)
        else:
            print("the full disk is a limit on the size of files (RLIMIT_FSIZE)")
            yield Disk(tmp_path / "run", "limit", "unlimit", "OSError: [Errno 27] File too large", False)


def train(launcher: Launcher, save: Path, actions: dict[int, str], *flags: str) -> Run:
    """Train with a trace that is not on the disk that the checkpoints are on."""
    environment = {"DISTURB": json.dumps(actions)}
    trace = str(launcher.directory / "trace")
    return launcher.run(
        TWO, *MODEL, *TRAINING, *saving(save, 1), "--restart-trace-dir", trace, *flags, script=SCRIPT, env=environment
    )


def outcomes(launcher: Launcher, rank: int) -> dict[int, str]:
    """Iteration -> how its save ended on a rank: "ok", or the exception that was raised there."""
    ends = [r for r in records(launcher.directory / "trace", rank=rank) if r["type"] == "operation_end"]
    return {r["step"]: r.get("error", "ok") for r in ends if r["operation"] == "save"}


def contents(save: Path) -> dict[str, bytes]:
    """All files but those that say which launch saves there."""
    files = [path for path in save.rglob("*") if path.is_file() and path.parent.name != ".generations"]
    return {str(path.relative_to(save)): path.read_bytes() for path in files}


def check_failure_in_the_middle(launcher: Launcher, save: Path, run: Run, reasons: list[str]) -> None:
    """Save 2 of 4 failed for `reasons`, all others succeeded."""
    assert run.exit_codes == [0] * TWO.world_size, run.output[-6000:]
    for rank in range(TWO.world_size):
        found = outcomes(launcher, rank)
        assert sorted(found) == [1, 2, 3, 4]
        failed = found.pop(2)
        assert set(found.values()) == {"ok"}, found
        assert failed.startswith("CheckpointSaveError: checkpoint global_step2 was not saved: rank ")
        for reason in reasons:
            assert reason in failed
    assert "checkpoint global_step2 was not saved: rank " in run.log(0)
    assert "; the previous checkpoint is untouched and training goes on" in run.log(0)
    assert sorted(losses(launcher.directory / "trace")) == [1, 2, 3, 4]
    left = sorted(path.name for path in save.iterdir())
    assert left == [
        ".generations",
        "global_step1",
        "global_step3",
        "global_step4",
        "latest",
        "latest_checkpointed_iteration.txt",
    ]


def test_disk_that_becomes_full_within_a_file(launcher: Launcher, disk: Disk) -> None:
    run = train(launcher, disk.directory, {2: disk.fill, 3: disk.free})
    check_failure_in_the_middle(launcher, disk.directory, run, [f"rank 0: {disk.error}", f"rank 1: {disk.error}"])
    again = launcher.train(TWO, *MODEL, *TRAINING, "--load", str(disk.directory), "--load-tag", "global_step3")
    assert "resumed from iteration 3" in again.output


@pytest.mark.parametrize("function", ["write_manifest", "publish"])
def test_disk_that_becomes_full_in_the_commit(launcher: Launcher, disk: Disk, function: str) -> None:
    if not disk.is_real:
        pytest.skip("no disk of our own can be mounted here, and a limit on file sizes would hit the trace too")
    run = train(launcher, disk.directory, {2: f"fill_before:{function}", 3: disk.free})
    check_failure_in_the_middle(launcher, disk.directory, run, [f"rank 0, commit: {disk.error}"])


def test_full_disk_to_the_end(launcher: Launcher, disk: Disk) -> None:
    """The exit code tells that the last state was not saved; --keep-last removes nothing for a save that failed."""
    run = train(launcher, disk.directory, {2: disk.fill}, "--keep-last", "1")
    assert run.exit_codes == [1] * TWO.world_size
    for rank in range(TWO.world_size):
        found = outcomes(launcher, rank)
        assert found.pop(1) == "ok"
        assert [disk.error in error for error in found.values()] == [True] * 3
    left = sorted(path.name for path in disk.directory.iterdir())
    assert left == [".generations", "global_step1", "latest", "latest_checkpointed_iteration.txt"]
    again = launcher.run(TWO, *MODEL, *TRAINING, "--load", str(disk.directory), "--exit-interval", "2")
    assert again.ok and "resumed from iteration 1" in again.output, again.output[-4000:]


@pytest.mark.parametrize("killed_in", [1, 2])
def test_what_a_killed_save_has_left_takes_no_room_from_the_next(launcher: Launcher, killed_in: int) -> None:
    """The disk has room for the save that is killed, and for the checkpoint before it if there is one, and no more."""
    save, room = launcher.directory / "disk" / "run", killed_in * CHECKPOINT_BYTES + CHECKPOINT_BYTES // 2
    trace = str(launcher.directory / "trace")
    flags = [
        *MODEL, *TRAINING, "--train-iters", str(killed_in), "--checkpoint-engine", "lazy", *saving(save, 1),
        "--load", str(save), "--restart-trace-dir", trace,
    ]  # fmt: skip
    with small_disk(launcher.directory / "disk", room) as mounted:
        if not mounted:
            pytest.skip("mounting a disk small enough to fill needs root")
        kill = {"KILL_RANK": "0", "KILL_STEP": str(killed_in), "KILL_ENGINE": "lazy"}
        killed = launcher.run(ONE, *flags, script=KILLED, env=kill)
        assert killed.exit_codes == [-signal.SIGKILL], killed.output[-6000:]
        assert sum(path.stat().st_size for path in save.glob(".incomplete_*/*")) > CHECKPOINT_BYTES // 2
        again = launcher.run(ONE, *flags)
        assert again.ok, again.output[-6000:]
        assert (save / f"global_step{killed_in}" / "manifest.json").is_file() and not list(save.glob(".incomplete_*"))


def test_directory_that_may_not_be_written_any_more(launcher: Launcher) -> None:
    save = launcher.directory / "run"
    run = train(launcher, save, {2: "forbid", 3: "allow"})
    check_failure_in_the_middle(launcher, save, run, ["PermissionError: [Errno 13] Permission denied", str(save)])


def test_one_rank_whose_engine_raises(launcher: Launcher) -> None:
    """The rank that could save learns why the other could not, and nothing it wrote is left."""
    save = launcher.directory / "run"
    run = train(launcher, save, {2: "raise:1", 3: "recover"})
    name = "layer_01-model_01-model_states.pt"
    check_failure_in_the_middle(launcher, save, run, [f"rank 1: IndexError: {name} met a broken engine"])
    assert "rank 0:" not in outcomes(launcher, 0)[2]


def test_one_rank_that_cannot_begin_its_part_of_a_shared_file(launcher: Launcher) -> None:
    """The other one is not left waiting for it, and writes nothing where it does not know its place."""
    save = launcher.directory / "run"
    shared = ["--checkpoint-engine", "lazy", "--checkpoint-files-per-node", "1"]
    run = train(launcher, save, {2: "raise:1", 3: "recover"}, *shared)
    reasons = ["rank 0: CheckpointSaveError: rank 1 has failed to begin its part; rank 1: IndexError: "]
    check_failure_in_the_middle(launcher, save, run, reasons)
    again = launcher.train(TWO, *MODEL, *TRAINING, "--load", str(save), "--load-tag", "global_step3")
    assert "resumed from iteration 3" in again.output


def test_failed_save_leaves_the_previous_checkpoint_untouched(launcher: Launcher) -> None:
    save = launcher.directory / "run"
    run = train(launcher, save, {}, "--exit-interval", "1")
    assert run.ok
    before = contents(save)
    run = train(launcher, save, {2: "raise:0"}, "--load", str(save), "--exit-interval", "2")
    assert run.exit_codes == [1] * TWO.world_size
    assert contents(save) == before
