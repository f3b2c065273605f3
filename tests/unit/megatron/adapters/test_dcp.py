"""LazyWriter and LazyReader in one process: what is refused, what is found damaged, what one save leaves of another."""

from __future__ import annotations

import os
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron.adapters.dcp import LazyReader, LazyWriter
from megatron.adapters.snapshot import local_part
from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointSaveError
from tests.unit.megatron.checkpointing.engines.newer_metadata import pickle_with_strides


def state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(64, 32, generator=generator)
    return {
        "weight": weight, "bf16": weight.bfloat16()[:5], "scalar": weight.sum(), "empty": torch.empty(0),
        "nested": {"step": seed, "rates": [0.1, 0.2], "turned": weight.t()},
    }  # fmt: skip


def like(saved: dict[str, Any]) -> dict[str, Any]:
    """The same state before a load: other values everywhere."""
    empty = {name: torch.zeros_like(value) for name, value in saved.items() if isinstance(value, torch.Tensor)}
    return {**empty, "nested": {"step": -1, "rates": [0, 0], "turned": torch.zeros_like(saved["nested"]["turned"])}}


def save(directory: Path, saved: dict[str, Any]) -> None:
    dcp_save(saved, checkpoint_id=directory, storage_writer=LazyWriter(), no_dist=True)


def load(directory: Path, into: dict[str, Any]) -> dict[str, Any]:
    dcp_load(into, checkpoint_id=directory, storage_reader=LazyReader(), no_dist=True)
    return into


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b

    return same(one, other)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def refused(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def test_what_is_saved_is_loaded_and_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "checkpoint"
    for seed in (1, 2):
        save(directory, state(seed))
        assert equal(load(directory, like(state(seed))), state(seed))
        assert len(files(directory)) == 2 and files(directory.parent) == ["checkpoint"]


def test_an_asynchronous_save_holds_what_was_there_when_it_began(tmp_path: Path) -> None:
    saved = state(3)
    future = async_save(saved, checkpoint_id=tmp_path / "it", storage_writer=LazyWriter(), no_dist=True)
    for tensor in (saved["weight"], saved["bf16"]):  # of no optimizer
        tensor.zero_()
    saved["nested"]["rates"].append(0.3)
    assert not isinstance(future, AsyncSaveResponse)
    future.result(timeout=300)
    assert equal(load(tmp_path / "it", like(state(3))), state(3))


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "it", state(1))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refused)
        with pytest.raises(CheckpointException, match="No space left on device"):
            save(tmp_path / "it", state(2))
    assert equal(load(tmp_path / "it", like(state(1))), state(1))
    save(tmp_path / "it", state(2))
    assert len(files(tmp_path / "it")) == 2


