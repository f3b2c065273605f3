"""Arguments, planned states, page cache and memory of the replay."""

from __future__ import annotations

import argparse
import pickle
import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from megatron.checkpointing.engines.base import FileState
from megatron.checkpointing.engines.errors import UnknownEngineError
from megatron.config import ConfigError
from megatron.fileio.compressed_blocks import BlockCodec
from tests.unit.tools.ckpt_replay.replay_helpers import request
from tools.ckpt_replay import shares, steps, tensors
from tools.ckpt_replay.cli import COULD_NOT_RUN, main
from tools.ckpt_replay.memory import PeakMemory, resident_memory
from tools.ckpt_replay.options import parse_arguments, parse_ranks, request_from
from tools.ckpt_replay.plan import ReplayError, Request, Share, Task, location_of
from tools.ckpt_replay.prepare import engine_problems
from tools.common import page_cache
from tools.common.machine import filesystem_of
from tools.common.page_cache import COLD, WARM
from tools.common.tensor_trees import tensors_of

MIB = 1 << 20
CPU = torch.device("cpu")


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def planned() -> list[FileState]:
    """A rank's files in the manner of DeepSpeed's: weights, values, and a ZeRO-1 shard whose tensors are shared."""
    master = meta(300_001)
    shard = {"fp32_groups": [master], "state": {0: {"master": master, "exp_avg": meta(300_001), "step": 7}}}
    weights = OrderedDict(weight=meta(400, 300, dtype=torch.bfloat16), norm=meta(300, dtype=torch.bfloat16))
    return [
        FileState("layer_01-model_00-model_states.pt", weights, {("weight",): {"name": "weight"}}),
        FileState("mp_rank_00_model_states.pt", {"iteration": 3, "flags": meta(5, dtype=torch.bool)}),
        FileState("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", shard),
    ]


# Arguments


