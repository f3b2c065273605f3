"""In-process restarts in the trainer: with which flags a run can have them."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from torch._C._distributed_c10d import HashStore

from megatron.checkpointing.agreement import CheckpointRejectedError, run_on_all_ranks
from megatron.checkpointing.engines.base import EngineOptions
from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointError
from megatron.checkpointing.engines.none.engine import NoneEngine
from megatron.checkpointing.load.memory import SameLayout, Source
from megatron.config import CheckpointConfig
from megatron.parallel import reconnecting
from megatron.parallel.control_plane import ControlPlane
from megatron.peers.client import Peer
from megatron.processes import in_process_restart
from megatron.training import in_process_restart as training
from megatron.training.checkpoints import CheckpointSaves
from megatron.training.in_process_restart import (
    drop_world,
    keep_engine,
    leave_between_layers,
    leave_checkpoints,
    refusal,
)
from megatron.training.trainer import is_its_own
from restart_trace.recorder import untraced_operation
from restart_trace.schema import PEER

SAVES = {"save": "run", "save_interval": 1}


@pytest.mark.parametrize(
    ("options", "compiles", "why"),
    [
        (SAVES | {"checkpoint_engine": "torch"}, False, None),
        ({}, False, None),
        (SAVES | {"checkpoint_engine": "dcp-process"}, False, None),
        ({"save": "s3://bucket/run", "save_interval": 1, "checkpoint_engine": "lazy"}, False, None),
        (
            SAVES | {"checkpoint_engine": "datastates"}, False,
            "--checkpoint-engine datastates with --in-process-restart: it needs a CUDA device, and ranks on CUDA",
        ),
        (
            {"load": "run", "checkpoint_engine": "theirs"}, False,
            "--checkpoint-engine theirs with --in-process-restart: an engine of another package, whose threads",
        ),
        ({}, True, "--torch-compile with --in-process-restart: not tried together; leave out --in-process-restart"),
    ],
)  # fmt: skip
def test_what_does_not_survive_its_start_is_refused(options: dict[str, Any], compiles: bool, why: str | None) -> None:
    found = refusal(CheckpointConfig(**options), compiles=compiles)
    assert found is None if why is None else found is not None and found.startswith(why)


def test_divided_weights_are_refused() -> None:
    found = refusal(CheckpointConfig(), compiles=False, zero_stage=3)
    assert found is not None and found.startswith("--zero-stage 3 with --in-process-restart: not tried together")


def test_what_half_a_step_has_left_in_buffers_of_recomputation_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --contigious-checkpointing: the next start would find no place in them for its last layers."""
    monkeypatch.setattr(checkpointing, "CONTIGUOUS_CHECKPOINTING", True)
    for name in ("contiguous_data_buffers", "contiguous_size_buffers", "data_offsets", "size_offsets"):
        monkeypatch.setattr(checkpointing, name, [1])
    drop_world()
    assert checkpointing.data_offsets == checkpointing.contiguous_data_buffers == []
    assert checkpointing.size_offsets == checkpointing.contiguous_size_buffers == []


def test_an_engine_that_was_kept_is_dropped() -> None:
    """Although the collector does not look through it any more."""
    optimizer: Any = DeepSpeedOptimizer.__new__(DeepSpeedOptimizer)
    optimizer.masters, optimizer.module = ["large"], SimpleNamespace(forward_funcs=[])
    nothing: Any = SimpleNamespace(communicators=SimpleNamespace(groups=[]))
    keep_engine(optimizer, nothing, nothing)
    drop_world()
    assert vars(optimizer) == {}


def test_a_rank_that_leaves_after_an_error_does_not_wait_for_what_others_remove() -> None:
    told: list[dict[str, bool]] = []
    saves: Any = object.__new__(CheckpointSaves)
    saves._background = SimpleNamespace(pending=None)
    saves._checkpointer = SimpleNamespace(finished=list, close=lambda **how: told.append(how))
    saves.drain_after_error()
    assert told == [{"after_error": True}]