def test_saves_that_fail_leave_the_files_of_no_more_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed after the files were written, as on another rank; the user's files are not taken for one's own."""
    users = ["rank_0_adapter.safetensors", "rank_00000_0123456789ab.safetensors.old", "rank_notes.safetensors"]
    save(tmp_path, state(1))
    for name in users:
        (tmp_path / name).write_text("mine")
    for _ in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", refused)
            with pytest.raises(CheckpointException, match="No space left on device"):
                save(tmp_path, state(2))
        assert len([path for path in tmp_path.glob("rank_*") if path.name not in users]) == 2
        assert equal(load(tmp_path, like(state(1))), state(1))
    save(tmp_path, state(2))
    assert len(files(tmp_path)) == 2 + len(users) and set(files(tmp_path)) > set(users)


def test_of_two_jobs_in_one_directory_one_is_told_that_it_did_not_save(tmp_path: Path) -> None:
    class Late(LazyWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            save(tmp_path, state(2))
            super().finish(metadata=metadata, results=results)

    save(tmp_path, state(1))
    with pytest.raises(CheckpointException, match="is gone before the save is complete: give each job"):
        dcp_save(state(3), checkpoint_id=tmp_path, storage_writer=Late(), no_dist=True)
    assert equal(load(tmp_path, like(state(2))), state(2))


def test_a_file_that_is_cut_off_before_the_commit_fails_the_save(tmp_path: Path) -> None:
    class Cut(LazyWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            for path in tmp_path.rglob("rank_*"):
                os.truncate(path, 100)
            super().finish(metadata=metadata, results=results)

    with pytest.raises(CheckpointException, match="has 100 bytes instead of"):
        dcp_save(state(1), checkpoint_id=tmp_path / "it", storage_writer=Cut(), no_dist=True)
    assert files(tmp_path) == [".it.incomplete"]


def test_what_is_durable_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files before their names, these before `.metadata`, its content before its name."""
    seen: list[str] = []
    fsync, rename, link = os.fsync, os.rename, os.replace

    def kind(path: Any) -> str:
        found = re.search(r"rank|metadata|it\.incomplete|it|save", Path(path).name)
        return found.group() if found else str(path)

    def synced(fd: int) -> None:
        fsync(fd)
        seen.append(f"fsync {kind(os.readlink(f'/proc/self/fd/{fd}'))}")

    def moved(how: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def move(source: Any, target: Any) -> None:
            how(source, target)
            seen.append(f"name {kind(target)}")

        return move

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", moved(rename))
    monkeypatch.setattr(os, "replace", moved(link))
    (tmp_path / "save").mkdir()
    place, committed = "fsync it.incomplete", ["fsync metadata", "name metadata"]
    save(tmp_path / "save" / "it", state(1))
    assert seen == ["fsync rank", place, *committed, place, "name it", "fsync save"]
    seen.clear()
    save(tmp_path / "save" / "it", state(2))
    assert seen == ["fsync rank", "fsync it", *committed, "fsync it"]
    seen.clear()
    writer = LazyWriter(fsync=False)
    dcp_save(state(1), checkpoint_id=tmp_path / "save" / "it", storage_writer=writer, no_dist=True)
    assert seen == ["name metadata"]


class Waiting(DefaultSavePlanner):
    """Plans once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may_plan = threading.Event(), threading.Event()

    def create_local_plan(self) -> Any:
        self.asked.set()
        assert self.may_plan.wait(300)
        return super().create_local_plan()


class Failing(DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        raise OSError(28, "No space left on device")


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of one rank."""
    stores: Any = dist  # whose stores are not annotated as its own
    dist.init_process_group("gloo", store=stores.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Trained:
    """A parameter, and an optimizer that has stepped."""

    def __init__(self, values: torch.Tensor) -> None:
        self.weight = torch.nn.Parameter(values)
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.step()

    def step(self) -> None:
        self.weight.grad = torch.ones_like(self.weight)
        self.optimizer.step()


def save_later(directory: Path, weight: torch.Tensor, writer: LazyWriter, planner: DefaultSavePlanner) -> Future[Any]:
    future: Any = async_save(
        {"weight": weight.detach()}, checkpoint_id=directory, storage_writer=writer, planner=planner, no_dist=True
    )  # as in a state dict
    return future


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda weight: weight.mul_(2),
    "copy_": lambda weight: weight.copy_(torch.ones_like(weight)),
    "zero_ of another alias": lambda weight: weight.detach().zero_(),
    "mul_ of the local part": lambda weight: local_part(weight).mul_(2),
    "_foreach_mul_": lambda weight: torch._foreach_mul_([weight], 2.0),  # pyright: ignore[reportPrivateImportUsage]
    ".data of the local part": lambda weight: local_part(weight).data.mul_(2),
}


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "DTensor"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_without_an_optimizer_is_not_committed(
    change: Callable[[torch.Tensor], Any], sharded: bool, mesh: Any, tmp_path: Path
) -> None:
    values = torch.arange(1000.0)
    training = Trained(distribute_tensor(values, mesh, [Shard(0)]) if sharded else values)
    weight = training.weight
    planner = Waiting()
    future = save_later(tmp_path / "it", weight, LazyWriter(), planner)
    with torch.no_grad():
        change(weight)
    planner.may_plan.set()
    with pytest.raises(CheckpointException, match='weight was changed during the save, .* choose snapshot "copy"'):
        future.result(timeout=300)
    assert files(tmp_path) == [".it.incomplete"] and files(tmp_path / ".it.incomplete") == []


@pytest.mark.parametrize("how", ["lazy", "copy"])
def test_a_save_of_a_dtensor_that_is_planned_after_a_step_holds_what_was_before(
    how: str, mesh: Any, tmp_path: Path
) -> None:
    training, planner = Trained(distribute_tensor(torch.arange(1000.0), mesh, [Shard(0)])), Waiting()
    future = save_later(tmp_path / "it", training.weight, LazyWriter(snapshot=how), planner)
    if how == "copy":
        with torch.no_grad():
            local_part(training.weight).mul_(2)
    training.step()
    planner.may_plan.set()
    future.result(timeout=300)
    found = load(tmp_path / "it", {"weight": torch.zeros(1000)})
    assert torch.equal(found["weight"], torch.arange(1000.0) - 1)
    factor = 2 if how == "copy" else 1
    assert torch.equal(local_part(training.weight), (torch.arange(1000.0) - 1) * factor - 1)


def test_a_writer_is_used_again_after_a_save_that_failed(tmp_path: Path) -> None:
    training = Trained(torch.zeros(1000))
    weight, writer = training.weight, LazyWriter()
    for _ in range(2):
        with pytest.raises(CheckpointException, match="No space left on device"):
            save_later(tmp_path / "it", weight, writer, Failing()).result(timeout=300)
    with torch.no_grad():
        weight.fill_(5.0)  # after that save
    dcp_save({"weight": weight}, checkpoint_id=tmp_path / "it", storage_writer=writer, no_dist=True)
    found = load(tmp_path / "it", {"weight": torch.zeros(1000)})
    assert torch.equal(found["weight"], weight)


def test_saves_of_one_writer_at_the_same_time_are_kept_apart(tmp_path: Path) -> None:
    training = Trained(torch.zeros(1000))
    writer, planners, futures = LazyWriter(), [Waiting(), Waiting()], []
    for number, planner in enumerate(planners):
        futures.append(save_later(tmp_path / str(number), training.weight, writer, planner))
        assert planner.asked.wait(300)
        training.step()
    for number in (1, 0):
        planners[number].may_plan.set()
        futures[number].result(timeout=300)
        found = load(tmp_path / str(number), {"weight": torch.zeros(1000)})
        assert torch.equal(found["weight"], torch.full((1000,), -1.0 - number))


@pytest.mark.parametrize("position", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("name", [".metadata", "rank_00000_*.safetensors"])
def test_a_flipped_bit_is_found(name: str, position: float, tmp_path: Path) -> None:
    save(tmp_path / "it", state(1))
    (path,) = (tmp_path / "it").glob(name)
    content = bytearray(path.read_bytes())
    content[int(position * len(content))] ^= 4
    path.write_bytes(content)
    with pytest.raises((CheckpointException, CheckpointDamagedError), match=path.name):
        load(tmp_path / "it", like(state(1)))


def check_refused(directory: Path, message: str, caplog: pytest.LogCaptureFixture) -> None:
    """That a load ends with this message, and logs it: torch before 2.13 hides what its reader raises."""
    raised = f"metadata read failed: {message}" if Version(torch.__version__) >= Version("2.13") else "metadata is None"
    with pytest.raises(CheckpointException, match=re.escape(raised)):
        load(directory, like(state(1)))
    logged = [record for record in caplog.records if record.name == "megatron.adapters.dcp"]
    assert [record.getMessage().startswith(message) for record in logged] == [True]


def test_a_directory_without_a_complete_checkpoint_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    missing = f"{tmp_path}/.metadata is missing: {tmp_path} holds no complete checkpoint"
    check_refused(tmp_path, missing, caplog)


def test_a_checkpoint_of_dcps_own_writer_is_no_damaged_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dcp_save(state(1), storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    of_torch = f"{tmp_path}/.metadata: does not end with a checksum: LazyWriter did not write it"
    check_refused(tmp_path, of_torch, caplog)


def test_what_a_newer_torch_saved_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        pickle_with_strides(patched)
        save(tmp_path / "it", state(1))
    assert equal(load(tmp_path / "it", like(state(1))), state(1))


def test_a_link_to_nothing_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "it").symlink_to("moved_away")
    message = f"checkpoint directory {tmp_path}/it: a symbolic link to moved_away, which does not exist; create"
    with pytest.raises(CheckpointException, match=re.escape(message)):
        save(tmp_path / "it", state(1))
    assert files(tmp_path) == ["it"]
    (tmp_path / "moved_away").mkdir()
    save(tmp_path / "it", state(1))
    assert (tmp_path / "it").is_symlink() and equal(load(tmp_path / "it", like(state(1))), state(1))


def test_a_checkpoint_of_dcps_own_writer_is_replaced_and_its_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writer's `.metadata` names its own files; DCP's own keeps `*.distcp` files, too."""

    def save_with_torch(seed: int) -> None:
        dcp_save(state(seed), storage_writer=FileSystemWriter(tmp_path), no_dist=True)

    def load_with_torch(seed: int) -> dict[str, Any]:
        into = like(state(seed))
        dcp_load(into, storage_reader=FileSystemReader(tmp_path), no_dist=True)
        return into

    save_with_torch(1)
    torchs = (tmp_path / "__0_0.distcp").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refused)
        with pytest.raises(CheckpointException, match="No space left on device"):
            save(tmp_path, state(2))
    assert equal(load_with_torch(1), state(1))
    save(tmp_path, state(2))
    assert equal(load(tmp_path, like(state(2))), state(2))
    assert (tmp_path / "__0_0.distcp").read_bytes() == torchs and len(files(tmp_path)) == 3
    save_with_torch(3)
    assert equal(load_with_torch(3), state(3))
    save(tmp_path, state(4))
    assert equal(load(tmp_path, like(state(4))), state(4)) and len(files(tmp_path)) == 3


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="snapshot 'eager': there is lazy and copy"):
        LazyWriter(snapshot="eager")
    writer = LazyWriter(tmp_path)
    writer.stage(state(1))
    with pytest.raises(CheckpointSaveError, match="wait for the future of async_save before the next"):
        writer.stage(state(1))
    with pytest.raises(CheckpointException, match="give it a path, or give dcp.save a checkpoint_id"):
        dcp_save(state(1), storage_writer=LazyWriter(), no_dist=True)
    with pytest.raises(TypeError, match="give async_save the type THREAD"):  # which hands it to another process
        pickle.dumps(LazyWriter(tmp_path))
