"""--prefetch-on-start: what is read, what is left alone, and that the load neither reads nor counts it again."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing.engines.base import CheckpointEngine, EngineOptions, FileState, SavedCheckpoint, SavedFile
from megatron.checkpointing.engines.lazy.engine import LazyEngine
from megatron.checkpointing.engines.registry import create_engine
from megatron.checkpointing.preflight.prefetch import Prefetch
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.commit import write_manifest
from megatron.checkpointing.store.manifest import Manifest
from megatron.config import Config, ConfigError
from megatron.config.arguments import config_from_args, parse_args
from megatron.fileio.page_cache import ResidentPages
from megatron.parallel.topology import Layout
from restart_trace.recorder import Recorder, untraced_operation
from restart_trace.sink import JsonlSink
from tests.unit.megatron.checkpointing.engines.lazy_helpers import save_together
from tests.unit.trace_helpers import PROCESS, read

MIB = 1 << 20
SHARED = "lazy, in one file"
TWO = Layout(tp=1, pp=1, dp=2)
LAYER = names.layer_file(1, 0)
COMMON_STATE = names.model_states_file(TWO, TWO.coordinates(0))
FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --bf16 --lr 1e-3 --micro-batch-size 1 "
    "--train-iters 2 --tokenizer-type NullTokenizer --vocab-size 100 --data-path x"
)


def config(*flags: str, world_size: int = 2) -> Config:
    env = {"WORLD_SIZE": str(world_size), "RANK": "1", "LOCAL_RANK": "1"}
    return config_from_args(parse_args([*FLAGS.split(), *flags], env), env)


def shard(rank: int) -> str:
    return names.optimizer_file(TWO, TWO.coordinates(rank), "bf16")


def states(rank: int) -> list[FileState]:
    """Weights, the rest and a shard as a rank of DP 2 saves them: only the first has weights."""
    generator = torch.Generator().manual_seed(rank)
    mine = [FileState(shard(rank), {"master": torch.randn(2 * MIB, generator=generator)})]
    if rank == 0:
        mine.insert(0, FileState(COMMON_STATE, {"iteration": 5, "note": torch.zeros(3)}))
        mine.insert(0, FileState(LAYER, {"weight": torch.randn(MIB, generator=generator)}))
    return mine


def save(
    directory: Path, engine: str, layout: Layout = TWO, of_rank: Callable[[int], list[FileState]] = states
) -> dict[str, SavedFile]:
    """A checkpoint of data-parallel ranks, of which nothing is in the page cache."""
    target = directory / "global_step5"
    target.mkdir()
    saved: dict[str, SavedFile] = {}
    ranks = range(layout.world_size)
    if engine == SHARED:
        options = [EngineOptions(rank=i, local_rank=i, local_world_size=len(ranks), files_per_node=1) for i in ranks]
        saved = save_together([LazyEngine(each) for each in options], [of_rank(rank) for rank in ranks], target)
        engine = "lazy"
    for rank in ranks if not saved else ():
        saving = create_engine(engine, EngineOptions(rank=rank))
        saved |= {file.name: file for file in saving.save(of_rank(rank), target, untraced_operation())}
        saving.close()
    write_manifest(target, Manifest("global_step5", 5, engine, layout.as_dict(), {}, saved), fsync=True)
    for name in saved:
        forget(target / name)
    return saved


@pytest.fixture
def tmp_path(path_on_disk: Path) -> Path:
    """Where files can leave the page cache."""
    return path_on_disk


def forget(path: Path) -> None:
    """Take a file out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if ResidentPages(file.fileno()).share(0, path.stat().st_size):
            pytest.skip("this file system keeps its files in memory")