def test_torchs_functions_are_its_own_again_where_a_profiled_step_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, linear = torch.nn.Linear(1, 1), torch.nn.functional.linear
    engine = SimpleNamespace(flops_profiler=FlopsProfiler(layer))
    kept: Any = SimpleNamespace(engine=engine, as_built=SimpleNamespace(restore=lambda: None))
    monkeypatch.setattr(training, "_kept", [kept])
    engine.flops_profiler.start_profile()
    assert torch.nn.functional.linear is not linear
    training.leave_world()
    assert torch.nn.functional.linear is linear


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the launcher has asked this rank to return."""
    event = threading.Event()
    monkeypatch.setattr(in_process_restart, "_here", [SimpleNamespace(_asked=event, _error_ns=None)])
    return event


def test_a_rank_that_is_asked_to_return_begins_no_exchange(asked: threading.Event) -> None:
    """What another rank has begun to send when connections end would be waited for without end."""
    begun: list[str] = []
    groups: Any = reconnecting.ReconnectingGroup
    inner = SimpleNamespace(allreduce=begun.append)
    group = SimpleNamespace(inner=inner, is_connected=True, used=lambda: begun.append("connected"))
    groups.allreduce(group, "before")
    asked.set()
    with pytest.raises(in_process_restart.AskedToReturnError, match="another rank has failed"):
        groups.allreduce(group, "after")
    assert begun == ["connected", "before"]


def test_a_rank_that_is_asked_to_return_has_no_error_of_its_own(asked: threading.Event) -> None:
    """Else three kills at one step would be the same error three times, which ends a run."""
    asked.set()
    with pytest.raises(in_process_restart.AskedToReturnError) as raised:
        in_process_restart.check_not_asked()
    assert not is_its_own(raised.value)


def test_a_load_that_a_rank_leaves_has_not_found_a_damaged_checkpoint(asked: threading.Event) -> None:
    """Else the ranks would agree to load the one before it."""
    asked.set()
    with pytest.raises(CheckpointError, match="another rank has failed") as raised:
        run_on_all_ranks(ControlPlane(0, 1), untraced_operation(), in_process_restart.check_not_asked)
    assert not isinstance(raised.value, CheckpointRejectedError)


def test_a_copy_whose_connection_was_shut_is_not_told_of_as_damaged(asked: threading.Event) -> None:
    def fetch_copy(*_: Any) -> Any:
        asked.set()
        raise CheckpointDamagedError("node1 (10.0.0.1:4) has ended the connection")

    told: list[Any] = []
    context: Any = SimpleNamespace(
        checkpoint_engine=SimpleNamespace(fetch_copy=fetch_copy),
        recorder=SimpleNamespace(event=lambda *what: told.append(what)), control=SimpleNamespace(rank=0),
    )  # fmt: skip
    peer, candidate = Peer("node1", "10.0.0.1", 4), SimpleNamespace(save="g1_1")
    sources = [Source(PEER, None, peer), Source(PEER, None, peer)]
    opened: Any = SameLayout(candidate=candidate, ctx=context, key=(), sources=sources)  # pyright: ignore[reportArgumentType]
    with pytest.raises(in_process_restart.AskedToReturnError):
        next(opened.copies(None, [], [], SimpleNamespace(label=lambda **_: None)))
    assert told == []


def test_a_step_ends_before_its_next_layer(asked: threading.Event) -> None:
    """Forward as well as backward; and does what it did before while nothing is asked."""
    ran: list[str] = []

    class Layer(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            ran.append("forward")
            x.register_hook(lambda _: ran.append("backward"))
            return super().forward(x), None

    layers = [Layer(2, 2), lambda out: out[0], Layer(2, 2), lambda out: out[0]]
    leave_between_layers(SimpleNamespace(forward_funcs=layers))

    def step() -> None:
        x = torch.ones(2, requires_grad=True) * 1
        for layer in layers:
            x = layer(x)
        (x.sum()).backward()

    step()
    assert ran == ["forward", "forward", "backward", "backward"]
    ran.clear()
    layers[3] = lambda out: (out[0], asked.set())[0]  # after the last forward
    with pytest.raises(in_process_restart.AskedToReturnError, match="another rank has failed"):
        step()
    assert ran == ["forward", "forward"]
    with pytest.raises(in_process_restart.AskedToReturnError, match="another rank has failed"):
        step()
    assert ran == ["forward", "forward"]


def test_an_engine_that_is_kept_leaves_between_layers(asked: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_kept", [])
    monkeypatch.setattr(gc, "freeze", lambda: None)
    layer = torch.nn.Linear(1, 1)
    engine = SimpleNamespace(module=SimpleNamespace(forward_funcs=[layer]), optimizer=None)
    keep_engine(engine, None, SimpleNamespace(communicators=SimpleNamespace(groups=[])))  # pyright: ignore[reportArgumentType]
    asked.set()
    with pytest.raises(in_process_restart.AskedToReturnError):
        layer(torch.ones(1))


class AtRest(NoneEngine):
    """An engine whose process is at rest, or is not."""

    serves, closed = True, 0

    def leave(self) -> bool:
        return self.serves

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> AtRest:
    """What a start has left for the next."""
    engine = AtRest(EngineOptions())
    monkeypatch.setattr(training, "_checkpoint_engines", [engine])
    return engine


def test_the_engine_of_the_start_before_serves_one_with_the_same_options(kept: AtRest) -> None:
    for _ in range(2):  # a start that leaves nothing may have come between
        assert training.checkpoint_engine("none", EngineOptions()) is kept
    assert training.checkpoint_engine("none", EngineOptions(fsync=False)) is not kept and kept.closed == 1
    assert training.checkpoint_engine("none", EngineOptions()) is not kept


@pytest.mark.parametrize(("returns", "serves"), [(True, True), (True, False), (False, True)])
def test_an_engine_is_closed_where_it_serves_no_other_start(
    kept: AtRest, monkeypatch: pytest.MonkeyPatch, returns: bool, serves: bool
) -> None:
    monkeypatch.setattr(in_process_restart, "_here", [SimpleNamespace()] if returns else [])
    engine, ended = AtRest(EngineOptions()), []
    engine.serves = serves
    checkpointer: Any = SimpleNamespace(
        context=SimpleNamespace(checkpoint_engine=engine),
        leave=lambda: ended.append("left") or engine.leave(),
        close=lambda after_error: ended.append("closed"),
    )
    leave_checkpoints(checkpointer)
    assert ended == ["left" if returns else "closed"]
    if returns:
        assert (training.checkpoint_engine("none", EngineOptions()) is engine) == serves


def test_it_is_known_whether_an_exchange_is_under_way() -> None:
    store, groups = HashStore(), []

    def connected(rank: int) -> Any:
        options = SimpleNamespace(group_rank=rank, group_size=2, group_id="two", timeout=timedelta(seconds=60))
        group = reconnecting.ReconnectingGroup(options)
        group.connect(store)
        return group

    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(connected, range(2)))
    sums = [torch.ones(1), torch.ones(1)]
    assert not reconnecting._exchanges()
    first = groups[0].allreduce([sums[0]])
    assert reconnecting._exchanges()
    second = groups[1].allreduce([sums[1]])
    first.wait()
    second.wait()
    assert not reconnecting._exchanges() and [int(one) for one in sums] == [2, 2]
    for group in groups:
        group.disconnect()
        group.allreduce([sums[0]]).wait()  # of a group that is not connected
    assert not reconnecting._exchanges()
