"""Saves in memory as candidates of a load: which of them count, when each is tried, and what is said of the others.

Ranks are threads of this process, over real agreements, with slots as their launcher holds them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron.checkpointing.context import RunContext
from megatron.checkpointing.engines.base import EngineOptions, FileState, MemoryFiles, SavedFile, first_undamaged
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.engines.registry import create_engine
from megatron.checkpointing.load.memory import MemoryCandidate, MemorySource, OtherLayout, SameLayout, Source
from megatron.checkpointing.load.newest import merged
from megatron.checkpointing.load.storage import OpenedCheckpoint
from megatron.checkpointing.store.manifest import Manifest
from megatron.checkpointing.store.naming import RankPlace
from megatron.checkpointing.store.search import Candidate
from megatron.config import CheckpointConfig, Config, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megatron.net.secret import VARIABLE as SECRET_VARIABLE
from megatron.parallel.control_plane import ControlPlane
from megatron.parallel.topology import Layout
from megatron.peers.client import VARIABLE as PEER_VARIABLE
from megatron.peers.client import own_peer
from megatron.peers.memory_slots import VARIABLE, held_slots, hold_slots, let_go_of_slots
from megatron.peers.process import CopyProcess
from megatron.peers.traffic import VARIABLE as STEP_TIMES
from megatron.peers.wire import key_of
from restart_trace.cycles import LAUNCH_ID_VARIABLE
from restart_trace.recorder import untraced_operation, untraced_recorder
from tests.unit.hostile import HANGS_S
from tests.unit.megatron.parallel.test_tree import on_all, trees
from tests.unit.megatron.peers.test_copies import Host, liar, message
from tests.unit.trace_helpers import SECRET

MODEL = {"hidden_size": 8}


def config_of(directory: Path, **flags: Any) -> Config:
    where = str(directory)
    options: dict[str, Any] = {"save": where, "load": where, "save_interval": 1, "checkpoint_engine": "memory"}
    return Config(
        model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8),
        parallel=ParallelConfig(),
        training=TrainingConfig(micro_batch_size=1, train_iters=10),
        optimizer=OptimizerConfig(lr=1e-3),
        checkpoint=CheckpointConfig(**options | flags),
    )


def tried(opened: OpenedCheckpoint) -> str:
    """Where a checkpoint is, and its step: m for memory, s for storage."""
    return f"{'s' if opened.memory_save is None else 'm'}{opened.candidate.step}"


@dataclass
class Job:
    """The ranks of one host: `layout.dp` replicas, each with an engine of its own."""

    directory: Path
    layout: Layout
    contexts: list[RunContext]

    def save(self, step: int, name: str | None = None, ranks: Sequence[int] | None = None, **record: Any) -> None:
        """Seal a slot of each of these ranks, all by default. `record`: what it tells besides, or instead."""
        for rank in range(self.layout.world_size) if ranks is None else ranks:
            told = {
                "save": name or f"save_{step}",
                "tag": f"global_step{step}",
                "step": step,
                "directory": os.path.realpath(self.directory),
                "layout": self.layout.as_dict(),
                "place": self.layout.coordinates(rank)._asdict(),
                "model": MODEL,
                "extra": {"hashes.json": json.dumps({"of": rank})},
            }
            state = {"who": torch.tensor([rank, step])}
            engine = self.contexts[rank].checkpoint_engine
            pending = engine.begin_memory_save([FileState("f", state)], told | record, None, untraced_operation())
            pending.release_state()
            pending.wait()
            engine.settle()

    def change(self, **of_context: Any) -> None:
        self.contexts = [replace(context, **of_context) for context in self.contexts]

    def candidates(self, stored: Sequence[int] = (), ranks: int | None = None) -> list[list[OpenedCheckpoint]]:
        """What each rank is given, with checkpoints of these steps on storage."""
        found = [Candidate(self.directory / f"global_step{s}", f"global_step{s}", s, None) for s in stored]
        number = self.layout.world_size if ranks is None else ranks

        def load(rank: int, tree: Any) -> list[OpenedCheckpoint]:
            ctx = replace(self.contexts[rank], control=ControlPlane(rank, number, tree))
            memory, on_storage, op = MemorySource(ctx), iter(found), untraced_operation()
            kept, _ = memory.candidates(op)
            return [memory.open(op) if its else OpenedCheckpoint(next(on_storage)) for its in merged(kept, stored)]

        with trees(["host"] * number) as connected:
            by_rank = on_all(connected, load)
        assert all(list(map(tried, mine)) == list(map(tried, by_rank[0])) for mine in by_rank), "ranks differ"
        return by_rank

    def order(self, stored: Sequence[int] = ()) -> list[str]:
        return list(map(tried, self.candidates(stored)[0]))


def state_of(job: Job, rank: int, opened: SameLayout) -> dict[str, Any]:
    """What a rank loads of a save in memory."""
    engine, op = job.contexts[rank].checkpoint_engine, untraced_operation()
    return first_undamaged(opened.copies(engine, ["f"], [], op), lambda found: engine.load(["f"], found, op))["f"]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Job]]:
    """Makes a job of so many replicas."""
    monkeypatch.delenv(VARIABLE, raising=False)
    made: list[Job] = []

    def make(replicas: int = 2) -> Job:
        hold_slots(replicas)
        layout = Layout(1, 1, replicas)
        contexts = [
            RunContext(
                config=config_of(tmp_path),
                place=RankPlace(layout, layout.coordinates(rank), "fp32"),
                vocab_size=8,
                padded_vocab_size=8,
                control=ControlPlane(0, 1),
                recorder=untraced_recorder(),
                checkpoint_engine=create_engine("memory", EngineOptions(fsync=False, rank=rank, local_rank=rank)),
                follows_itself=True,
            )
            for rank in range(replicas)
        ]
        made.append(Job(tmp_path, layout, contexts))
        return made[-1]

    yield make
    for one in made:
        for context in one.contexts:
            context.checkpoint_engine.close()
    let_go_of_slots()


@pytest.mark.parametrize(
    ("kept", "stored", "expected"),
    [
        ([], [5, 3], ["s5", "s3"]),
        ([2], [5, 3], ["s5", "s3", "m2"]),
        ([8, 7], [5], ["m8", "m7", "s5"]),
        ([10, 9], [10, 5], ["m10", "s10", "m9", "s5"]),
        ([5, 5], [5], ["m5", "m5", "s5"]),
        ([3], [], ["m3"]),
        ([8], [5, 20], ["m8", "s5", "s20"]),  # the run went back: step 20 was committed before step 5
    ],
)
def test_memory_comes_before_storage_of_the_same_step_and_after_newer_storage(
    kept: list[int], stored: list[int], expected: list[str]
) -> None:
    in_memory, on_storage = iter(kept), iter(stored)
    order = merged(kept, stored)
    assert [f"m{next(in_memory)}" if its else f"s{next(on_storage)}" for its in order] == expected


def test_each_rank_gets_its_own_part_of_a_save_that_all_have(job: Callable[[int], Job]) -> None:
    mine = job(2)
    mine.save(6)
    mine.save(7)
    by_rank = mine.candidates(stored=[5, 3])
    assert [tried(candidate) for candidate in by_rank[0]] == ["m7", "m6", "s5", "s3"]
    for rank, found in enumerate(by_rank):
        newest = found[0]
        assert isinstance(newest, SameLayout)
        assert state_of(mine, rank, newest)["who"].tolist() == [rank, 7]
        directory = newest.used[0].checkpoint.directory
        manifest = Manifest("global_step7", 7, "memory", mine.layout.as_dict(), MODEL, {})
        assert newest.candidate == MemoryCandidate(directory, "global_step7", 7, manifest, "save_7")
        assert "slot" in newest.candidate.place
        assert newest.tensor_hashes("hashes.json") == {"of": rank}
        with pytest.raises(CheckpointDamagedError, match=r"slot .*other\.json is not there; --verify-restored-state"):
            newest.tensor_hashes("other.json")
        assert found[2].candidate == Candidate(mine.directory / "global_step5", "global_step5", 5, None)


def test_a_save_that_a_rank_lacks_is_passed_over_and_the_rank_named(
    job: Callable[[int], Job], caplog: pytest.LogCaptureFixture
) -> None:
    """As after a kill: the ranks were done with it at different times."""
    mine = job(2)
    mine.save(6)
    mine.save(7, ranks=[0])
    with caplog.at_level(logging.INFO):
        assert mine.order(stored=[5]) == ["m6", "s5"]
    told = "iteration 7 is incomplete in host memory of 1 of 2 ranks: rank 1 {'tp': 0, 'pp': 0, 'dp': 1}"
    assert [record.message for record in caplog.records] == [told]


def test_of_many_ranks_eight_are_named(job: Callable[[int], Job], caplog: pytest.LogCaptureFixture) -> None:
    mine = job(10)
    mine.save(3, ranks=[0])
    with caplog.at_level(logging.INFO):
        assert mine.order(stored=[2]) == ["s2"]
    (record,) = caplog.records
    assert record.message.startswith("iteration 3 is incomplete in host memory of 9 of 10 ranks: rank 1 ")
    assert "rank 8 " in record.message and "rank 9" not in record.message and record.message.endswith(", ...")


def test_nothing_is_said_where_nothing_is_missing(job: Callable[[int], Job], caplog: pytest.LogCaptureFixture) -> None:
    mine = job(2)
    with caplog.at_level(logging.INFO):
        assert mine.order(stored=[5]) == ["s5"]
        mine.save(6)
        assert mine.order(stored=[5]) == ["m6", "s5"]
    assert caplog.records == []


def test_saves_of_one_step_count_as_one_only_if_they_are_one(
    job: Callable[[int], Job], caplog: pytest.LogCaptureFixture
) -> None:
    """The same iteration of another course of training, which was trained again after a restart, is another state."""
    mine = job(2)
    mine.save(6, name="first", ranks=[0])
    mine.save(6, name="second", ranks=[1])
    with caplog.at_level(logging.INFO):
        assert mine.order(stored=[5]) == ["s5"]
    told = caplog.records[0].message
    assert told == "iteration 6 is incomplete in host memory of 1 of 2 ranks: rank 1 {'tp': 0, 'pp': 0, 'dp': 1}"


def test_of_two_courses_the_one_that_more_ranks_have_is_told_of(
    job: Callable[[int], Job], caplog: pytest.LogCaptureFixture
) -> None:
    mine = job(3)
    mine.save(6, name="a", ranks=[0])
    mine.save(6, name="b", ranks=[1, 2])
    with caplog.at_level(logging.INFO):
        assert mine.order(stored=[5]) == ["s5"]
    told = "iteration 6 is incomplete in host memory of 1 of 3 ranks: rank 0 {'tp': 0, 'pp': 0, 'dp': 0}"
    assert [record.message for record in caplog.records] == [told]


def test_two_courses_of_one_step_are_tried_in_the_same_order_on_all_ranks(job: Callable[[int], Job]) -> None:
    mine = job(2)
    for name, ranks in (("b", [0]), ("a", [0, 1]), ("b", [1])):
        mine.save(6, name=name, ranks=ranks)
    found = mine.candidates()
    assert [[opened.memory_save for opened in of_rank] for of_rank in found] == [["a", "b"]] * 2


@pytest.mark.parametrize(
    "record",
    [{"layout": {"tp": 2, "pp": 1, "dp": 1}}, {"place": {"tp": 0, "pp": 0, "dp": 7}}, {"directory": "/somewhere/else"}],
)
def test_what_was_saved_for_another_layout_place_or_directory_is_no_choice(
    job: Callable[[int], Job], record: Mapping[str, Any]
) -> None:
    mine = job(2)
    mine.save(6)
    mine.save(7, **record)
    assert mine.order() == ["m6"]


def test_it_may_lie_in_the_slot_of_another_rank(job: Callable[[int], Job]) -> None:
    """Coordinates say whose it is, not the number of a rank on its host."""
    mine = job(2)
    mine.save(6)
    first, second = mine.contexts
    mine.contexts = [
        replace(first, checkpoint_engine=second.checkpoint_engine),
        replace(second, checkpoint_engine=first.checkpoint_engine),
    ]
    for rank, (candidate,) in enumerate(mine.candidates()):
        assert isinstance(candidate, SameLayout)
        assert state_of(mine, rank, candidate)["who"].tolist() == [rank, 6]


def test_a_torn_slot_holds_nothing(job: Callable[[int], Job]) -> None:
    mine = job(2)
    mine.save(6)
    mine.save(7)
    held = held_slots()
    assert held is not None
    (newest,) = [slot for slot in held[1] if (slot.record() or {}).get("step") == 7]
    os.ftruncate(newest.record_file, os.fstat(newest.record_file).st_size - 1)
    assert mine.order(stored=[5]) == ["m6", "s5"]


def test_saves_after_which_another_launch_has_saved_are_forgotten(job: Callable[[int], Job]) -> None:
    mine = job(2)
    mine.save(6)
    mine.change(follows_itself=False)
    assert mine.order(stored=[9, 8]) == ["s9", "s8"]
    mine.change(follows_itself=True)
    assert mine.order(stored=[9, 8]) == ["s9", "s8"]


@pytest.mark.parametrize(
    "flags",
    [
        {"load": "/another/directory"},
        {"load": None},
        {"save": None, "save_interval": None},
        {"load_tag": "global_step5"},
        {"finetune": True},
        {"reset_iteration": True},
    ],
)
def test_a_load_that_is_not_to_go_on_leaves_memory_alone(job: Callable[[int], Job], flags: dict[str, Any]) -> None:
    mine = job(2)
    mine.save(6)
    usual = mine.contexts[0].config
    mine.change(config=config_of(mine.directory, **flags))
    assert mine.order(stored=[5]) == ["s5"]
    mine.change(config=usual)
    assert mine.order(stored=[5]) == ["m6", "s5"]


def test_a_link_to_the_directory_is_the_directory(job: Callable[[int], Job], tmp_path: Path) -> None:
    mine = job(2)
    mine.save(6)
    link = tmp_path / "link"
    link.symlink_to(mine.directory)
    mine.change(config=config_of(mine.directory, load=str(link)))
    assert mine.order() == ["m6"]


def test_an_engine_that_keeps_nothing_has_storage_only(job: Callable[[int], Job]) -> None:
    mine = job(2)
    mine.save(6)
    usual = [context.checkpoint_engine for context in mine.contexts]
    mine.change(checkpoint_engine=create_engine("torch", EngineOptions()))
    assert mine.order(stored=[5]) == ["s5"]
    mine.contexts = [replace(c, checkpoint_engine=e) for c, e in zip(mine.contexts, usual, strict=True)]


class Held(NamedTuple):
    """Two hosts of a launch, each with a copy of iteration 6 of one rank; `context` is of a rank on neither."""

    context: RunContext
    hosts: tuple[Host, Host]


@pytest.fixture
def held_twice(job: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    monkeypatch.setenv(LAUNCH_ID_VARIABLE, "launch0")
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    monkeypatch.delenv(PEER_VARIABLE, raising=False)
    mine = job(1)
    mine.save(6)
    (slots,) = held_slots() or [[]]
    (saved,) = [slot for slot in slots if slot.record() is not None]
    of_job, hosts = os.environ[VARIABLE], (Host(), Host())
    for host in hosts:
        os.pwrite(host.slots[0].data, os.pread(saved.data, saved.num_bytes, 0), 0)
        host.slots[0].seal(saved.record() or {})
    os.environ.pop(PEER_VARIABLE)
    yield Held(mine.contexts[0], hosts)
    for host in hosts:
        host.close()
    os.environ[VARIABLE] = of_job


def flip(host: Host, position: int) -> None:
    """A bit in the copy that a host holds."""
    slot = host.slots[0]
    (byte,) = os.pread(slot.data, 1, position % slot.num_bytes)
    os.pwrite(slot.data, bytes([byte ^ 1]), position % slot.num_bytes)


def of_another_layout(context: RunContext, hosts: Sequence[Host]) -> OtherLayout:
    """What they hold, as a rank of another layout finds it."""
    record = hosts[0].slots[0].record() or {}
    file, key = record["file"], key_of(record)
    saved = SavedFile(file["name"], file["num_bytes"], file["checksum"], tuple(file["states"]))
    manifest = Manifest(record["tag"], 6, "memory", record["layout"], MODEL, {saved.name: saved})
    holders = {saved.name: (key, [host.peer for host in hosts])}
    where, headers = Path(f"{record['tag']} in host memory"), {saved.name: file["extents"][0][0]}
    candidate = MemoryCandidate(where, record["tag"], 6, manifest, record["save"])
    return OtherLayout(candidate=candidate, ctx=context, holders=holders, header_bytes=headers)


@contextlib.contextmanager
def files_of(opened: OtherLayout) -> Iterator[MemoryFiles]:
    """Its files, as a load onto another layout has them."""
    with contextlib.closing(opened.shared_copies(opened.ctx.checkpoint_engine, untraced_operation())) as copies:
        files = next(copies)
        assert isinstance(files, MemoryFiles)
        yield files


FILE = "rank_00000.safetensors"


@pytest.mark.parametrize(("position", "why"), [(20, "header checksum"), (-1, "tensor f/who")], ids=["header", "tensor"])
def test_of_a_damaged_file_of_another_layout_the_next_copy_is_read(
    held_twice: Held, caplog: pytest.LogCaptureFixture, position: int, why: str
) -> None:
    """Over real connections, with a flipped bit in the memory of the host that is asked first."""
    context, (bad, good) = held_twice
    opened = of_another_layout(context, [bad, good])
    flip(bad, position)
    with files_of(opened) as files, caplog.at_level(logging.WARNING):
        assert context.checkpoint_engine.load_values("f", files, untraced_operation())["who"].tolist() == [0, 6]
        context.checkpoint_engine.placed_tensors(files, untraced_operation())
        assert files.copies.used() == {FILE: 1}
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"rank 0: {FILE} of global_step6: copy of {bad.peer}: {why}")
    assert told.endswith(f"; the copy of {good.peer} is used")
    flip(good, position)
    with files_of(opened) as files, pytest.raises(CheckpointDamagedError) as caught:
        context.checkpoint_engine.load_values("f", files, untraced_operation())
    assert all(f"copy of {host.peer}: {why}" in str(caught.value) for host in (bad, good))


def test_what_several_ranks_find_damaged_is_read_from_one_holder_after_the_other(
    held_twice: Held, caplog: pytest.LogCaptureFixture
) -> None:
    """Parts of a tensor are verified by all ranks together, which may have them from different holders."""
    context, (first, second) = held_twice
    opened = of_another_layout(context, [first, second])
    flip(first, 20)

    def brought() -> bytes:
        return files.copies.bring(FILE, [(0, 30)]).read_bytes()[:30]

    with files_of(opened) as files, caplog.at_level(logging.WARNING):
        assert brought() == os.pread(first.slots[0].data, 30, 0)
        assert files.copies.another(FILE, {0, 1}, "wrong") == 0, "it is not known yet which"
        assert files.copies.another(FILE, {0}, "wrong") == 1
        files.copies.use(FILE, 1)
        assert files.copies.used() == {FILE: 1}
        assert brought() == os.pread(second.slots[0].data, 30, 0)
        assert files.copies.another(FILE, {1}, "wrong") is None
    assert [record.getMessage() for record in caplog.records] == [
        f"{FILE} of global_step6: copy of {first.peer} or {second.peer}: wrong; the copy of {first.peer} is used",
        f"{FILE} of global_step6: copy of {first.peer}: wrong; the copy of {second.peer} is used",
    ]


@pytest.mark.slow
def test_peers_that_stall_or_lie_are_named_and_the_next_holder_is_used(
    job: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Over real connections: one stalls, one lies about the length, one sends too little, one a flipped bit."""
    monkeypatch.setenv(LAUNCH_ID_VARIABLE, "launch0")
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    monkeypatch.delenv(PEER_VARIABLE, raising=False)
    mine = job(1)
    mine.save(6)
    engine = mine.contexts[0].checkpoint_engine
    engine.options = replace(engine.options, peer_timeout_s=5.0)
    held = held_slots()
    assert held is not None
    (slot,) = [slot for slot in held[0] if slot.record() is not None]
    record = slot.record()
    assert record is not None
    content = os.pread(slot.data, slot.num_bytes, 0)
    flipped = bytes([content[0] ^ 1]) + content[1:]
    longer = record | {"file": record["file"] | {"num_bytes": len(content) + 1}}
    process, given_up = CopyProcess("127.0.0.1"), threading.Event()
    process.start(lambda: None)
    good = own_peer()
    assert good is not None

    def stall(connected: socket.socket) -> None:
        connected.sendall(message(len(content), record=record) + content[:9])
        if connected.recv(1) == b"":  # until the other end closes the connection
            given_up.set()

    begin = message(len(content), record=record)
    answers = [message(record=longer), begin + content[:-1], begin + flipped]
    bad = [liar(stall), *(liar(lambda connected, answer=answer: connected.sendall(answer)) for answer in answers)]
    (candidate,) = mine.candidates()[0]
    assert isinstance(candidate, SameLayout)
    sources = [Source("peer", None, peer) for peer in [*bad, good]]
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        found = state_of(mine, 0, replace(candidate, sources=sources))
    process.close()
    os.environ.pop(PEER_VARIABLE)
    os.environ.pop(STEP_TIMES)
    assert found["who"].tolist() == [0, 6]
    assert given_up.wait(HANGS_S) and time.monotonic() - began >= 5.0, "left alone once its deadline was over"
    why = [
        "is stalled: it said nothing for 5 s",
        f"says that a file has {len(content) + 1} bytes, and its extents have {len(content)}",
        "has ended the connection 1 bytes too early",
        "has a damaged copy: bytes 0 to",
    ]
    told = [record.getMessage() for record in caplog.records]
    for text, peer, reason in zip(told, bad, why, strict=True):
        assert text.startswith(f"rank 0: {peer} {reason}") and text.endswith("; the next copy is used")