def share(path: Path, start: int = 0, stop: int | None = None) -> float:
    """Share of a file's pages in the page cache."""
    with path.open("rb") as file:
        return ResidentPages(file.fileno()).share(start // 4096 * 4096, path.stat().st_size if stop is None else stop)


def wait_until_idle(prefetch: Prefetch) -> None:
    """Return when everything asked for until now has been read."""
    prefetch._wanted.put(())
    while not prefetch._wanted.empty():
        assert prefetch._thread.is_alive() or prefetch._note
        if not prefetch._thread.is_alive():
            return
        time.sleep(0.001)


def finish(prefetch: Prefetch, directory: Path, trace: Path, load: Any = None) -> list[dict[str, Any]]:
    """Hand over to a load, which `load` carries out; its spans."""
    with Recorder(JsonlSink(trace), PROCESS).operation("load") as op:
        prefetch.hand_over(op, directory)
        if load is not None:
            load(op)
    return [record for record in read(trace) if record["type"] == "span"]


def storage_reads() -> int:
    """Bytes that this process has had read from storage (proc(5), /proc/PID/io)."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def check_loaded(engine: CheckpointEngine, directory: Path, expected: dict[str, SavedFile], op: Any) -> None:
    found = engine.load([LAYER, COMMON_STATE, shard(1)], SavedCheckpoint(directory, expected), op)
    assert torch.equal(found[LAYER]["weight"], states(0)[0].state["weight"])
    assert torch.equal(found[shard(1)]["master"], states(1)[0].state["master"])


MINE = MIB * 4 + 2 * MIB * 4  # bytes of the weights and of the shard that rank 1 loads
ROUNDS = 20


@dataclass(frozen=True)
class ReadAhead:
    """A load of what was read ahead. `read_bytes`: what the process had read from storage meanwhile.

    `disturbed`: the kernel had taken back pages that were read ahead, or pages of a program or library had to be read
    during the load, which are among `read_bytes`: both happen at any time where memory is short.
    """

    spans: list[dict[str, Any]]
    shares: dict[str, float]  # of each file, in the page cache before the load
    read_bytes: int
    disturbed: bool


def load_what_was_read_ahead(place: Path, name: str, engine: CheckpointEngine) -> ReadAhead:
    """Rank 1 loads a new checkpoint in `place`."""
    place.mkdir()
    saved, directory = save(place, name), place / "global_step5"
    prefetch = Prefetch(config("--load", str(place), "--prefetch-on-start"), TWO, 1, 1 << 40)
    prefetch.also([LAYER])
    wait_until_idle(prefetch)
    shares = {file: share(directory / file) for file in saved}
    resident = sum(shares[file] * (directory / file).stat().st_size for file in saved)
    counts: list[tuple[int, int]] = []

    def load(op: Any) -> None:
        for step in (lambda: None, lambda: check_loaded(engine, directory, saved, op)):
            step()
            counts.append((storage_reads(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt))

    spans = finish(prefetch, directory, place / "trace.jsonl", load)
    (before, faults_before), (after, faults_after) = counts
    return ReadAhead(spans, shares, after - before, resident < MINE or faults_after > faults_before)


@pytest.mark.parametrize("name", ["torch", "lazy", SHARED])
def test_a_rank_reads_its_own_part_and_its_load_nothing_again(tmp_path: Path, name: str) -> None:
    engine = create_engine("lazy" if name == SHARED else name, EngineOptions(rank=1))
    load_what_was_read_ahead(tmp_path / "first", name, engine)  # a first load reads modules, too
    rounds = (load_what_was_read_ahead(tmp_path / str(number), name, engine) for number in range(ROUNDS))
    found = next((one for one in rounds if not one.disturbed), None)
    assert found is not None, f"less than what rank 1 loads was read ahead, in each of {ROUNDS} rounds"
    if name == "lazy":  # the other rank's shard lies in the file that holds the weights
        assert 0.2 < found.shares["rank_00000.safetensors"] < 0.8
    elif name == SHARED:
        assert 0.2 < found.shares["ranks_00000-00001.safetensors"] < 0.8
    else:
        assert found.shares[shard(0)] == 0
    assert found.read_bytes < MIB, "the load has read from storage again"
    ahead = [span for span in found.spans if not span["blocking"]]
    assert {(span["phase"], span["detail"], span["thread"]) for span in ahead} == {("load", "read", "prefetch")}
    assert MINE <= sum(span["bytes"] for span in ahead) < MINE + 2 * MIB
    # What was read ahead is counted once: what the load says it has read is the little that was not.
    total = sum(span["bytes"] for span in found.spans if span.get("detail") == "read" and "bytes" in span)
    assert MINE <= total < MINE + 2 * MIB


EXPERTS = Layout(tp=1, pp=1, dp=4, ep=2)  # four experts of layer 3, two on each rank


def states_with_experts(rank: int) -> list[FileState]:
    """As `states`; rank 0 writes the experts of ranks 0 and 2, too, and rank 1 those of ranks 1 and 3."""
    mine = [FileState(names.optimizer_file(EXPERTS, EXPERTS.coordinates(rank), "bf16"), {"master": torch.ones(MIB)})]
    for expert in (2 * rank, 2 * rank + 1) if rank < 2 else ():
        mine.append(FileState(names.expert_file(3, expert, 0), {"weight": torch.ones(MIB)}))
    if rank == 0:
        mine.append(FileState(COMMON_STATE, {"iteration": 5, "note": torch.zeros(3)}))
        mine += [FileState(names.layer_file(number, 0), {"weight": torch.ones(MIB)}) for number in (1, 2, 3, 4)]
    return mine


@pytest.mark.parametrize("name", ["lazy", SHARED])
@pytest.mark.parametrize("divided", [False, True], ids=["all weights", "a part of the weights"])
def test_experts_of_other_ranks_are_left_alone(tmp_path: Path, name: str, divided: bool) -> None:
    """Each state is 4 MiB. Of the weights each rank loads four layers and two experts; or one layer and one expert."""
    save(tmp_path, name, EXPERTS, states_with_experts)
    flags = "--load {} --prefetch-on-start --num-layers 2 --num-experts 4 --moe-expert-parallel-size 2"
    if divided:
        flags += " --ckpt-fully-parallel-load"
    for rank in range(EXPERTS.world_size):
        for path in (tmp_path / "global_step5").iterdir():
            forget(path)
        own = [names.expert_file(3, expert, 0) for expert in range(4) if rank in EXPERTS.expert_holders(4, expert)]
        prefetch = Prefetch(config(*flags.format(tmp_path).split(), world_size=4), EXPERTS, rank, 1 << 40)
        prefetch.also([names.layer_file(number, 0) for number in (1, 2, 3, 4)] + own)
        wait_until_idle(prefetch)
        spans = finish(prefetch, tmp_path / "global_step5", tmp_path / f"trace_{rank}.jsonl")
        ahead = sum(span["bytes"] for span in spans if not span["blocking"])
        expected = 4 * MIB * (1 + (2 if divided else 6))
        assert expected <= ahead < expected + MIB, (rank, ahead / MIB)


def test_reading_ahead_ends_at_its_limit(tmp_path: Path) -> None:
    save(tmp_path, "torch")
    prefetch = Prefetch(config("--load", str(tmp_path), "--prefetch-on-start"), TWO, 1, 5 * MIB)
    prefetch._thread.join(300)
    spans = finish(prefetch, tmp_path / "global_step5", tmp_path / "trace.jsonl")
    assert 0 < sum(span["bytes"] for span in spans if not span["blocking"]) <= 5 * MIB
    assert "--prefetch-limit" in prefetch._note
    assert share(tmp_path / "global_step5" / shard(1), 5 * MIB) == 0  # no more than was asked for


def test_what_is_in_memory_already_is_not_read_again(tmp_path: Path) -> None:
    save(tmp_path, "torch")
    directory = tmp_path / "global_step5"
    (directory / shard(1)).read_bytes()
    prefetch = Prefetch(config("--load", str(tmp_path), "--prefetch-on-start"), TWO, 1, 1 << 40)
    wait_until_idle(prefetch)
    spans = finish(prefetch, directory, tmp_path / "trace.jsonl")
    assert sum(span["bytes"] for span in spans if not span["blocking"]) < MIB


def test_another_checkpoint_is_loaded_than_was_read_ahead(tmp_path: Path) -> None:
    """The load has to read it all, and says so."""
    saved = save(tmp_path, "torch")
    directory = tmp_path / "global_step5"
    prefetch = Prefetch(config("--load", str(tmp_path), "--prefetch-on-start"), TWO, 1, 1 << 40)
    wait_until_idle(prefetch)
    older = tmp_path / "older"
    os.rename(directory, older)
    engine = create_engine("torch", EngineOptions(rank=1))
    spans = finish(prefetch, older, tmp_path / "trace.jsonl", lambda op: check_loaded(engine, older, saved, op))
    blocking = sum(span["bytes"] for span in spans if span["blocking"] and "bytes" in span)
    assert blocking == sum(saved[name].num_bytes for name in (LAYER, COMMON_STATE, shard(1)))


def test_nothing_is_read_of_what_does_not_fit(tmp_path: Path) -> None:
    save(tmp_path, "torch")
    flags = ("--load", str(tmp_path), "--prefetch-on-start")
    other = Prefetch(config(*flags, world_size=4), Layout(tp=1, pp=1, dp=4), 1, 1 << 40)
    nothing = Prefetch(config("--load", str(tmp_path / "none"), "--prefetch-on-start"), TWO, 1, 1 << 40)
    (tmp_path / "global_step5" / shard(1)).unlink()
    missing = Prefetch(config(*flags), TWO, 1, 1 << 40)
    for prefetch, why in ((other, "another layout"), (nothing, "none with a manifest"), (missing, "No such file")):
        prefetch._thread.join(300)
        prefetch.close()
        assert why in prefetch._note and not prefetch._read


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prefetch-on-start"], "--prefetch-on-start does nothing without --load DIR"),
        (["--load", "x", "--prefetch-limit", "1"], "--prefetch-limit 1.0: does nothing without --prefetch-on-start"),
        (["--load", "x", "--prefetch-on-start", "--prefetch-limit", "0"], "--prefetch-limit 0"),
        (["--load", "x", "--prefetch-on-start", "--direct-io", "on"], "--direct-io on reads around it: drop one"),
    ],
)  # fmt: skip
def test_flags_that_do_not_fit_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*flags)
