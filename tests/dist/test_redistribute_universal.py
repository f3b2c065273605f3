"""--redistribute universal: DeepSpeed's universal checkpoint, made and loaded on resume, is ours bit for bit."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest

from megatron.checkpointing.naming import TEMPORARY_PREFIX
from megatron.checkpointing.reshard.universal import CONVERSION_EVENT
from megatron.parallel.topology import Layout
from tests.dist.harness import Zygote, losses, records
from tests.dist.redistribute_runs import SAVED, Model, assembled, assert_same, rows_from, shown
from tests.dist.test_damaged_checkpoints import flip_bit_in_record
from tests.dist.tiny_runs import Launcher

ALL_THREE = Layout(2, 2, 2)
ONE_OF_TP, TWO_OF_TP = Layout(1, 2, 1), Layout(2, 1, 2)
UNIVERSAL = ("--redistribute", "universal")
# From TP1, too: there upstream's patterns leave out what is split along its columns.
CASES = [
    ("llama", ALL_THREE, Layout(4, 1, 2)),
    ("llama_odd", ONE_OF_TP, TWO_OF_TP),
    ("classic", ALL_THREE, Layout(1, 4, 1)),
    ("classic_fp16", Layout(2, 1, 2), Layout(1, 2, 1)),
]


@pytest.fixture(scope="module")
def models(zygote: Zygote, dataset: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    styles = dict.fromkeys(style for style, _, _ in CASES)
    return {style: Model(Launcher(zygote, dataset, tmp_path_factory.mktemp(style)), style) for style in styles}


def left_in(save: Path) -> list[str]:
    """What a conversion has left beside the checkpoints."""
    return [path.name for path in save.iterdir() if "universal" in path.name]


@pytest.mark.parametrize(
    ("style", "old", "new"), CASES, ids=lambda value: value if isinstance(value, str) else shown(value)
)
def test_both_ways_agree_bit_for_bit(models: dict[str, Model], style: str, old: Layout, new: Layout) -> None:
    """Weights, masters and moments of the true vocabulary; rows that are new here, of no token, are zero either way."""
    model = models[style]
    source = model.launcher.directory / model.saved(old, "torch")
    direct, universal = model.moved(old, new, "torch"), model.moved(old, new, "torch", *UNIVERSAL)
    assert_same(assembled(universal), assembled(direct))
    held = json.loads((source / f"global_step{SAVED}" / "manifest.json").read_text())["model"]["padded_vocab_size"]
    new_rows = rows_from(direct, held)
    assert (style == "llama_odd") == any(len(rows) for rows in new_rows.values())
    for rows in itertools.chain(rows_from(universal).values(), new_rows.values()):
        assert not rows.any()
    assert left_in(source) == []
    spans = [r for r in records(universal / "restart_trace", rank=0) if r["type"] == "span"]
    assert {("redistribute", "reshard"), ("load", "deserialize"), ("load", "verify")} <= {
        (span["phase"], span.get("detail")) for span in spans if span["operation"] == "load"
    }
    events = [r for r in records(universal / "restart_trace") if r["type"] == "event"]
    (notice,) = [json.loads(r["detail"]) for r in events if r["phase"] == CONVERSION_EVENT]
    assert notice["imports_s"] > 0 and notice["conversion_s"] > 0


def test_training_goes_on(models: dict[str, Model]) -> None:
    """The rows of no token are zero, and take part in the softmax: the loss is another one by about their share."""
    model = models["llama_odd"]
    source = model.train(ONE_OF_TP, "goes_on", 4, engine="torch")
    resumed = model.train(TWO_OF_TP, "goes_on_elsewhere", 4, "goes_on", "--load-tag", f"global_step{SAVED}", *UNIVERSAL)
    before, after = losses(source / "restart_trace"), losses(resumed / "restart_trace")
    assert sorted(after) == [3, 4]
    for step, loss in after.items():
        assert loss == pytest.approx(before[step], rel=2e-2)


def test_a_checkpoint_of_engine_lazy_is_refused_before_any_read(models: dict[str, Model]) -> None:
    model = models["llama_odd"]
    save = model.launcher.directory / model.saved(ONE_OF_TP)
    run = model.resume(TWO_OF_TP, save, *UNIVERSAL, "--train-iters", "5")
    assert run.exit_codes == [2] * 4
    assert (
        f"error: --redistribute universal: DeepSpeed converts files of torch.save, and {save / f'global_step{SAVED}'} "
        "was saved with --checkpoint-engine lazy; drop the flag, or load a checkpoint of torch, fastpersist or "
        "fastpersist-decoupled" in run.log(0)
    )


def test_what_stops_a_conversion_ends_all_ranks(models: dict[str, Model], tmp_path: Path) -> None:
    """A flipped bit is found before; without verification the file that DeepSpeed cannot read is named."""
    model = models["llama_odd"]
    old, new = ONE_OF_TP, TWO_OF_TP
    save = Path(shutil.copytree(model.launcher.directory / model.saved(old, "torch"), tmp_path / "run"))
    shard = save / f"global_step{SAVED}" / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"
    flip_bit_in_record(shard, "data.pkl")
    run = model.resume(new, save, *UNIVERSAL, "--train-iters", "5")
    assert run.exit_codes == [2] * new.world_size
    assert f"{shard}: record " in run.log(0) and "no checkpoint there is whole" in run.log(0)

    shard.write_bytes(bytes(shard.stat().st_size))
    run = model.resume(new, save, *UNIVERSAL, "--train-iters", "5", "--checkpoint-verify", "size")
    assert run.exit_codes == [2] * new.world_size
    (error,) = [line for line in run.output.splitlines() if line.startswith("error:")]
    assert f"--redistribute universal: DeepSpeed could not convert {save / f'global_step{SAVED}'} into " in error
    assert "exit code 1" in error
    assert left_in(save) == [] and not [path for path in save.iterdir() if path.name.startswith(TEMPORARY_PREFIX)]
