"""What becomes of a save by DeepSpeed that fails or is disturbed, and of the files around it."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo

import megatron.adapters.deepspeed  # noqa: F401
from megatron.adapters.deepspeed_engine import LazyCheckpointEngine, LazySettings, wait_for_saves
from megatron.adapters.lazy_files import options
from megatron.adapters.to_torch import main as to_torch
from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointSaveError
from tests.dist.harness import ROOT, Zygote
from tests.faults.injection import run_traced

STORES: Any = dist  # whose stores are not annotated as its own


def alone() -> None:
    """Be the only rank of a job."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=STORES.HashStore(), rank=0, world_size=1)


def saved_by(work: Callable[[Path], None], zygote: Zygote, directory: Path) -> Path:
    """Do it in a process of its own, in the new directory that is returned.

    It is none of this process, which has threads: their locks would stay locked for ever.
    """
    saves = directory / "saves"
    saves.mkdir()
    zygote.call(work, directory, saves)
    return saves


def in_a_new_process(work: str, directory: Path, begin: str = "") -> subprocess.CompletedProcess[str]:
    """Have a program call a function of this module, after `begin`."""
    command = [sys.executable, "-c", f"{begin}\nfrom {__name__} import *; {work}(Path(sys.argv[1]))", str(directory)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


class Model(torch.nn.Module):
    """A layer that is trained, and one that is frozen, which its owner changes from time to time."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = torch.nn.Parameter(torch.ones(1000))
        self.teacher = torch.nn.Parameter(torch.ones(1000), requires_grad=False)
        self.optimizer = torch.optim.Adam([self.trained], lr=0.1)
        self.trained.grad = torch.ones(1000)
        self.optimizer.step()

    @property
    def engine(self) -> Any:
        """What of a DeepSpeedEngine the checkpoint engine reads."""
        return SimpleNamespace(module=self, basic_optimizer=self.optimizer)


def save(directory: Path, state: Any, tag: str = "tag", name: str = "model.pt") -> LazyCheckpointEngine:
    engine = LazyCheckpointEngine()
    (directory / tag).mkdir(exist_ok=True)
    with engine.save_of(None):
        engine.create(CheckpointCommitInfo(tag, str(directory), True))
        engine.save(state, str(directory / tag / name))
    engine.wait()
    return engine


def save_that_raises(directory: Path) -> None:
    alone()
    engine = save(directory, {"number": 1}, "good")
    (directory / "bad").mkdir()
    with pytest.raises(ZeroDivisionError), engine.save_of(None):
        engine.create(CheckpointCommitInfo("bad", str(directory), True))
        engine.save({"number": 2}, str(directory / "bad" / "model.pt"))
        raise ZeroDivisionError("in the second file")
    assert engine.is_decoupled()  # DeepSpeed asks at each step
    with pytest.raises(CheckpointSaveError, match="bad was not saved: rank 0: ZeroDivisionError: in the second file"):
        engine.wait()
    assert (directory / "latest").read_text() == "good"
    assert list((directory / "bad").iterdir()) == []
    save(directory, {"number": 3}, "next")
    assert (directory / "latest").read_text() == "next"


@pytest.mark.slow
def test_a_save_that_raises_is_not_committed(zygote: Zygote, tmp_path: Path) -> None:
    saved_by(save_that_raises, zygote, tmp_path)


def join() -> int:
    """Be a rank of a job of two; returns which."""
    dist.init_process_group("gloo")
    return dist.get_rank()


def save_on_two_ranks(directory: Path) -> None:
    """Rank 1 raises within its first save, before its file in a directory called `early`."""
    rank = join()
    engine = LazyCheckpointEngine(settings=LazySettings(timeout_minutes=5))
    path = directory / "bad" / f"{rank}.pt"
    with contextlib.suppress(ZeroDivisionError), engine.save_of(None):
        if directory.name == "early" and rank == 1:
            raise ZeroDivisionError("before the save was created")
        engine.create(CheckpointCommitInfo("bad", str(directory), True))
        engine.makedirs(directory / "bad", exist_ok=True)
        engine.save({"rank": rank}, str(path))
        if rank == 1:
            raise ZeroDivisionError("after its file")
    try:
        engine.wait()
    except CheckpointSaveError as error:
        (directory / f"error_{rank}").write_text(str(error))
    with engine.save_of(None):
        engine.create(CheckpointCommitInfo("good", str(directory), True))
        engine.makedirs(directory / "good", exist_ok=True)
        engine.save({"rank": rank}, str(directory / "good" / path.name))
    engine.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("late", "rank 1: ZeroDivisionError: after its file"),
        ("early", "rank 1: ZeroDivisionError: before the save was created"),
    ],
)
def test_a_save_that_raises_on_one_rank_fails_on_all_at_once(
    name: str, error: str, zygote: Zygote, tmp_path: Path
) -> None:
    saves = tmp_path / name
    saves.mkdir()
    zygote.call(save_on_two_ranks, tmp_path, saves, ranks=2)
    assert all(error in (saves / f"error_{rank}").read_text() for rank in range(2))
    assert (saves / "latest").read_text() == "good"


def save_when_told(directory: Path) -> None:
    """Rank 1 saves once it may; rank 0 waits for the save with timeouts, each of which says that it has passed."""
    rank = join()
    store = STORES.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    engine = LazyCheckpointEngine(settings=LazySettings(timeout_minutes=5))
    if rank == 1:
        store.wait(["may_save"], timedelta(seconds=300))
    with engine.save_of(None):
        engine.create(CheckpointCommitInfo("tag", str(directory), True))
        engine.makedirs(directory / "tag", exist_ok=True)
        engine.save({"rank": rank}, str(directory / "tag" / f"{rank}.pt"))
    if rank == 0:
        for wait in (engine.wait, wait_for_saves, engine.wait):
            with pytest.raises(TimeoutError) as raised:
                wait(0.05)
            said = "checkpoint tag is not complete yet: its save goes on; wait again, or longer"
            assert str(raised.value) == said
        store.set("may_save", "")
    wait_for_saves(300)
    assert (directory / "latest").read_text() == "tag"
    wait_for_saves(0)


@pytest.mark.slow
def test_a_wait_that_takes_too_long_says_so_and_leaves_the_save_to_be_waited_for(
    zygote: Zygote, tmp_path: Path
) -> None:
    saves = tmp_path / "saves"
    saves.mkdir()
    zygote.call(save_when_told, tmp_path, saves, ranks=2)


def train_with_deepspeed(directory: Path) -> None:
    """DeepSpeed's own save_checkpoint raises in a file that is not its first; the program goes on."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for half a minute
    alone()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")
    deepspeed.init_distributed("gloo")
    model = torch.nn.Linear(8, 8)
    parameters: Any = list(model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}}, "checkpoint": {"engine": {"type": "lazy"}},
    }  # fmt: skip
    engine: Any = deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]

    def step() -> None:
        engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).float().sum())
        engine.step()

    step()
    engine.save_checkpoint(str(directory), tag="good")
    found, _ = engine.load_checkpoint(str(directory))  # waits for the save, which writes `latest`
    assert found is not None and Path(found).parent.name == "good"
    made, engine.optimizer.state_dict = engine.optimizer.state_dict, lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.save_checkpoint(str(directory), tag="bad")
    engine.optimizer.state_dict = made
    step()
    with pytest.raises(CheckpointSaveError, match="bad was not saved: rank 0: ZeroDivisionError"):
        engine.save_checkpoint(str(directory), tag="next")
    assert (directory / "latest").read_text() == "good"
    engine.save_checkpoint(str(directory), tag="next")
    found, _ = engine.load_checkpoint(str(directory))
    assert Path(found).parent.name == "next"