def test_ranks() -> None:
    assert parse_ranks("0-2,7") == (0, 1, 2, 7)
    for wrong in ("", "1-", "a", "2-1", "0,0-1"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_ranks(wrong)


def test_a_request_survives_being_told_to_the_ranks() -> None:
    asked = request(limit_bytes=5 * MIB)
    task = Task("save", 1, 0, "torch", "/x", 1, "id", Path("/n"), asked)
    assert pickle.loads(pickle.dumps(task)) == task


def test_engine_options_are_the_trainers() -> None:
    argv = ["--small-tensors", "3", "--dir", ".", "--io-threads", "3", "--host-cache-size", "0.5", "--direct-io", "off"]
    options = request_from(parse_arguments(argv), None).options
    assert (options["io_threads"], options["host_cache_size"], options["direct_io"]) == (3, 0.5, "off")
    assert (options["checkpoint_durability"], options["checksum"]) == ("fsync", "crc32")


@pytest.mark.parametrize(
    ("argv", "error", "message"),
    [
        (["--model", "70b", "--ranks", "64"], ReplayError, "rank 64 is outside the layout TP8 PP8 DP1"),
        (["--model", "70b", "--pp", "2", "--ranks", "5"], ReplayError, "rank 5 is outside the layout TP1 PP2 DP1"),
        (["--model", "71b"], ConfigError, "--model 71b: no such preset"),
        (["--model", "70b", "--engine", "torhc"], UnknownEngineError, "torhc: no such engine"),
        (["--model", "70b", "--engine", ","], ReplayError, "names no engine"),
        (
            ["--model", "70b", "--engine", "memory", "--operations", "saves_then_loads"],
            ReplayError,
            "--operations saves_then_loads: the slots of --engine memory hold the newest save alone",
        ),
        (["--model", "70b", "--io-threads", "0"], ConfigError, "--io-threads"),
        (
            ["--model", "70b", "--engine", "lazy", "--checkpoint-files-per-node", "1"],
            ReplayError,
            "--checkpoint-files-per-node 1: only lazy-shared heeds it",
        ),
        (
            ["--model", "70b", "--engine", "memory", "--readers", "1"],
            ReplayError,
            "--readers 1: --engine memory, whose slots",
        ),
        (
            ["--model", "7b", "--engine", "lazy", "--throughput-target-gbps", "300"],
            ReplayError,
            "^--throughput-target-gbps 300: only s3torchconnector heeds it; add that to --engine, or drop the flag$",
        ),
    ],
)
def test_what_cannot_be_asked_for(argv: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        request_from(parse_arguments([*argv, "--dir", "."]), None)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--no-cold"], "--no-cold: applies to directories only, and --dir s3://b/p is in object storage; drop it"),
        (["--striping", "4"], "--striping: applies to directories only"),
        (["--limit-bytes", "fit"], "--limit-bytes fit: applies to directories only"),
        (["--sharding", "full", "--tp", "2"], "--sharding full: --model is divided equally among --dp ranks"),
        (["--copies", "2"], "--copies 2: needs --sharding full, whose copies hold the same; add it"),
        (["--sharding", "full", "--copies", "0"], "--copies 0: must be at least 1"),
        (["--readers", "2", "--operations", "load"], "--readers 2: they load beside saves, and --operations load"),
        (["--throughput-target-gbps", "0"], "--throughput-target-gbps: '0' is no number above 0"),
        (["--throughput-target-gbps", "inf"], "--throughput-target-gbps: 'inf' is no number above 0"),
        (["--throughput-target-gbps", "fast"], "--throughput-target-gbps: 'fast' is no number above 0"),
    ],
)
def test_what_has_no_meaning_in_object_storage(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--model", "7b", "--dir", "s3://b/p", *argv])
    assert message in capsys.readouterr().err


def test_readers_in_object_storage_need_an_engine_that_reads_there_each_time() -> None:
    asked = ["--model", "7b", "--dir", "s3://bucket/p", "--readers", "1", "--engine"]
    assert request_from(parse_arguments([*asked, "lazy,lazy-zstd,s3torchconnector"]), None).readers == 1
    for flags in (["--checksum", "none"], ["--checkpoint-verify", "size"]):
        assert request_from(parse_arguments([*asked, "s3torchconnector", *flags]), None).readers == 1
        with pytest.raises(ReplayError, match="^--readers 1: --engine lazy, which reads ranges of objects only with"):
            request_from(parse_arguments([*asked, "lazy", *flags]), None)
    with pytest.raises(ReplayError, match="^--readers 1: --engine torch, which reads from object storage once"):
        request_from(parse_arguments([*asked, "lazy,torch"]), None)


def test_engines_of_object_storage() -> None:
    def problems(place: str) -> dict[str, str]:
        engines = "lazy,fastpersist,raw-all,s3torchconnector,torch_checkpointing"
        asked = parse_arguments(["--model", "7b", "--dir", place, "--engine", engines])
        return engine_problems(request_from(asked, None))

    found = problems("s3://bucket/prefix")
    assert "lazy" not in found and "does not save to object storage" in found["fastpersist"]
    assert "give it a --dir of a file system" in found["raw-all"]
    assert "give it a --dir of a file system" in found["torch_checkpointing"]
    assert "writes to object storage only: give --dir s3://BUCKET/PREFIX" in problems(".")["s3torchconnector"]
    with pytest.raises(ConfigError, match="--dir s3://bucket: names no prefix"):
        location_of("s3://bucket")


def test_parts_that_the_connector_refuses_are_named() -> None:
    def problems(size: str) -> dict[str, str]:
        words = ["--model", "7b", "--dir", "s3://bucket/p", "--engine", "s3torchconnector", "--io-block-size", size]
        return engine_problems(request_from(parse_arguments(words), None))

    for size in ("4.5", "5121"):
        why = f"engine s3torchconnector: --io-block-size {size}: its parts have 5 to 5120 MiB; change that"
        assert problems(size)["s3torchconnector"] == why
    for size in ("5", "5120"):
        assert "--io-block-size" not in problems(size).get("s3torchconnector", "")


def test_several_processes_hold_what_a_rank_holds() -> None:
    argv = ["--model", "7b", "--sharding", "full", "--dp", "4", "--copies", "2", "--dir", "."]
    asked = parse_arguments([*argv, "--ranks", "0,3", "--engine", "torch,lazy-shared,raw-rank,memory"])
    request = request_from(asked, None)
    share = request.share
    assert (share.ranks, share.copies) == ((0, 3, 0, 3), 2)
    assert [share.copy_of(process) for process in range(4)] == [0, 0, 1, 1]
    found = engine_problems(request)
    assert set(found) == {"raw-rank", "memory"}
    assert found["memory"] == "engine memory: each process has files of its own; leave it out, or drop --copies"
    assert request_from(parse_arguments(argv), 8).share.ranks == (0, 1, 2, 3, 0, 1, 2, 3)
    with pytest.raises(ReplayError, match="names 2 ranks and --copies 2, and the launcher started 2 processes"):
        request_from(asked, 2)


def test_full_sharding_gives_every_rank_an_equal_part_of_everything() -> None:
    whole = shares.planned_share(Share("tiny", (1, 1, 1), (0,)), 0)
    parts = [shares.planned_share(Share("tiny", (1, 1, 3), (0, 1, 2), fully_sharded=True), rank) for rank in range(3)]
    assert len({part.full_bytes for part in parts}) == 1
    tensors = sum(len(list(tensors_of(file.state))) for file in whole.files)
    padding = 3 * parts[0].full_bytes - whole.full_bytes
    assert 0 <= padding <= 3 * 8 * tensors  # less than an element a rank and tensor
    assert len({file.name for part in parts for file in part.files}) == 3 * len(whole.files)


def test_a_model_alone_is_enough() -> None:
    found = request_from(parse_arguments(["--model", "13b", "--dir", "."]), None)
    assert (found.share.layout, found.share.ranks, found.share.limit_bytes) == ((4, 4, 1), (0,), 1 << 30)
    assert found.cold and {"torch", "lazy"} <= set(found.engines)
    whole = request_from(parse_arguments(["--model", "13b", "--dir", ".", "--limit-bytes", "none", "--no-cold"]), None)
    assert whole.share.limit_bytes is None and not whole.cold
    fitting = ["--model", "13b", "--dir", ".", "--limit-bytes", "fit", "--ranks"]
    one, four = (request_from(parse_arguments([*fitting, ranks]), None).share.limit_bytes for ranks in ("0", "0-3"))
    assert isinstance(one, int) and isinstance(four, int) and 0 < 3 * four < one < shutil.disk_usage(".").free
    # Of saves that are all kept, the disk of no machine that runs this takes so many.
    kept = parse_arguments([*fitting, "0", "--operations", "saves_then_loads", "--repeat", str(10**9)])
    with pytest.raises(ReplayError, match="--limit-bytes fit: .* bytes free"):
        request_from(kept, None)


def test_a_launcher_must_start_as_many_processes_as_ranks_are_named() -> None:
    arguments = parse_arguments(["--model", "70b", "--tp", "8", "--ranks", "0-1", "--dir", "."])
    with pytest.raises(ReplayError, match="names 2 ranks, and the launcher started 3"):
        request_from(arguments, 3)


@pytest.mark.parametrize("argv", [[], ["--model", "7b", "--small-tensors", "3"], ["--model", "7b", "--repeat", "0"]])
def test_a_wrong_command_line_ends_with_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_arguments([*argv, "--dir", "."])
    assert stopped.value.code == 2
    assert "ckpt-replay" in capsys.readouterr().err


def test_a_directory_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["--small-tensors", "3", "--dir", str(tmp_path / "file")]) == COULD_NOT_RUN
    assert f"--dir {tmp_path / 'file'}: cannot be written" in capsys.readouterr().err


