"""What cannot be trusted is named and passed over on all ranks; the newest whole checkpoint is loaded instead."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing.store.manifest import content_checksum
from megatron.fileio.zip_records import directory_checksum, read_records
from megatron.parallel.topology import Layout
from tests.dist.harness import LLAMA_STYLE, Run, Zygote, losses, records
from tests.dist.tiny_runs import Launcher, saving

TWO = Layout(tp=2, pp=1, dp=1)
MODEL = [
    *LLAMA_STYLE, "--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "64", "--num-attention-heads", "2",
    "--seq-length", "16", "--bf16",
]  # fmt: skip
TRAINING = [
    "--micro-batch-size", "1", "--global-batch-size", "1", "--train-iters", "12", "--lr", "1e-3",
    "--log-interval", "1",
]  # fmt: skip
STEPS = 9
LAYER_OF_RANK_1 = "layer_02-model_01-model_states.pt"
SHARD_OF_RANK_0 = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
SHARD_OF_RANK_1 = "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"


@pytest.fixture(scope="module")
def trained(zygote: Zygote, dataset: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A save directory with checkpoints after iterations 1 to 9."""
    launcher = Launcher(zygote, dataset, tmp_path_factory.mktemp("trained"))
    save = launcher.directory / "run"
    launcher.train(TWO, *MODEL, *TRAINING, *saving(save, 1), "--exit-interval", str(STEPS))
    return save