@pytest.mark.slow
def test_deepspeed_goes_on_after_a_save_that_raises(zygote: Zygote, tmp_path: Path) -> None:
    """A fork of this process could not compute gradients if this one did."""
    zygote.call(train_with_deepspeed, tmp_path, tmp_path / "saves")


def save_with_a_teacher(directory: Path) -> None:
    alone()
    model, engine = Model(), LazyCheckpointEngine()
    with engine.save_of(model.engine):
        engine.create(CheckpointCommitInfo("tag", str(directory), True))
        engine.makedirs(directory / "tag")
        path = directory / "tag" / "model.pt"
        engine.save({"teacher": model.teacher, "trained": model.trained}, str(path))
        model.teacher.data.fill_(7)
    assert torch.equal(engine.load(str(path))["teacher"], torch.ones(1000))


@pytest.mark.slow
def test_a_frozen_parameter_is_copied_at_once(zygote: Zygote, tmp_path: Path) -> None:
    saved_by(save_with_a_teacher, zygote, tmp_path)


def save_and_change(directory: Path) -> None:
    alone()
    model, engine = Model(), LazyCheckpointEngine()
    with engine.save_of(model.engine):
        engine.create(CheckpointCommitInfo("tag", str(directory), True))
        engine.makedirs(directory / "tag")
        engine.save({"trained": model.trained}, str(directory / "tag" / "model.pt"))
        with torch.no_grad():
            model.trained.mul_(2)
    with pytest.raises(CheckpointSaveError, match="tensor 0 of shape .1000. was changed during the save"):
        engine.wait()
    assert not (directory / "latest").exists()


