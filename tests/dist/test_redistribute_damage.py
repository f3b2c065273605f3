"""A flipped bit never becomes a weight on another layout either, and what one rank finds ends all of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing.engines.base import EngineOptions, SavedCheckpoint
from megatron.checkpointing.engines.lazy import format as lazy_format
from megatron.checkpointing.engines.lazy import header as lazy_header
from megatron.checkpointing.engines.registry import create_engine
from megatron.checkpointing.engines.torch_files import position_in_file
from megatron.checkpointing.store.manifest import Manifest
from megatron.parallel.topology import Layout
from restart_trace.recorder import untraced_operation
from tests.dist.harness import Run, Zygote, losses, records
from tests.dist.redistribute_runs import Model
from tests.dist.test_damaged_checkpoints import flip_bit
from tests.dist.test_parallel_load import assert_one_rank_failed
from tests.dist.tiny_runs import Launcher

OLD, NEW = Layout(2, 2, 1), Layout(1, 4, 1)
SCRIPT = Path(__file__).parent / "scripts" / "failing_rank.py"
STEPS = 4
SHARD = "bf16_zero_pp_rank_0_mp_rank_02_optim_states.pt"  # of the second stage, first TP rank
LAYER = "layer_03-model_01-model_states.pt"


@pytest.fixture(scope="module", params=["torch", "lazy"])
def trained(
    request: pytest.FixtureRequest, zygote: Zygote, dataset: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Model, Path]:
    """Checkpoints after the iterations 1 to STEPS."""
    launcher = Launcher(zygote, dataset, tmp_path_factory.mktemp(request.param))
    model = Model(launcher, "llama")
    save = model.train(OLD, "run", STEPS, None, "--save-interval", "1", engine=request.param)
    return model, save


@pytest.fixture
def damaged(trained: tuple[Model, Path], tmp_path: Path) -> tuple[Model, Path]:
    """A copy of the checkpoints, to damage."""
    model, save = trained
    launcher = Launcher(model.launcher.zygote, model.launcher.dataset, tmp_path)
    return Model(launcher, "llama"), Path(shutil.copytree(save, tmp_path / "run"))


def flip_in(tag: Path, state: str, *path: Any) -> Path:
    """Flip a bit in the middle of the tensor at `path` of a state; the file that it lies in."""
    manifest = Manifest.from_json((tag / "manifest.json").read_text())
    if manifest.engine == "torch":
        nest = create_engine("torch", EngineOptions()).load_values(
            state, SavedCheckpoint(tag, manifest.files), untraced_operation()
        )
        for key in path:
            nest = nest[key]
        flip_bit(tag / state, position_in_file(nest) + nest.numel() * nest.element_size() // 2, bit=4)
        return tag / state
    (file,) = [tag / name for name, held in manifest.files.items() if held.holds(state)]
    contents = lazy_format.decode(lazy_header.read_header(file), file)
    entry = contents.entries["/".join([state, *map(str, path)])]
    flip_bit(file, contents.data_start + (entry.start + entry.stop) // 2, bit=4)
    return file


def rejections(launcher: Launcher, rank: int) -> list[str]:
    found = [r for r in records(launcher.directory / "trace", rank=rank) if r["type"] == "event"]
    return [r["detail"] for r in found if r["phase"] == "checkpoint_rejected"]


def test_a_flipped_bit_is_found_and_the_checkpoint_before_is_used(damaged: tuple[Model, Path]) -> None:
    """In a moment of the newest checkpoint, and in a master of the one before: by all ranks, before training."""
    model, save = damaged
    optimizer = "optimizer_state_dict"
    files = [
        flip_in(save / "global_step4", SHARD, optimizer, "base_optimizer_state", "state", 0, "exp_avg_sq"),
        flip_in(save / "global_step3", SHARD, optimizer, "single_partition_of_fp32_groups", 0),
    ]
    run = model.resume(NEW, save, "--train-iters", "5")
    assert run.ok, run.output[-6000:]
    trace = model.launcher.directory / "trace"
    assert sorted(losses(trace)) == [3, 4, 5], "it goes on from iteration 2"
    for rank in range(NEW.world_size):
        moment, master = rejections(model.launcher, rank)
        assert moment.startswith(f"{files[0]}: ") and "exp_avg_sq" in moment and "checksum" in moment
        assert master.startswith(f"{files[1]}: ") and "checksum" in master
        assert "master" in master or "single_partition_of_fp32_groups" in master
    assert run.log(0).count("does not have the checksum it was saved with") == 2


def test_a_flipped_bit_in_a_weight_ends_all_ranks(damaged: tuple[Model, Path]) -> None:
    """Of the only checkpoint. With the optimizer the weights are its masters, and are not read."""
    model, save = damaged
    file = flip_in(save / "global_step4", LAYER, "mlp.dense_4h_to_h.weight")
    flags = ["--load-tag", "global_step4", "--train-iters", "5"]
    alone = model.resume(NEW, save, *flags, "--no-load-optim")
    assert alone.exit_codes == [2] * NEW.world_size, alone.output[-6000:]
    assert alone.output.count("error:") == 1
    for text in ("error:", str(file), "mlp.dense_4h_to_h.weight", "no checkpoint there is whole"):
        assert text in alone.log(0)
    assert not losses(model.launcher.directory / "trace")
    whole = model.resume(NEW, save, *flags)
    assert whole.ok, whole.output[-6000:]


def test_checksums_can_be_left_out(damaged: tuple[Model, Path]) -> None:
    model, save = damaged
    flip_in(save / "global_step4", SHARD, "optimizer_state_dict", "single_partition_of_fp32_groups", 0)
    flags = ["--train-iters", "5", "--checkpoint-verify", "size"]
    run = model.resume(NEW, save, *flags)
    assert run.ok, run.output[-6000:]
    assert sorted(losses(model.launcher.directory / "trace")) == [5]


def error_of(run: Run, exit_code: int = 2) -> str:
    """The one error, which ends every rank by itself."""
    assert run.exit_codes == [exit_code] * NEW.world_size, run.output[-6000:]
    (error,) = [line for line in run.output.splitlines() if line.startswith("error:")]
    return error


@pytest.mark.parametrize("trained", ["lazy"], indirect=True)  # torch's files do not say how many tokens there are
def test_a_mismatch_that_some_ranks_see_ends_all(trained: tuple[Model, Path]) -> None:
    """Another vocabulary of the same padding: the stages between the embedding and the head hold none of it."""
    model, save = trained
    manifest = json.loads((save / "global_step4" / "manifest.json").read_text())
    padded = manifest["model"]["padded_vocab_size"]
    other = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(padded - 2)]
    error = error_of(model.resume(NEW, save, "--train-iters", "5", *other))
    assert "word_embeddings.weight has " in error and f" tokens in the checkpoint and {padded - 1} here" in error


@pytest.mark.parametrize("trained", ["lazy"], indirect=True)  # whose files they are makes no difference
@pytest.mark.parametrize(
    ("function", "kind", "exit_code", "message"),
    [
        ("plan", "CheckpointMismatchError", 2, "error: of rank 2 alone"),
        ("plan", "EngineUnavailableError", 2, "error: rank 2: EngineUnavailableError: of rank 2 alone"),
        ("plan", "KeyError", 1, "error: rank 2: KeyError: 'of rank 2 alone'"),
        ("restore_optimizer", "RuntimeError", 1, "error: rank 2: RuntimeError: of rank 2 alone"),
    ],
)
def test_an_error_of_one_rank_ends_all(
    trained: tuple[Model, Path], function: str, kind: str, exit_code: int, message: str
) -> None:
    """Exit code 2 is for errors of the input, since megatron.launch gives up after two such starts in a row."""
    model, save = trained
    env = {"FAILS_AT": f"megatron.checkpointing.reshard.direct:{function}", "FAILS_WITH": kind, "FAILS_ON": "2"}
    argv = [*model.flags, "--load", str(save), "--train-iters", "5"]
    run = model.launcher.run(NEW, *argv, script=str(SCRIPT), env=env)
    assert error_of(run, exit_code) == message
    assert ("Traceback" in run.log(2)) == (kind != "CheckpointMismatchError")


@pytest.mark.parametrize("trained", ["lazy"], indirect=True)
@pytest.mark.parametrize(
    ("function", "what", "flags"),
    [
        ("update_weights", "exchange of weights", []),
        ("broadcast_within_replicas", "exchange of weights", ["--no-load-optim"]),
        ("restore_tied_weights", "sharing of tied weights", ["--no-load-optim"]),
    ],
)
def test_an_error_of_one_rank_in_an_exchange_ends_all(
    trained: tuple[Model, Path], function: str, what: str, flags: list[str]
) -> None:
    """The limit of the others' waits is longer than the test may take."""
    model, save = trained
    layout = Layout(1, 2, 2)
    env = {
        "FAILS_AT": f"megatron.checkpointing.reshard.direct:{function}", "FAILS_WITH": "RuntimeError", "FAILS_ON": "2",
    }  # fmt: skip
    argv = [*model.flags, "--load", str(save), "--train-iters", "5", "--distributed-timeout-minutes", "60", *flags]
    run = model.launcher.run(layout, *argv, script=str(SCRIPT), env=env)
    assert_one_rank_failed(run, layout.world_size, 2, what)
