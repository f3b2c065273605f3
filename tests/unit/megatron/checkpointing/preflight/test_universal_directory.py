"""--universal-checkpoint before torch is imported: another directory, model or run, and missing files, are refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointMismatchError
from megatron.checkpointing.preflight.compatibility import check_newest
from megatron.config import CheckpointConfig, Config, ConfigError
from megatron.config.arguments import config_from_args, parse_args
from megatron.parallel.topology import Layout
from megatron.startup.preflight import check_load
from tests.dist.harness import ROOT
from tests.dist.test_upstream_compat import UPSTREAM, UPSTREAM_ARGUMENTS
from tests.upstream_files import GOLDEN, load_known

HERE = Layout(1, 1, 1)
TAG = "global_step5_universal"
WEIGHT = f"{TAG}/zero/2.mlp.dense_4h_to_h.weight"


@pytest.fixture
def load(tmp_path: Path) -> Path:
    """A --load with the files of a universal checkpoint of upstream's run; those of its parameters are empty."""
    parameter = tmp_path / WEIGHT
    parameter.mkdir(parents=True)
    for name in ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt"):
        (parameter / name).touch()
    (parameter.parent / "optimizer_state.pt").touch()
    shutil.copy(UPSTREAM / "global_step5" / "mp_rank_00_model_states.pt", tmp_path / TAG)
    (tmp_path / "latest_universal").write_text(TAG)
    return tmp_path


def config(load: Path, *flags: str) -> Config:
    argv = [*UPSTREAM_ARGUMENTS, "--data-path", "none", "--tokenizer-type", "NullTokenizer", "--vocab-size", "499"]
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    args = parse_args([*argv, "--load", str(load), "--universal-checkpoint", *flags], env)
    return config_from_args(args, env)


def options(load: Path, load_tag: str | None = None) -> CheckpointConfig:
    return CheckpointConfig(load=str(load), load_tag=load_tag, universal_checkpoint=True)


def test_the_padding_of_the_converted_checkpoint_is_kept_where_tp_divides_it(load: Path) -> None:
    check_load(options(load))
    check_load(options(load, load_tag=TAG))
    assert check_newest(config(load), HERE, GOLDEN.vocab) == GOLDEN.padded
    (load / "latest_universal").unlink()
    assert check_newest(config(load, "--load-tag", TAG), HERE, GOLDEN.vocab) == GOLDEN.padded


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--num-layers", "6"], "another model: num_layers is 4 in the checkpoint and 6 here"),
        (["--optimizer", "sgd"], "--optimizer sgd: "),
        (["--lr", "2e-3"], "learning-rate schedule: max_lr is 0.001 in the checkpoint and 0.002 here"),
        (["--train-iters", "4", "--lr-decay-iters", "10"], "--train-iters 4: .* is of iteration 5"),
    ],
)
def test_another_run_is_refused(load: Path, flags: list[str], why: str) -> None:
    with pytest.raises(CheckpointMismatchError, match=why):
        check_newest(config(load, *flags), HERE, GOLDEN.vocab)


def test_another_vocabulary_is_refused(load: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match="its tokenizer has 500 tokens, and this one 501"):
        check_newest(config(load), HERE, 501)


def test_a_missing_schedule_is_refused(load: Path) -> None:
    path = load / TAG / "mp_rank_00_model_states.pt"
    torch.save(load_known(path) | {"lr_scheduler": None}, path)
    with pytest.raises(CheckpointMismatchError, match="holds no state of the learning-rate schedule"):
        check_newest(config(load), HERE, GOLDEN.vocab)
    assert check_newest(config(load, "--no-load-lr-state"), HERE, GOLDEN.vocab) == GOLDEN.padded


def test_a_missing_file_is_named(load: Path) -> None:
    for missing in (f"{WEIGHT}/exp_avg.pt", f"{TAG}/zero/optimizer_state.pt"):
        (load / missing).unlink()
        with pytest.raises(CheckpointDamagedError, match=f"{load / missing} is missing: the conversion did not finish"):
            check_newest(config(load), HERE, GOLDEN.vocab)
        (load / missing).touch()
    (load / WEIGHT / "exp_avg.pt").unlink()
    assert check_newest(config(load, "--no-load-optim"), HERE, GOLDEN.vocab) == GOLDEN.padded
    (load / WEIGHT / "fp32.pt").unlink()
    with pytest.raises(CheckpointDamagedError, match=r"fp32\.pt is missing"):
        check_newest(config(load, "--finetune"), HERE, GOLDEN.vocab)
    shutil.rmtree(load / WEIGHT)
    with pytest.raises(CheckpointDamagedError, match="holds no parameter"):
        check_newest(config(load), HERE, GOLDEN.vocab)
    first = load / TAG / "mp_rank_00_model_states.pt"
    first.write_bytes(first.read_bytes()[:-100])
    with pytest.raises(CheckpointDamagedError, match=f"{first}: missing, or no file of torch.save"):
        check_newest(config(load), HERE, GOLDEN.vocab)


def test_the_directory_must_be_one_of_universal_checkpoints(load: Path) -> None:
    (load / "global_step5").mkdir()
    for given, why in (
        (options(UPSTREAM), r"latest_universal is missing; convert a checkpoint with python -m deepspeed\.checkpoint"),
        (options(UPSTREAM, load_tag="global_step5"), "global_step5 is no universal checkpoint.*drop the flag to load"),
        (options(load, load_tag="global_step5"), "global_step5 is no universal checkpoint, since it has no zero/"),
        (options(load, load_tag="global_step6"), "--load-tag names global_step6, which is not in --load"),
        (options(load / TAG), f"is one checkpoint itself: give --load {load} --load-tag {TAG}"),
        (options(load / "absent"), "latest_universal is missing"),
    ):
        with pytest.raises(ConfigError, match=why):
            check_load(given)
    pointer = load / "latest_universal"
    for content, why in ((b"gone", "names gone, which is not in"), (b"../x", "names no checkpoint"), (b"\xff", "text")):
        pointer.write_bytes(content)
        with pytest.raises(ConfigError, match=why):
            check_load(options(load))
    pointer.unlink()
    with pytest.raises(ConfigError, match=f"latest_universal is missing; give --load-tag {TAG} if its conversion has"):
        check_load(options(load))


def test_without_the_flag_a_universal_checkpoint_is_no_reason_to_start_from_0(load: Path) -> None:
    hint = "add --universal-checkpoint to load it"
    for tag, why in (
        (None, f"holds a universal checkpoint alone .{TAG}.; {hint}"),
        (TAG, f"--load-tag {TAG}: is a universal checkpoint, .*; {hint}"),
    ):
        with pytest.raises(ConfigError, match=why):
            check_load(CheckpointConfig(load=str(load), load_tag=tag))
    with pytest.raises(ConfigError, match=f"give --load {load} --load-tag {TAG} --universal-checkpoint"):
        check_load(CheckpointConfig(load=str(load / TAG)))
    (load / "latest").write_text(TAG)
    with pytest.raises(ConfigError, match=f"latest names {TAG}, which is a universal checkpoint.*{hint}"):
        check_load(CheckpointConfig(load=str(load)))


def test_all_of_this_is_asked_without_torch() -> None:
    code = "import sys; import megatron.checkpointing.preflight.universal_directory; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