# States


def test_a_limited_share_has_the_same_files_and_tensors_and_about_the_bytes() -> None:
    files = planned()
    limit = shares.tensor_bytes(files) // 3
    limited = shares.limited(files, limit)
    assert [file.name for file in limited] == [file.name for file in files]
    assert shares.tensor_bytes(limited) == pytest.approx(limit, rel=0.02)
    before = [path for file in files for path, _ in tensors_of(file.state)]
    assert [path for file in limited for path, _ in tensors_of(file.state)] == before
    shard = limited[2].state
    assert shard["fp32_groups"][0] is shard["state"][0]["master"]
    assert shard["state"][0]["step"] == 7
    assert limited[0].state["norm"].shape == (300,)
    assert limited[0].placements == files[0].placements


def test_weights_and_masters_are_there_before_a_load_and_moments_are_not() -> None:
    weights, common, _ = planned()
    inner = {"state": {0: {"exp_avg": meta(3000)}}, "param_groups": [{"lr": 1}]}
    nest = {"single_partition_of_fp32_groups": [meta(3000)], "base_optimizer_state": inner}
    shard = FileState("zero_optim_states.pt", {"optimizer_state_dict": nest, "rng_state": meta(2)})
    found = tensors.live_before_load([weights, common, shard], 5, CPU)
    assert [file.name for file in found] == [weights.name, common.name, shard.name]
    assert [tensor.device for _, tensor in tensors_of(found[0].state)] == [CPU, CPU]
    assert found[1].state == {} and list(found[2].state) == ["optimizer_state_dict"]
    assert list(found[2].state["optimizer_state_dict"]) == ["single_partition_of_fp32_groups"]
    assert found[2].state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].device == CPU


