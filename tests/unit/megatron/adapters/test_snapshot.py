"""Which live tensors a save reads later, and what becomes of it when they change."""

from __future__ import annotations

import contextlib
import resource
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from megatron.adapters import lazy_files
from megatron.adapters.snapshot import LiveSave, Snapshot, Trained
from megatron.checkpointing.engines.errors import CheckpointSaveError
from megatron.checkpointing.engines.lazy.writer import LazySave
from tests.dist.harness import Zygote


class Training:
    """A layer with a buffer, and an optimizer that has stepped `steps` times."""

    def __init__(self, steps: int = 1) -> None:
        self.weight = torch.nn.Parameter(torch.arange(1000.0))
        self.buffer = torch.arange(1000.0)
        self.optimizer = torch.optim.Adam([self.weight], lr=0.1)
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.weight.grad = torch.ones_like(self.weight)
        self.optimizer.step()

    @property
    def moment(self) -> torch.Tensor:
        return self.optimizer.state[self.weight]["exp_avg"]


def is_deferred(tensor: torch.Tensor, snapshot: Snapshot) -> bool:
    return snapshot.take(tensor, "it").data_ptr() == tensor.data_ptr()


def test_only_what_an_optimizer_holds_that_has_stepped_is_read_later() -> None:
    training, other = Training(), Training(steps=0)
    snapshot = Snapshot("lazy")
    assert is_deferred(training.weight, snapshot) and is_deferred(training.moment, snapshot)
    assert is_deferred(training.weight[10:20], snapshot)
    assert not is_deferred(training.buffer, snapshot)
    assert not is_deferred(other.weight, snapshot)
    assert not is_deferred(training.weight, Snapshot("copy"))
    training.optimizer.param_groups[0]["params"] = []  # as between the steps of DeepSpeed's ZeRO-3
    assert is_deferred(training.weight, Snapshot("lazy"))


def test_parameters_that_follow_an_optimizer_are_read_later_once_it_has_stepped() -> None:
    follower = torch.nn.Parameter(torch.zeros(3))
    training, fresh = Training(), Training(steps=0)
    assert is_deferred(follower, Snapshot("lazy", Trained(training.optimizer, [follower])))
    assert not is_deferred(follower, Snapshot("lazy", Trained(fresh.optimizer, [follower])))


@pytest.mark.parametrize("begun", [True, False], ids=["begun before the step", "begun after the step"])
def test_a_step_ends_the_snapshot(begun: bool, tmp_path: Path) -> None:
    training = Training()
    snapshot = Snapshot("lazy")
    tensors = {"weight": snapshot.take(training.weight, "weight"), "moment": snapshot.take(training.moment, "moment")}
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    live: LiveSave[LazySave] = LiveSave(snapshot)

    def begin() -> LazySave:
        return live.begin(lambda: lazy_files.begin(tmp_path / "file", tensors, lazy_files.options()))

    save = begin() if begun else None
    training.step()
    save = begin() if save is None else save
    (saved,) = save.wait()
    live.check()
    found = lazy_files.read(tmp_path / "file", saved, None, {}, lazy_files.options())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(training.weight, expected["weight"])


@pytest.mark.parametrize("released", [True, False], ids=["before a step", "before the end of the file"])
def test_a_change_without_an_optimizer_fails_the_save(released: bool) -> None:
    training = Training()
    snapshot = Snapshot("lazy")
    snapshot.take(training.weight, "model.weight")
    live: LiveSave[LazySave] = LiveSave(snapshot)
    with torch.no_grad():
        training.weight.mul_(0.5)
    if released:
        training.step()
    with pytest.raises(
        CheckpointSaveError, match='^model.weight was changed during the save, .* choose snapshot "copy"'
    ):
        live.check()