@pytest.mark.slow
def test_a_save_whose_state_is_changed_meanwhile_fails(zygote: Zygote, tmp_path: Path) -> None:
    saved_by(save_and_change, zygote, tmp_path)


def save_beside_files(directory: Path) -> None:
    alone()
    mine = {"tag/notes.lazy": "a", "tag/model.pt.lazy": "b", "precious": "c"}
    save(directory, {"number": 1})
    for name, text in mine.items():
        (directory / name).write_text(text)
    (directory / ".latest.tmp").symlink_to(directory / "precious")
    (directory / "tag" / ".lazy_manifest.json.tmp").symlink_to(directory / "precious")
    (directory / ".weights.pt.tmp").symlink_to(directory / "precious")
    (directory / "tag" / "lost.pt.0123456789ab.lazy").write_text("of a save that was killed")
    engine = save(directory, {"number": 2})
    engine.save({"number": 3}, str(directory / "weights.pt"))  # as save_16bit_model
    assert {name: (directory / name).read_text() for name in mine} == mine
    assert not (directory / "tag" / "lost.pt.0123456789ab.lazy").exists()
    assert torch.load(directory / "weights.pt") == {"number": 3}
    found = sorted(path.name for path in directory.iterdir())
    assert found == [".latest.tmp", ".weights.pt.tmp", "latest", "precious", "tag", "weights.pt"]


@pytest.mark.slow
def test_files_of_others_are_neither_removed_nor_written(zygote: Zygote, tmp_path: Path) -> None:
    saved_by(save_beside_files, zygote, tmp_path)


def save_with_torch_over_it(directory: Path) -> None:
    alone()
    engine = save(directory, {"number": 1})
    torch.save({"number": 2}, directory / "tag" / "model.pt")
    message = r"tag/model.pt: a file of torch.save, .*tag/lazy_manifest.json names; if .*remove that manifest"
    with pytest.raises(CheckpointDamagedError, match=message):
        engine.load(str(directory / "tag" / "model.pt"))
    (directory / "tag" / "lazy_manifest.json").unlink()
    assert engine.load(str(directory / "tag" / "model.pt")) == {"number": 2}


@pytest.mark.slow
def test_a_file_of_torch_save_over_one_of_lazy_is_called_so(zygote: Zygote, tmp_path: Path) -> None:
    saved_by(save_with_torch_over_it, zygote, tmp_path)


def save_tied(directory: Path) -> None:
    alone()
    weight = torch.nn.Parameter(torch.arange(100_000.0))
    complex_one = torch.tensor([1 + 2j])
    state = {
        "one": weight.detach(), "other": weight.detach(), "parameter": weight, "part": weight.detach()[1:],
        "plain": complex_one, "conjugate": complex_one.conj(), "empty": torch.empty(0), "ints": torch.empty(0).int(),
    }  # fmt: skip
    engine = save(directory, state)
    path = directory / "tag" / "model.pt"
    assert path.stat().st_size < 3 * weight.nbytes  # the whole and the part
    found = engine.load(str(path))
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert isinstance(found["parameter"], torch.nn.Parameter) and not found["one"].requires_grad
    assert found["one"].data_ptr() == found["other"].data_ptr() == found["parameter"].data_ptr()


@pytest.mark.slow
def test_tied_weights_are_saved_once(zygote: Zygote, tmp_path: Path) -> None:
    saved_by(save_tied, zygote, tmp_path)