def test_a_limit_below_the_small_tensors_is_refused() -> None:
    with pytest.raises(ReplayError, match="--limit-bytes 10"):
        shares.limited(planned(), 10)


def test_small_tensors_instead_of_a_model() -> None:
    found = shares.planned_share(Share(None, (1, 1, 2), (0, 1), small_tensors=9, small_tensor_bytes=4096), 1)
    assert found.full_bytes == shares.tensor_bytes(found.files) == 9 * 4096
    assert len(list(tensors_of(found.files[0].state))) == 9


def test_no_two_pages_are_alike_and_the_seed_determines_them() -> None:
    big = [FileState("shard", {"a": meta(3 * MIB), "b": meta(MIB, dtype=torch.bfloat16)})]
    first = tensors.materialise(big, 1, CPU)
    pages = b"".join(bytes(t.view(torch.uint8).numpy()) for _, t in tensors_of(first[0].state))
    cut = [pages[i : i + 4096] for i in range(0, len(pages), 4096)]
    assert len(set(cut)) == len(cut) == 14 * MIB // 4096
    again, other = tensors.materialise(big, 1, CPU), tensors.materialise(big, 2, CPU)
    assert tensors.fingerprints({"f": first[0].state}) == tensors.fingerprints({"f": again[0].state})
    assert tensors.fingerprints({"f": first[0].state}) != tensors.fingerprints({"f": other[0].state})


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.67), (torch.float32, 0.83)], ids=str)
def test_floats_like_a_trained_models_have_its_entropy(dtype: torch.dtype, share: float) -> None:
    """That of the exponents; random bits are not compressed at all, and no two pages are alike either way."""
    big = [FileState("shard", {"a": meta(MIB, dtype=dtype), "step": meta(1, dtype=torch.int64)})]
    codec, width = BlockCodec(), dtype.itemsize
    packed = []
    for like_trained in (False, True):
        (file,) = tensors.materialise(big, 1, CPU, like_trained=like_trained)
        content = bytes(file.state["a"].view(torch.uint8).numpy())[:MIB]
        assert len({content[i : i + 4096] for i in range(0, MIB, 4096)}) == MIB // 4096
        packed.append(len(codec.pack(content, width)) / MIB)
    assert packed == pytest.approx([1, share], abs=0.02)
    assert file.state["a"].float().std() == pytest.approx(0.02, rel=0.15)


def test_weights_are_views_of_one_buffer_and_other_tensors_own_theirs() -> None:
    files = tensors.materialise(planned(), 1, CPU)
    weights, _, shard = (file.state for file in files)
    assert isinstance(weights, OrderedDict)
    assert weights["weight"].untyped_storage().data_ptr() == weights["norm"].untyped_storage().data_ptr()
    master = shard["fp32_groups"][0]
    assert master is shard["state"][0]["master"]
    assert master.untyped_storage().nbytes() == 300_001 * 4
    assert [tuple(t.shape) for _, t in tensors_of(weights)] == [(400, 300), (300,)]


def test_every_altered_tensor_shows() -> None:
    files = tensors.materialise(planned(), 1, CPU)
    states = {file.name: file.state for file in files}
    before = tensors.fingerprints(states)
    tensors.check_restored(states, before, Path("/x"))
    tensors.alter(files)
    after = tensors.fingerprints(states)
    assert before.keys() == after.keys()
    assert all(before[name] != after[name] for name in before)
    with pytest.raises(ReplayError, match="was saved as .* and restored as"):
        tensors.check_restored(states, before, Path("/x"))


