"""What every engine must do: bring states back bit for bit, leave what it says on disk, record what it did."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpointing.engines.base import FileState, SavedCheckpoint
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.engines.lazy.header import PADDING, entries_of, is_compressed, read_header
from restart_trace import clock
from tests.conformance.compare import differences
from tests.conformance.states import RARE_STATES, STATES, nests, of_every_dtype, tensor
from tests.conformance.subjects import Saved, Subject, file_states, sizes, traced

LAYER, MODEL, SHARD = (
    "layer_01-model_00-model_states.pt",
    "mp_rank_00_model_states.pt",
    "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
)
# Phases that the writer and the loader record around an engine
OF_THE_RUN = {
    "wait_previous", "make_directory", "collect", "tag_validation", "replicate", "library_call", "barrier", "commit",
    "remove", "discover", "redistribute",
}  # fmt: skip


def small_checkpoint() -> dict[str, Any]:
    """Three files as a rank of a training writes them, in miniature."""
    return {
        LAYER: {"weight": tensor(torch.bfloat16, 5, 7), "bias": tensor(torch.bfloat16, 3)},
        MODEL: {"iteration": 5, "args": STATES["classes of DeepSpeed's state"]()["args"]},
        SHARD: {"master": [tensor(torch.float32, 1001)], "step": torch.tensor(5.0), "rng": STATES["random states"]()},
    }


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back(subject: Subject, name: str, directory: Path) -> None:
    state = STATES[name]()
    saved = subject.save({SHARD: state}, directory)
    found = subject.load([SHARD], saved)
    assert list(found) == [SHARD]
    assert differences(found[SHARD], STATES[name]()) == []


@pytest.mark.parametrize("name", RARE_STATES)
def test_what_an_engine_cannot_keep_it_refuses_to_save(subject: Subject, name: str, directory: Path) -> None:
    """An exception when saving is an answer; another value when loading is none."""
    state = RARE_STATES[name]()
    try:
        saved = subject.save({SHARD: state}, directory)
    except Exception as exc:  # any kind: the trainer reports it and goes on
        assert str(exc).strip(), "the exception says nothing"
        return
    try:
        found = subject.load([SHARD], saved)
    except CheckpointDamagedError as exc:
        pytest.fail(f"saved without a word, and cannot be loaded: {exc}")
    assert differences(found[SHARD], state) == []


@pytest.mark.parametrize("examples", [12, pytest.param(200, marks=pytest.mark.nightly(minutes=4))])
def test_generated_states_come_back(subject: Subject, tmp_path_factory: pytest.TempPathFactory, examples: int) -> None:
    @settings(max_examples=examples, derandomize=True, database=None)
    @given(states=st.lists(nests(), min_size=1, max_size=3))
    def come_back(states: list[Any]) -> None:
        by_name = {f"layer_{i:02d}-model_00-model_states.pt": state for i, state in enumerate(states)}
        saved = subject.save(by_name, tmp_path_factory.mktemp("generated"))
        assert differences(subject.load(list(by_name), saved), by_name) == []

    come_back()


def test_loaded_tensors_can_be_written_to(subject: Subject, directory: Path) -> None:
    """Each of them its own: the trainer copies them, redistribution may change them in place."""
    state = {"a": torch.ones(7), "b": torch.ones(7), "c": torch.ones(3, dtype=torch.bfloat16)}
    saved = subject.save({SHARD: state}, directory)
    found = subject.load([SHARD], saved)[SHARD]
    found["a"].add_(1)
    assert torch.equal(found["b"], torch.ones(7)) and torch.equal(found["c"], torch.ones(3, dtype=torch.bfloat16))
    assert all(t.device.type == "cpu" and not t.requires_grad for t in found.values())
    again = subject.load([SHARD], saved)[SHARD]
    assert differences(again, state) == [] and torch.equal(found["a"], torch.full((7,), 2.0))


def test_saving_leaves_the_state_as_it_is(subject: Subject, directory: Path) -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    state = {"weight": weight, "view": weight.t(), "nested": {"step": [1]}}
    before = (weight.data_ptr(), weight.clone(), weight._version)
    subject.save({SHARD: state}, directory)
    assert state["weight"] is weight and list(state) == ["weight", "view", "nested"]
    assert (weight.data_ptr(), weight._version) == (before[0], before[2]) and torch.equal(weight, before[1])


# ---------------------------------------------------------------- files


def test_several_files_and_some_of_them_back(subject: Subject, directory: Path) -> None:
    states = small_checkpoint()
    saved = subject.save(states, directory)
    for wanted in ([SHARD], [MODEL, LAYER], [LAYER, MODEL, SHARD]):
        found = subject.load(wanted, saved)
        assert sorted(found) == sorted(wanted)
        assert differences([found[name] for name in wanted], [states[name] for name in wanted]) == []


def test_the_files_told_are_those_on_disk(subject: Subject, directory: Path) -> None:
    """Nothing else is left there: no temporary file, no lock."""
    saved = subject.save(small_checkpoint(), directory)
    assert {file.name: file.num_bytes for file in saved.files} == saved.on_disk()
    assert len(saved.manifest) == len(saved.files)
    for file in saved.files:
        algorithm, _, digest = file.checksum.partition(":")
        assert algorithm and digest and not Path(file.name).is_absolute() and ".." not in file.name
    for name in small_checkpoint():
        assert SavedCheckpoint(saved.directory, saved.manifest).holding(name), f"no file is said to hold {name}"
    told = {state for file in saved.files for state in file.states}
    assert told <= set(small_checkpoint())


def test_ranks_share_a_directory(subject: Subject, directory: Path) -> None:
    """Ranks of one checkpoint write side by side under the names that they are given, and never the same file."""
    ranks: list[Saved] = []
    for rank, name in enumerate((SHARD, SHARD.replace("mp_rank_00", "mp_rank_01"))):
        ranks.append(subject.save({name: {"rank": rank, "a": torch.full((9,), float(rank))}}, directory, rank=rank))
    names = [file.name for saved in ranks for file in saved.files]
    assert len(names) == len(set(names)) and set(names) == set(sizes(directory))
    whole = ranks[0].manifest | ranks[1].manifest
    for rank, name in enumerate((SHARD, SHARD.replace("mp_rank_00", "mp_rank_01"))):
        found = subject.load([name], ranks[0], manifest=whole, rank=1 - rank)  # another rank may read it, too
        assert differences(found[name], {"rank": rank, "a": torch.full((9,), float(rank))}) == []


def test_no_files_at_all(subject: Subject, directory: Path) -> None:
    """A rank may have nothing to save: with --no-save-optim, all but the first data-parallel replica."""
    saved = subject.save({}, directory)
    assert {file.name: file.num_bytes for file in saved.files} == saved.on_disk()
    assert not any(file.holds(name) for file in saved.files for name in (LAYER, MODEL, SHARD))
    assert (saved.traced.op.bytes, saved.traced.op.num_files) == (sum(saved.on_disk().values()), len(saved.files))


def test_another_object_reads_it(subject: Subject, directory: Path) -> None:
    saved = subject.save(small_checkpoint(), directory)
    reader = Subject(subject.name)
    try:
        assert differences(reader.load(list(small_checkpoint()), saved), small_checkpoint()) == []
    finally:
        reader.close()


# ---------------------------------------------------------------- records


@pytest.mark.parametrize("fsync", [True, False])
def test_what_is_recorded_of_a_save(subject: Subject, directory: Path, fsync: bool) -> None:
    states = small_checkpoint() | {"mp_rank_01_model_states.pt": of_every_dtype((257,))}
    saved = subject.save(states, directory, fsync=fsync)
    op, records = saved.traced.op, saved.traced.records
    op.end()
    on_disk = saved.on_disk()
    assert (op.bytes, op.num_files, op.durable) == (sum(on_disk.values()), len(on_disk), fsync)
    assert records.problems == []
    assert {r["phase"] for r in records.spans()}.isdisjoint(OF_THE_RUN)
    assert records.bytes("flush", "write") == sum(on_disk.values())
    assert bool(records.spans("flush", "fsync")) is fsync
    assert not any("error" in r for r in records.spans())
    assert all(0 <= r["duration_ns"] <= r["end_ns"] - r["start_ns"] for r in records.spans())
    assert all(r["start_ns"] >= op.start_ns for r in records.spans())
    named = {r["file"] for r in records.spans() if "file" in r}
    assert named <= set(on_disk) | set(states), "a span names a file that is not there"


def padding(saved: Saved) -> int:
    """Bytes of shared files that only align what comes next: no load needs them."""
    headers = [entries_of(read_header(saved.directory / file.name)) for file in saved.files if file.parts]
    return sum(entry["shape"][0] for header in headers for name, entry in header.items() if name.startswith(PADDING))


def read_again(saved: Saved) -> int:
    """The most of compressed files that is read more than once: small ones lie in the bytes in which the index is."""
    return sum(3 * file.num_bytes + (1 << 16) for file in saved.files if is_compressed(file.name))


def test_what_is_recorded_of_a_load(subject: Subject, directory: Path) -> None:
    states = small_checkpoint()
    saved = subject.save(states, directory)
    trace = traced("load")
    subject.engine().load(list(states), SavedCheckpoint(directory, saved.manifest), trace.op)
    trace.op.end()
    total = sum(saved.on_disk().values()) - padding(saved)
    most = total + read_again(saved)
    assert total <= (trace.op.bytes or 0) <= most and trace.op.num_files == len(saved.files)
    assert trace.records.problems == []
    assert {r["phase"] for r in trace.records.spans()}.isdisjoint(OF_THE_RUN)
    assert total <= trace.records.bytes("load", "read") <= most + padding(saved)
    subject.engine().load([LAYER], SavedCheckpoint(directory, saved.manifest), trace.op)
    assert total < (trace.op.bytes or 0) <= 2 * most, "what a second load reads is added"


def test_phases_of_a_save_account_for_the_time_it_blocks(
    subject: Subject, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a save large enough to be timed, in processor time, which other processes do not lengthen.

    What this thread does outside of the spans is compared with all that the process does meanwhile: the writers of some
    engines have begun then. That it does not wait outside of them: tests/dist/test_async_saves.py.
    """
    states = {SHARD: {f"master.{i}": tensor(torch.float32, 1 << 20, seed=i) for i in range(8)}}
    subject.save(states, directory)  # what is done once only: buffers, threads
    for module in [m for m in sys.modules.values() if getattr(m, "now_ns", None) is clock.now_ns]:
        monkeypatch.setattr(module, "now_ns", time.thread_time_ns)
    shares = []
    for attempt in range(5):
        where = directory.parent / f"timed_{attempt}"
        where.mkdir()
        engine = subject.engine()
        trace = traced("save")
        begun_ns = time.process_time_ns()
        pending = engine.begin_save([FileState(SHARD, states[SHARD])], where, trace.op)
        pending.release_state()
        blocked_ns = time.process_time_ns() - begun_ns
        trace.op.end()
        of_thread_ns = trace.records.all[-1]["end_ns"] - trace.op.start_ns
        in_spans_ns = sum(r["duration_ns"] for r in trace.records.spans() if r["blocking"])
        pending.wait()
        shares.append((of_thread_ns - in_spans_ns) / blocked_ns)
    assert statistics.median(shares) < 0.2, "so much of the time that the save blocks is in none of its spans"


def test_one_name_twice_is_refused_or_kept_apart(subject: Subject, directory: Path) -> None:
    """Two states under one name would be one of them lost."""
    twice = [FileState(LAYER, {"a": 1}), FileState(LAYER, {"a": 2})]
    with pytest.raises((OSError, ValueError)):
        subject.engine().begin_save(twice, directory, traced("save").op).wait()


def test_state_that_nobody_saved(subject: Subject, directory: Path) -> None:
    saved = subject.save({LAYER: {"a": torch.ones(2)}}, directory)
    with pytest.raises(CheckpointDamagedError, match=MODEL):
        subject.load([MODEL], saved)


def test_file_states_keep_their_order() -> None:
    assert [file.name for file in file_states(small_checkpoint())] == [LAYER, MODEL, SHARD]