def save_one(directory: Path) -> None:
    alone()
    save(directory, {"number": 1})


def test_each_file_and_name_is_on_the_disk_before_the_next_that_needs_it(tmp_path: Path) -> None:
    paths: list[str] = []

    def is_watched(path: str) -> bool:
        if Path(path).is_relative_to(tmp_path):
            paths.append(re.sub(r"[0-9a-f]{12}", "XX", os.path.relpath(path, tmp_path)))
        return Path(path).is_relative_to(tmp_path)

    done = run_traced(lambda: save_one(tmp_path), is_watched, None)
    assert done.raised is None, done.raised
    calls = [(call, path) for call, path in zip(done.calls, paths, strict=True) if call in ("sync", "rename")]
    assert calls == [
        ("sync", "tag/model.pt.XX.lazy"), ("sync", "tag"), ("sync", "."),
        ("sync", "tag/.lazy_manifest.json.XX.tmp"), ("rename", "tag/.lazy_manifest.json.XX.tmp"), ("sync", "tag"),
        ("rename", "tag/model.pt.XX.lazy"), ("sync", "tag"),
        ("sync", ".latest.XX.tmp"), ("rename", ".latest.XX.tmp"), ("sync", "."),
    ]  # fmt: skip


def end_with_a_failed_save(directory: Path) -> None:
    """A program whose last save fails, as on a full disk."""
    alone()
    engine = save(directory, {"number": 1}, "good")
    (directory / "bad").mkdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    with engine.save_of(None):
        engine.create(CheckpointCommitInfo("bad", str(directory), True))
        engine.save({"weight": torch.ones(100_000)}, str(directory / "bad" / "model.pt"))
    multiprocessing.util.Finalize(None, print, args=("its processes ended",), exitpriority=0)
    print("the end")


BEGIN = """
import atexit, ctypes, sys
import megatron.adapters.deepspeed
atexit.register(lambda: log.write("a handler of the program's was called"))
log = open(sys.argv[1] + "/log", "w")
binary = open(sys.argv[1] + "/binary", "wb")
binary.write(b"0" * 100)
ctypes.CDLL(None).puts(b"by C")
"""


@pytest.mark.slow
def test_a_program_whose_last_save_fails_does_not_end_with_zero(tmp_path: Path) -> None:
    """All else that ends with it does so as ever: handlers that it has registered, open files, processes."""
    done = in_a_new_process("end_with_a_failed_save", tmp_path, BEGIN)
    assert done.returncode == 1, done.stderr
    assert "the end\nits processes ended\n" in done.stdout and "by C\n" in done.stdout
    assert "checkpoint bad was not saved: rank 0: OSError: [Errno 27] File too large" in done.stderr
    assert (tmp_path / "latest").read_text() == "good"
    assert (tmp_path / "log").read_text() == "a handler of the program's was called"
    assert (tmp_path / "binary").read_bytes() == b"0" * 100


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "1"}, 8),  # torchrun, started by srun
        ({"LOCAL_SIZE": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "6"}, 6),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"MPI_LOCALNRANKS": "3"}, 3),
    ],
)
def test_launchers_say_how_many_ranks_share_a_host(
    variables: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert options().local_world_size == ranks


def saved_to_convert(directory: Path) -> None:
    alone()
    save(directory, {"weights": torch.arange(1 << 16)})


@pytest.mark.slow
def test_a_conversion_that_has_no_room_leaves_nothing_and_says_so(
    zygote: Zygote, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saves = saved_by(saved_to_convert, zygote, tmp_path)
    words = [str(saves / "tag"), str(tmp_path / "out" / "tag")]
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))"  # of each file
    command = [sys.executable, "-c", f"{limit}; from megatron.adapters.to_torch import main; raise SystemExit(main())"]
    done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == f"to_torch: [Errno 27] File too large: '{tmp_path}/out/tag/model.pt'"
    assert "Traceback" not in done.stderr and list((tmp_path / "out").iterdir()) == []
    assert to_torch(words) == 0
    assert torch.equal(torch.load(tmp_path / "out" / "tag" / "model.pt")["weights"], torch.arange(1 << 16))
    assert to_torch(words) == 1
    assert f"nothing is overwritten; give another: '{tmp_path}/out/tag'" in capsys.readouterr().err