def test_a_missing_and_an_extra_tensor_show() -> None:
    states = {"f": {"a": torch.ones(3)}}
    saved = tensors.fingerprints(states)
    with pytest.raises(ReplayError, match="restored as None"):
        tensors.check_restored({"f": {}}, saved, Path("/x"))
    with pytest.raises(ReplayError, match="f:b was restored, and never saved"):
        tensors.check_restored({"f": {"a": torch.ones(3), "b": torch.ones(1)}}, saved, Path("/x"))


def test_saves_in_memory_are_measured_where_they_are_asked_for() -> None:
    def request(engine: str, *argv: str, world_size: int | None = None) -> Request:
        asked = parse_arguments(["--model", "tiny", "--engine", engine, *(argv or ("--dir", "."))])
        return request_from(asked, world_size)

    assert not {"memory", "memory-peer"} & set(request("all").engines)
    assert request("memory,memory-peer").engines == ("memory", "memory-peer")
    unverified = request("memory-peer", "--dir", ".", "--checksum", "none")
    assert "copies must be verifiable; drop --checksum none" in engine_problems(unverified)["memory-peer"]
    stored = engine_problems(request("memory", "--dir", "s3://bucket/prefix"))
    assert "saves go to host memory, not to a bucket; give it a --dir of a file system" in stored["memory"]
    with pytest.raises(ReplayError, match="^--engine memory: the slots of all ranks are held by one process, and a "):
        request("memory", world_size=1)


# Page cache, memory, steps


def test_a_file_gets_out_of_the_page_cache_and_in(path_on_disk: Path) -> None:
    path = path_on_disk / "file"
    path.write_bytes(bytes(range(256)) * 40_000)
    assert page_cache.state_of(page_cache.drop([path])) == COLD
    assert page_cache.state_of(page_cache.fill([path])) == WARM
    assert page_cache.resident_bytes(path) == (10_240_000, 10_240_000)


def test_half_a_file_in_the_cache_is_neither_cold_nor_warm() -> None:
    assert [page_cache.state_of(share) for share in (0.0, 0.5, 1.0, None)] == [COLD, "partly warm", WARM, "unknown"]


@pytest.mark.slow
def test_a_file_in_memory_is_never_called_cold() -> None:
    directory = Path("/dev/shm")
    if filesystem_of(directory) != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    path = directory / "ckpt_replay_test_file"
    path.write_bytes(b"x" * MIB)
    try:
        assert page_cache.state_of(page_cache.drop([path])) == WARM
    finally:
        path.unlink()


def test_peak_memory_is_seen_after_it_was_given_back() -> None:
    before = resident_memory()
    with PeakMemory() as peak:
        block = b"x" * (64 * MIB)
        del block
    assert 60 * MIB < peak.own_bytes - before < 120 * MIB
    with PeakMemory() as peak:
        pass
    assert peak.own_bytes - before < 30 * MIB


def test_interference_compares_what_ran_meanwhile_with_the_rest() -> None:
    ms = 1_000_000
    before = [steps.Unit(i * 10 * ms, (i + 1) * 10 * ms) for i in range(5)]
    after = [steps.Unit(100 * ms, 112 * ms), steps.Unit(112 * ms, 124 * ms), steps.Unit(124 * ms, 134 * ms)]
    assert steps.interference(before, after, 124 * ms) == pytest.approx(0.2)
    assert steps.interference(before, after, 99 * ms) is None


@pytest.mark.parametrize("flag", ["--dir", "--trace-dir"])
def test_a_directory_below_none_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    missing = tmp_path / "mistyped" / "deeper"
    others = ["--dir", str(tmp_path)] if flag == "--trace-dir" else []
    assert main(["--small-tensors", "3", *others, flag, str(missing)]) == COULD_NOT_RUN
    assert f"{flag} {missing}: {missing.parent} is not a directory; create it first" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_engines_may_be_given_one_by_one() -> None:
    line = ["--small-tensors", "1", "--dir", "."]
    asked = [["--engine", "torch,lazy"], ["--engine", "torch", "--engine", "lazy"]]
    assert [request_from(parse_arguments([*line, *words]), None).engines for words in asked] == [("torch", "lazy")] * 2
