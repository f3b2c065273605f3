"""Saves in the background: what training may do meanwhile, and what must not show in the checkpoint.

The contract: from the return of begin_save to the return of release_state training reads the state and changes
nothing of it; after release_state it may change all of it. One save is pending at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.engines.errors import CheckpointSaveError
from tests.conformance.compare import differences
from tests.conformance.states import STATES, tensor
from tests.conformance.subjects import SHARED, WAIT_S, Saved, Subject, file_states, traced, wait_in_thread

MODEL, SHARD = "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
MIB = 1 << 20


def train_on(state: dict[str, Any]) -> None:
    """Change everything in place, as an optimizer step and the loop around it do."""
    for tensor_ in _tensors(state):
        torch.empty(0, dtype=torch.uint8).set_(tensor_.untyped_storage()).fill_(0xA5)
    state["step"] += 1
    state["history"].append("after")
    state["nested"]["lr"] = -1.0
    state["new"] = "after"


def _tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    items = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return [found for item in items for found in _tensors(item)]


def changing_state(*megabytes: int) -> dict[str, Any]:
    """Small tensors and one of each size in MiB, with values beside them."""
    return {
        "step": 5,
        "history": ["before"],
        "nested": {"lr": 0.5, "moments": (torch.arange(100.0), tensor(torch.bfloat16, 4097))},
        "large": [torch.arange(size * MIB // 4, dtype=torch.float32) for size in megabytes],
        "small": [torch.full((11,), float(i)) for i in range(50)],
    }


def save_while_training(subject: Subject, states: dict[str, Any], directory: Path, **options: Any) -> Saved:
    """Begin a save, release it, change everything, and only then wait for its end."""
    trace = traced("save")
    pending = subject.engine(**options).begin_save(file_states(states), directory, trace.op)
    thread, outcome = wait_in_thread(pending)
    pending.release_state()
    for state in states.values():
        train_on(state)
    thread.join(WAIT_S)
    assert not thread.is_alive(), "wait does not return"
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return Saved(directory, outcome[0], trace)


def test_training_on_does_not_show(subject: Subject, directory: Path) -> None:
    states = {MODEL: changing_state(), SHARD: changing_state(8)}
    saved = save_while_training(subject, states, directory)
    assert differences(subject.load([MODEL, SHARD], saved), {MODEL: changing_state(), SHARD: changing_state(8)}) == []


def test_training_on_does_not_show_in_large_tensors(subject: Subject, directory: Path) -> None:
    """Libraries that copy small tensors may keep references to those of 128 MiB and more."""
    saved = save_while_training(subject, {SHARD: changing_state(132, 1)}, directory)
    assert differences(subject.load([SHARD], saved)[SHARD], changing_state(132, 1)) == []


def test_host_cache_smaller_than_the_state(subject: Subject, directory: Path) -> None:
    """Either what does not fit is waited for, or the option does not concern the engine."""
    sizes = (6, 5, 6, 3, 6, 6)
    options = {"host_cache_bytes": 8 * MIB, "io_block_bytes": MIB, "io_threads": 2}
    saved = save_while_training(subject, {SHARD: changing_state(*sizes)}, directory, **options)
    assert differences(subject.load([SHARD], saved)[SHARD], changing_state(*sizes)) == []


def test_views_of_a_storage_that_changes(subject: Subject, directory: Path) -> None:
    base = torch.arange(1000.0)
    state = {"step": 1, "history": [], "nested": {}, "whole": base, "part": base[10:20], "t": base.view(10, 100).t()}
    expected = {**state, "whole": base.clone(), "part": base[10:20].clone(), "t": base.view(10, 100).t().clone()}
    saved = save_while_training(subject, {SHARD: state}, directory)
    assert differences(subject.load([SHARD], saved)[SHARD], expected | {"history": [], "nested": {}}) == []


def test_a_save_ends_though_no_optimizer_step_follows(subject: Subject, directory: Path) -> None:
    """As the last save of a training: nobody calls release_state before it is waited for."""
    trace = traced("save")
    pending = subject.engine().begin_save(file_states({SHARD: changing_state(2)}), directory, trace.op)
    thread, outcome = wait_in_thread(pending)
    thread.join(WAIT_S)
    assert not thread.is_alive(), "wait does not return before release_state was called"
    pending.release_state()  # late, and twice: nothing happens
    pending.release_state()
    saved = Saved(directory, outcome[0], trace)
    assert differences(subject.load([SHARD], saved)[SHARD], changing_state(2)) == []


def test_each_save_right_after_the_last(subject: Subject, tmp_path: Path) -> None:
    """The same live tensors, changed between the saves; buffers of one are used again by the next."""
    live = {"weight": torch.zeros(300_000), "small": torch.zeros(3), "step": 0}
    saves = []
    for step in range(4):
        live["step"] = step
        for name in ("weight", "small"):
            live[name].add_(1)
        saves.append(subject.save({SHARD: live}, tmp_path / str(step)))
    for step, saved in enumerate(saves):
        expected = {"weight": torch.full((300_000,), step + 1.0), "small": torch.full((3,), step + 1.0), "step": step}
        assert differences(subject.load([SHARD], saved)[SHARD], expected) == []


def test_loading_between_saves(subject: Subject, tmp_path: Path) -> None:
    """What was loaded first stays what it is while the engine goes on: its buffers are not lent out twice."""
    first = subject.save({SHARD: STATES["every dtype"]()}, tmp_path / "first")
    loaded = subject.load([SHARD], first)
    second = subject.save({SHARD: {"other": torch.full((100_000,), 3.0)}}, tmp_path / "second")
    subject.load([SHARD], second)
    subject.load([SHARD], first)
    assert differences(loaded[SHARD], STATES["every dtype"]()) == []


def test_only_an_asynchronous_engine_writes_behind_the_back_of_training(subject: Subject, directory: Path) -> None:
    trace = traced("save")
    engine = subject.engine()
    pending = engine.begin_save(file_states({SHARD: changing_state(4)}), directory, trace.op)
    pending.release_state()
    files = pending.wait()
    writes = [span for span in trace.records.spans("flush", "write") if span.get("bytes")]
    assert {span["blocking"] for span in writes} == ({False} if engine.asynchronous else {True})
    assert sum(span["bytes"] for span in writes) == sum(file.num_bytes for file in files)


def test_a_save_that_is_given_up_fails_with_the_reason_and_the_next_is_whole(subject: Subject, directory: Path) -> None:
    """Engines may only go on with it where they cannot end early: those that are done by then or have a process."""
    states = {MODEL: {"step": 1}, SHARD: changing_state(1, 4)}
    given_up, why = directory / "given_up", "another rank has failed"
    given_up.mkdir()
    pending = subject.engine().begin_save(file_states(states), given_up, traced("save").op)
    pending.give_up(why)
    pending.release_state()
    try:
        pending.wait()
    except CheckpointSaveError as error:
        assert str(error) == why
    else:
        assert subject.name not in ("lazy", "memory", SHARED, "torchsnapshot")
    pending.give_up(why)  # without an effect, now
    saved = subject.save(states, directory / "next")
    assert differences(subject.load([SHARD], saved)[SHARD], changing_state(1, 4)) == []
