"""Each system call of a save that replaces another fails, or kills the process: one of the two is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from megatron.adapters.dcp import LazyReader, LazyWriter
from megatron.adapters.deepspeed_engine import LazyCheckpointEngine
from tests.faults.injection import Fault, Traced, faults_at, in_a_small_process, run_traced
from tests.faults.system_calls import KILL


def state(number: int) -> dict[str, Any]:
    return {"weight": torch.full((5000,), float(number)), "number": torch.tensor(number)}


def save_by_dcp(directory: Path, number: int) -> None:
    dcp_save(state(number), storage_writer=LazyWriter(directory / "checkpoint"), no_dist=True)


def load_by_dcp(directory: Path) -> dict[str, Any]:
    found = state(0)
    dcp_load(found, storage_reader=LazyReader(directory / "checkpoint"), no_dist=True)
    return found


def alone() -> None:
    """Be the only rank of a job."""
    if not dist.is_initialized():
        stores: Any = dist  # whose stores are not annotated as its own
        dist.init_process_group("gloo", store=stores.HashStore(), rank=0, world_size=1)


def save_by_deepspeed(directory: Path, number: int, tag: str) -> None:
    """As DeepSpeed's save_checkpoint."""
    alone()
    engine = LazyCheckpointEngine()
    with engine.save_of(None):
        engine.makedirs(directory / tag, exist_ok=True)
        engine.create(CheckpointCommitInfo(tag, str(directory), True))
        for name in ("model.pt", "optimizer.pt"):
            engine.save(state(number), str(directory / tag / name))
    engine.cleanup()


def load_by_deepspeed(directory: Path) -> dict[str, Any]:
    """Load as DeepSpeed's load_checkpoint does, and see that both files come from one save."""
    alone()
    tag = (directory / "latest").read_text()
    assert all((directory / tag / name).exists() for name in ("model.pt", "optimizer.pt"))
    one, other = (LazyCheckpointEngine().load(str(directory / tag / name)) for name in ("model.pt", "optimizer.pt"))
    assert one["number"] == other["number"]
    return one


def with_each_fault(directory: Path, save: Callable[[], None], load: Callable[[], Any], every: int | None) -> int:
    """`directory` holds save 1; `save` makes save 2. Returns how many faults there were.

    `every`: kills at each so many calls; None: all other faults, at every call.
    """
    before = directory.with_name("before")
    shutil.copytree(directory, before)

    def run(fault: Fault | None) -> Traced:
        shutil.rmtree(directory)
        shutil.copytree(before, directory)
        return run_traced(save, lambda path: f"{path}/".startswith(f"{directory}/"), fault)

    calls = run(None).calls
    assert load()["number"] == 2
    chosen = [f for faults in faults_at(calls)[:: every or 1] for f in faults if (f.effect == KILL) is bool(every)]
    seen = set()
    for fault in chosen:
        done = run(fault)
        found = load()
        number = int(found["number"])
        assert torch.equal(found["weight"], state(number)["weight"]), fault
        assert done.status < 0 or done.raised is not None or number == 2, f"{fault}: said to be saved, and is not"
        seen.add(number)
    assert seen == {1, 2}  # before the commit, and after it
    return len(chosen)


def in_a_fork(work: Callable[[], Any]) -> Any:
    """What `work` returns in a process of its own: this one stays without threads and without a process group."""
    done = run_traced(work, lambda path: False, None)
    assert done.raised is None, done.raised
    assert not done.hangs and done.status == 0, done
    return done.result


def dcp_with_each_fault(directory: Path, every: int | None) -> None:
    save_by_dcp(directory, 1)
    with_each_fault(directory, lambda: save_by_dcp(directory, 2), lambda: load_by_dcp(directory), every)


def deepspeed_with_each_fault(directory: Path, every: int | None, tags: tuple[str, str]) -> None:
    in_a_fork(lambda: save_by_deepspeed(directory, 1, tags[0]))

    def load() -> Any:
        return in_a_fork(lambda: load_by_deepspeed(directory))

    with_each_fault(directory, lambda: save_by_deepspeed(directory, 2, tags[1]), load, every)


def all_with_each_fault(place: Path, every: int | None) -> None:
    """In one process, which imports the libraries once."""
    for name, work in (
        ("dcp", dcp_with_each_fault),
        ("same", partial(deepspeed_with_each_fault, tags=("global_step1", "global_step1"))),
        ("next", partial(deepspeed_with_each_fault, tags=("global_step1", "global_step2"))),
    ):
        (place / name / "save").mkdir(parents=True)
        work(place / name / "save", every)


@pytest.mark.slow
@pytest.mark.parametrize(
    "every",
    [
        pytest.param(3, id="kill at every third call"),
        pytest.param(1, id="kill at each call", marks=pytest.mark.nightly(minutes=2)),
        pytest.param(None, id="all other faults", marks=pytest.mark.nightly(minutes=5)),
    ],
)
def test_one_save_or_the_other_is_loaded(every: int | None, tmp_path: Path) -> None:
    in_a_small_process(all_with_each_fault, tmp_path, every)