@pytest.fixture
def launcher(zygote: Zygote, dataset: list[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, dataset, tmp_path)


@pytest.fixture
def save(trained: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def resume(launcher: Launcher, save: Path, *flags: str, **options: Any) -> Run:
    trace = str(launcher.directory / "trace")
    argv = [*MODEL, *TRAINING, "--load", str(save), "--restart-trace-dir", trace, *flags]
    return launcher.run(TWO, *argv, launcher=True, **options)


def loaded_steps(launcher: Launcher) -> list[int]:
    """Step of the load that succeeded, on each rank."""
    ends = [r for r in records(launcher.directory / "trace") if r["type"] == "operation_end"]
    return [r["step"] for r in ends if r["operation"] == "load" and r["outcome"] == "ok" and "step" in r]


def rejected(launcher: Launcher, rank: int) -> list[str]:
    """What the trace of a rank says was passed over."""
    events = [r for r in records(launcher.directory / "trace", rank=rank) if r["type"] == "event"]
    return [r["detail"] for r in events if r["phase"] == "checkpoint_rejected"]


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def flip_bit_in_record(path: Path, ending: str) -> None:
    with path.open("rb") as file:
        record = next(r for r in read_records(file) if r.name.endswith(ending))
    flip_bit(path, record.offset + record.size // 2, bit=5)


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)


def test_compressed_and_plain_files_of_one_run(launcher: Launcher) -> None:
    """A damaged block rejects its checkpoint as other damage does; either kind is read whatever is saved now."""
    save, lazy = launcher.directory / "run", ["--checkpoint-engine", "lazy"]
    compressing = [*lazy, "--checkpoint-compression", "zstd"]
    launcher.train(TWO, *MODEL, *TRAINING, *saving(save, 1), *compressing, "--exit-interval", "3")
    launcher.train(TWO, *MODEL, *TRAINING, *saving(save, 1), *lazy, "--load", save, "--exit-interval", "4")
    plain, compressed = (save / f"global_step{step}" / "rank_00001.safetensors" for step in (4, 3))
    compressed = compressed.with_name(compressed.name + ".cblk")
    flip_bit(plain, plain.stat().st_size - 100)
    flip_bit(compressed, compressed.stat().st_size // 2)
    run = resume(launcher, save, "--verify-restored-state", "--exit-interval", "5")
    assert run.ok, run.output[-6000:]
    assert loaded_steps(launcher) == [2, 2]
    newest, older = rejected(launcher, 0)
    assert f"{plain}: tensor " in newest
    assert f"{compressed}: bytes " in older and "of the original: a " in older


def test_every_kind_of_damage(launcher: Launcher, save: Path, trained: Path) -> None:
    """Seven checkpoints, each damaged in its own way and on one rank only; the eighth is loaded, on both."""
    tag = {step: save / f"global_step{step}" for step in range(1, STEPS + 1)}
    (tag[9] / "manifest.json").unlink()  # `latest` names it, as it would name one of upstream's
    truncate(tag[8] / LAYER_OF_RANK_1)
    flip_bit_in_record(tag[7] / SHARD_OF_RANK_1, "data/0")
    flip_bit_in_record(tag[6] / LAYER_OF_RANK_1, "data.pkl")
    with zipfile.ZipFile(tag[5] / SHARD_OF_RANK_0) as archive:
        directory = archive.start_dir
    flip_bit(tag[5] / SHARD_OF_RANK_0, directory + 20)
    manifest = tag[4] / "manifest.json"
    flip_bit(manifest, manifest.read_bytes().index(b'"step": 4') + 8)  # 4 becomes 5
    (tag[3] / SHARD_OF_RANK_1).unlink()

    run = resume(launcher, save, "--verify-restored-state", "--exit-interval", "4")
    assert run.ok, run.output[-6000:]
    assert loaded_steps(launcher) == [2, 2]
    expected = {
        9: ("rank 0: ", f"{tag[9] / 'manifest.json'}: missing, so global_step9 may be incomplete"),
        8: ("", f"{tag[8] / LAYER_OF_RANK_1} has "),
        7: ("rank 1: ", f"{tag[7] / SHARD_OF_RANK_1}: record "),
        6: ("rank 1: ", f"{tag[6] / LAYER_OF_RANK_1}: record "),
        5: ("rank 0: ", f"{tag[5] / SHARD_OF_RANK_0}: "),
        4: ("", f"{manifest}: cannot be used: its content does not have the checksum it was written with"),
        3: ("", f"{tag[3] / SHARD_OF_RANK_1} is missing"),
    }
    for rank in range(TWO.world_size):
        found = rejected(launcher, rank)
        for who, what in expected.values():
            assert [p for p in found if p.startswith(who) and what in p], f"{what!r} is not in {found}"
        assert len(found) == len(expected) + 1  # both ranks miss the manifest of step 9
    for _, what in expected.values():
        assert what in run.log(0)
    resumed, whole = losses(launcher.directory / "trace"), losses(trained / "restart_trace")
    assert sorted(resumed) == [3, 4] and resumed.items() <= whole.items()


def test_nothing_whole_is_left(launcher: Launcher, save: Path, trained: Path) -> None:
    for step in range(1, STEPS + 1):
        truncate(save / f"global_step{step}" / SHARD_OF_RANK_0)
    run = resume(launcher, save)
    assert run.exit_codes[0] == 2 and 0 not in run.exit_codes
    errors = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: --load {save}: no checkpoint there is whole: ")
    assert all(f"{save / f'global_step{step}' / SHARD_OF_RANK_0} has " in errors[0] for step in range(1, STEPS + 1))
    assert "--allow-start-over" in errors[0]
    assert losses(launcher.directory / "trace") == {}

    run = resume(launcher, save, "--allow-start-over", "--exit-interval", "2")
    assert run.ok, run.output[-4000:]
    again, whole = losses(launcher.directory / "trace", cycle=1), losses(trained / "restart_trace")
    assert sorted(again) == [1, 2] and again.items() <= whole.items()


def hostile_manifest(path: Path, **changes: object) -> None:
    """Of wrong types, with the checksum that belongs to it."""
    content = json.loads(path.read_text()) | changes
    del content["checksum"]
    path.write_text(json.dumps(content | {"checksum": content_checksum(content)}))


def test_hostile_files_are_passed_over_and_training_saves_on(launcher: Launcher, save: Path, trained: Path) -> None:
    """By every rank, without a traceback or a wait; `latest` cannot be replaced, and that is what is said of it."""
    tag = {step: save / f"global_step{step}" for step in range(1, STEPS + 1)}
    for step in range(1, 4):
        shutil.rmtree(tag[step])
    (save / "latest").unlink()
    (save / "latest").mkdir()
    hostile_manifest(tag[9] / "manifest.json", step="9")
    (tag[8] / "manifest.json").write_text("[" * 100_000)
    (tag[7] / "manifest.json").unlink()
    os.mkfifo(tag[7] / "manifest.json")
    pickled = tag[6] / SHARD_OF_RANK_1
    size = pickled.stat().st_size
    torch.save({"optimizer_state_dict": [1] * 5}, pickled)
    with pickled.open("ab") as file:
        file.truncate(size)
    forged = tag[5] / SHARD_OF_RANK_1  # with all its checksums
    torch.save({"optimizer_state_dict": [1] * 5}, forged)
    files = json.loads((tag[5] / "manifest.json").read_text())["files"]
    files[forged.name] |= {"num_bytes": forged.stat().st_size, "checksum": directory_checksum(forged)}
    hostile_manifest(tag[5] / "manifest.json", files=files)
    saves = [*saving(save, 1), "--exit-interval", "5"]
    run = resume(launcher, save, *saves)
    assert run.ok, run.output[-6000:]
    assert loaded_steps(launcher) == [4, 4]
    for told in (
        f"rank 1: {tag[5]}: cannot be read (TypeError: ",
        f"{save / 'latest'}: names no checkpoint: is a directory, not a regular file",
        f"{tag[9] / 'manifest.json'}: cannot be used: step: must be a whole number",
        f"{tag[8] / 'manifest.json'}: cannot be used: it is nested too deeply",
        f"{tag[7] / 'manifest.json'}: cannot be used: is a FIFO, not a regular file",
        f"rank 1: {pickled}: ",
    ):
        assert told in run.log(0), told
    assert f"checkpoint global_step5 is complete and will be found by loads, but {save / 'latest'}" in run.log(0)
    assert "untouched" not in run.output and "Traceback" not in run.output
    whole = losses(trained / "restart_trace")
    assert losses(launcher.directory / "trace").items() <= whole.items()


def test_verify_size_computes_no_checksum(launcher: Launcher, save: Path) -> None:
    """A flipped bit is found with checksums, and loaded without: the user said so."""
    flip_bit_in_record(save / f"global_step{STEPS}" / SHARD_OF_RANK_1, "data/0")
    assert resume(launcher, save, "--exit-interval", "10").ok
    assert loaded_steps(launcher) == [STEPS - 1] * 2
    shutil.rmtree(launcher.directory / "trace")
    assert resume(launcher, save, "--checkpoint-verify", "size", "--exit-interval", "10").ok
    assert loaded_steps(launcher) == [STEPS] * 2
    spans = [r for r in records(launcher.directory / "trace") if r["type"] == "span" and r["operation"] == "load"]
    verifying = [r["duration_ns"] for r in spans if r.get("detail") == "verify"]
    assert verifying and max(verifying) < 1_000_000


def test_load_tag_is_taken_or_refused(launcher: Launcher, save: Path) -> None:
    """Another checkpoint is no substitute for the one that was asked for."""
    assert resume(launcher, save, "--load-tag", "global_step3", "--exit-interval", "4").ok
    assert loaded_steps(launcher) == [3, 3]
    damaged = save / "global_step3" / LAYER_OF_RANK_1
    flip_bit_in_record(damaged, "data/0")
    run = resume(launcher, save, "--load-tag", "global_step3")
    assert run.exit_codes[0] == 2
    assert f"no checkpoint there is whole: rank 1: {damaged}: record " in run.log(0)
    assert "global_step2" not in run.log(0)


def test_saved_without_optimizer_state(launcher: Launcher) -> None:
    save = launcher.directory / "bare"
    flags = [*MODEL, *TRAINING, "--save", str(save), "--save-interval", "1", "--no-save-optim", "--exit-interval", "2"]
    launcher.train(TWO, *flags)
    assert resume(launcher, save, "--no-load-optim", "--exit-interval", "3").ok
    assert loaded_steps(launcher) == [2, 2]


def test_engine_none_writes_nothing(launcher: Launcher, save: Path) -> None:
    """Training and its trace are as ever: this engine measures what is left when nothing is written."""
    empty = launcher.directory / "empty"
    flags = ["--save", str(empty), "--save-interval", "2", "--checkpoint-engine", "none", "--exit-interval", "4"]
    launcher.train(TWO, *MODEL, *TRAINING, *flags)
    assert sorted(path.name for path in empty.iterdir()) == [".generations", "restart_trace"]
    for rank in range(TWO.world_size):
        mine = [r for r in records(empty / "restart_trace", rank=rank) if r.get("operation") == "save"]
        ends = [r for r in mine if r["type"] == "operation_end"]
        found = [(r["step"], r["outcome"], r["bytes"], r["num_files"]) for r in ends]
        assert found == [(2, "ok", 0, 0), (4, "ok", 0, 0)]
        assert {r["engine"] for r in ends} == {"NoneEngine"}
        assert {r["phase"] for r in mine if r["type"] == "span"} == {"collect", "barrier"}
    assert sorted(losses(empty / "restart_trace")) == [1, 2, 3, 4]

    run = resume(launcher, save, "--checkpoint-engine", "none")
    assert run.ok and "resumed from iteration" in run.output  # read by the engine that wrote it


def lazy_training(launcher: Launcher, *flags: str) -> Run:
    trace = str(launcher.directory / "trace")
    return launcher.run(
        TWO, *MODEL, *TRAINING, "--checkpoint-engine", "lazy", "--restart-trace-dir", trace, *flags, launcher=True
    )


def test_live_tensors_that_damage_was_read_into_are_none_the_worse(launcher: Launcher) -> None:
    """Engine lazy fills them before it knows the checksums: the older checkpoint, or a new start, replaces them all."""
    save = launcher.directory / "run"
    assert lazy_training(launcher, *saving(save, 1), "--exit-interval", "3").ok
    whole = losses(launcher.directory / "trace")
    shutil.rmtree(launcher.directory / "trace")

    for rank, step in ((1, 3), (0, 2)):
        path = save / f"global_step{step}" / f"rank_{rank:05d}.safetensors"
        for part in range(1, 8):  # weights, masters and both moments
            flip_bit(path, path.stat().st_size * part // 8, bit=6)
    resumed = lazy_training(launcher, "--load", str(save), "--verify-restored-state", "--exit-interval", "3")
    assert resumed.ok, resumed.output[-4000:]
    assert loaded_steps(launcher) == [1, 1]
    again = losses(launcher.directory / "trace")
    assert sorted(again) == [2, 3] and again.items() <= whole.items()
    spans = [r for r in records(launcher.directory / "trace", rank=0) if r.get("detail") == "host_to_device"]
    assert any(r["thread"].startswith("lazy-io") for r in spans), "nothing was read into live tensors"

    path = save / "global_step1" / "rank_00000.safetensors"
    for part in range(1, 8):
        flip_bit(path, path.stat().st_size * part // 8, bit=6)
    shutil.rmtree(launcher.directory / "trace")
    over = lazy_training(launcher, "--load", str(save), "--allow-start-over", "--exit-interval", "3")
    assert over.ok, over.output[-4000:]
    again = losses(launcher.directory / "trace")
    assert sorted(again) == [1, 2, 3] and again == whole


def test_a_load_beside_a_job_that_prunes_lists_again(launcher: Launcher, save: Path, tmp_path: Path) -> None:
    """All that it has listed is gone when it comes to load; newer checkpoints are there."""
    others = tmp_path / "others"
    others.mkdir()
    for step in range(1, STEPS + 1):
        directory = save / f"global_step{step}"
        if step >= STEPS - 1:
            directory.rename(others / directory.name)
    (save / "latest").unlink()
    script = Path(__file__).with_name("scripts") / "pruned_while_loading.py"
    done = resume(launcher, save, script=str(script), env={"OTHERS": str(others)})
    assert done.ok, done.output[-6000:]
    assert loaded_steps(launcher) == [STEPS, STEPS]
    assert "other checkpoints were saved there meanwhile" in done.output