@pytest.mark.parametrize(
    "shape",
    [(), (1,), (0, 5), (63,), (65,), (1000,), (3, 700), (64, 64), (2, 3, 5, 7, 11)],
    ids=lambda shape: str(shape),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("released", [True, False], ids=["before a step", "before the end of the file"])
def test_a_change_that_torch_does_not_count_is_found(
    shape: tuple[int, ...], dtype: torch.dtype, released: bool
) -> None:
    """As of a parameter's `.data`; and not a number is what it was."""
    weight = torch.nn.Parameter(
        torch.full(shape[::-1], float("nan"), dtype=dtype).permute(tuple(range(len(shape)))[::-1])
    )
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.step()
    for changes in (False, True):
        snapshot = Snapshot("lazy")
        snapshot.take(weight, "weight")
        live: LiveSave[LazySave] = LiveSave(snapshot)
        if changes:
            weight.data.fill_(1.0)
        if released:
            optimizer.step()
        if changes and weight.numel() > 0:
            with pytest.raises(CheckpointSaveError, match="^weight was changed during the save"):
                live.check()
        else:
            live.check()


LARGE = 16 * 2**20  # elements, in 64 MiB


@contextlib.contextmanager
def no_room_for_a_copy() -> Iterator[None]:
    """In a process of its own: what tests before have left and now give back would be room enough."""
    used = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 32 * 2**20, hard))
    try:
        with pytest.raises(RuntimeError, match="allocate"):
            torch.ones(LARGE)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def take_without_a_copy() -> None:
    weight = torch.nn.Parameter(torch.zeros(LARGE))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.step()
    with no_room_for_a_copy():
        snapshot = Snapshot("lazy")
        for tensor in (weight, weight.view(4096, 4096).t(), weight.view(256, 256, 256)):
            snapshot.take(tensor, "weight")
        assert snapshot.changed() is None


@pytest.mark.parametrize("kind", ["sparse", "quantized", "wrapper", "expanded"])
def test_a_tensor_of_another_kind_is_copied_at_once_and_in_nobodys_way(kind: str) -> None:
    """As in the state of optimizers of 8 bits."""
    made = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8),
        "wrapper": lambda: TwoTensor(torch.ones(3), torch.ones(3)),
        "expanded": lambda: torch.ones(1).expand(1000),
    }
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.step()
    state = made[kind]()
    optimizer.state[weight]["x"] = state
    snapshot = Snapshot("lazy")
    kept, parameter = snapshot.take(state, "x"), snapshot.take(weight, "weight")
    assert parameter.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()  # which is read later
    assert snapshot.changed() is None
    before = state.to_dense() if kind == "sparse" else state.dequantize() if kind == "quantized" else state
    after = kept.to_dense() if kind == "sparse" else kept.dequantize() if kind == "quantized" else kept
    assert type(kept) is type(state) and torch.equal(before, after)
    snapshot.copy_deferred()


@pytest.mark.slow
def test_few_elements_are_compared_and_none_is_copied_whole(zygote: Zygote, tmp_path: Path) -> None:
    zygote.call(take_without_a_copy, tmp_path)


def test_a_change_after_the_step_is_none_of_the_saves_business() -> None:
    training = Training()
    snapshot = Snapshot("lazy")
    snapshot.take(training.weight, "weight")
    live: LiveSave[LazySave] = LiveSave(snapshot)
    training.step()
    live.check()


def step_without_room_for_a_copy() -> None:
    weight = torch.nn.Parameter(torch.zeros(LARGE))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.step()
    snapshot = Snapshot("lazy")
    snapshot.take(weight, "weight")
    live: LiveSave[LazySave] = LiveSave(snapshot)
    with no_room_for_a_copy():
        optimizer.step()
    optimizer.step()
    assert weight[0].item() == -3
    with pytest.raises(CheckpointSaveError, match="could not be copied before the next step: .*allocate"):
        live.begin(lambda: pytest.fail("begun with tensors that have changed"))
    with pytest.raises(CheckpointSaveError, match="could not be copied before the next step: .*allocate"):
        live.check()


@pytest.mark.slow
def test_a_save_whose_tensors_cannot_be_copied_fails_and_the_training_goes_on(zygote: Zygote, tmp_path: Path) -> None:
    zygote.call(step_without_room_for_a_copy, tmp_path)


def test_no_optimizer_steps_while_another_thread_copies_for_a_save() -> None:
    one, other = Training(), Training()
    releasing, may_return = threading.Event(), threading.Event()

    class Slow:
        def release_state(self) -> None:
            releasing.set()
            assert may_return.wait(300)

    live: LiveSave[Slow] = LiveSave(Snapshot("lazy"))
    live.begin(Slow)
    before = other.weight.clone()
    threads = [threading.Thread(target=training.step) for training in (one, other)]
    threads[0].start()
    assert releasing.wait(300)
    threads[1].start()
    threads[1].join(0.3)  # enough for a step that does not wait
    unchanged = torch.equal(other.weight, before)
    may_return.set()
    for thread in threads:
        thread.join()
    assert unchanged and not torch.equal(other.weight, before)


def test_a_save_that_has_ended_keeps_no_tensor_and_minds_no_change() -> None:
    training = Training()
    snapshot = Snapshot("lazy")
    tensor = weakref.ref(snapshot.take(training.weight, "weight"))
    live: LiveSave[LazySave] = LiveSave(snapshot)
    live.check()
    assert tensor() is None
    with torch.no_grad():
        training.weight.mul_(0.5)
    training.step()
    live.check()
