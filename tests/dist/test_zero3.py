"""--zero-stage 3: no rank has whole weights, and a checkpoint is DeepSpeed's of that stage. And --cpu-optimizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.hf.checkpoints import SavedModel, newest_checkpoint
from megatron.hf.errors import ConversionError
from megatron.parallel.topology import Layout
from tests.dist.harness import LLAMA_STYLE, Zygote, kill_all, losses, records, wait_for
from tests.dist.save_stages import stage_after
from tests.dist.tiny_runs import (
    DROPOUT,
    MODEL,
    PRECISIONS,
    RECOMPUTE,
    TRAINING,
    Launcher,
    assert_same_checkpoint,
    buffered_saving,
    from_iteration,
    hashes,
    load_file,
    losses_of_ranks,
    saving,
    state_files,
)

TWO, FOUR = Layout(tp=1, pp=1, dp=2), Layout(tp=1, pp=1, dp=4)
CLASSIC = [*MODEL, *TRAINING, *DROPOUT, *RECOMPUTE]
DECAY = ["--lr-decay-iters", "8"]  # the same for all lengths of a run
HELD_IN_SAVE = str(Path(__file__).with_name("scripts") / "held_in_save.py")


@pytest.fixture
def launcher(zygote: Zygote, dataset: list[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, dataset, tmp_path)


def stage_3(directory: Path) -> list[str]:
    """Flags with which weights are divided, small ones too, and released after each layer; matrices in two groups."""
    zero = {
        "stage3_param_persistence_threshold": 100, "stage3_max_live_parameters": 1000, "stage3_max_reuse_distance": 0,
        "sub_group_size": 20_000,
    }  # fmt: skip
    path = directory / "zero3.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    return ["--zero-stage", "3", "--no-pipeline-parallel", "--deepspeed_config", str(path)]


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Of a ZeRO-1 checkpoint without TP, by the names of the model's parameters."""
    found = {}
    for path in checkpoint.glob("layer_*"):
        number = int(path.name.split("_")[1].split("-")[0])
        prefix = "tied_modules.embed" if number == 1 else str(number)
        found |= {f"{prefix}.{key}": value for key, value in load_file(path).items()}
    return found


def optimizer_states(directory: Path) -> dict[str, list[float]]:
    """What --log-optimizer-states-to-tensorboard has written, by name, one value an iteration."""
    board = EventAccumulator(str(directory))
    board.Reload()
    tags = [tag for tag in board.Tags()["scalars"] if tag.startswith("optimizer/") and " vs " not in tag]
    return {tag: [event.value for event in board.Scalars(tag)] for tag in tags}


@pytest.mark.parametrize(("precision", "layout", "more"), [
    ("fp32", TWO, []), ("fp16", FOUR, ["--ds-sequence-parallel-size", "2", "--loss-scale", "1024"]),
])  # fmt: skip
def test_losses_and_weights_are_those_of_zero_1(
    launcher: Launcher, precision: str, layout: Layout, more: list[str]
) -> None:
    """The same weights to begin with, and the same masks; sums are rounded otherwise."""
    flags = [*CLASSIC, *PRECISIONS[precision], *more, "--train-iters", "4", "--eval-interval", "2", "--eval-iters", "1"]
    saves = {}
    for name, stage in (("zero_1", []), ("zero_3", stage_3(launcher.directory))):
        saves[name] = launcher.directory / name
        board = ["--tensorboard-dir", str(saves[name] / "board"), "--log-optimizer-states-to-tensorboard"]
        launcher.train(layout, *flags, *stage, *board, *buffered_saving(saves[name], 4))
    one, three = (losses_of_ranks(save, layout) for save in saves.values())
    of_losses, of_weights = (1e-5, 1e-4) if precision == "fp32" else (1e-3, 1e-3)
    assert one[0][1] == three[0][1]
    for mine, theirs in zip(one, three, strict=True):
        assert mine.keys() == theirs.keys() and three[0] == theirs
        assert all(abs(mine[step] - theirs[step]) < of_losses for step in mine)
    boards = [optimizer_states(save / "board") for save in saves.values()]
    assert boards[0].keys() == boards[1].keys() and len(boards[0]) == 12
    assert all(boards[1][tag] == pytest.approx(values, rel=1e-3) for tag, values in boards[0].items())
    expected = weights_of(saves["zero_1"] / "global_step4")
    found = get_fp32_state_dict_from_zero_checkpoint(str(saves["zero_3"]))
    assert found is not None and found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight.float(), atol=of_weights, rtol=0)


@pytest.mark.parametrize(("precision", "more"), [
    ("bf16", ["--checkpoint-engine", "lazy"]), ("fp32", ["--cpu-optimizer"]),
    pytest.param("fp16", [], marks=pytest.mark.nightly(minutes=1)),  # of which DeepSpeed's optimizer is fp32's
])  # fmt: skip
def test_resumed_after_a_kill_bit_for_bit(launcher: Launcher, precision: str, more: list[str]) -> None:
    """Killed within its second save; what is saved after the resume is what a run without a kill has saved."""
    flags = [*CLASSIC, *PRECISIONS[precision], *stage_3(launcher.directory), *more, "--train-iters", "4"]
    whole, killed = launcher.directory / "whole", launcher.directory / "killed"
    launcher.train(TWO, *flags, *buffered_saving(whole, 1))
    mine = [*flags, *saving(killed, 1), "--load", str(killed)]

    def kill_in_save(pids: list[int]) -> None:
        trace = killed / "restart_trace"
        wait_for(lambda: "fsync" in map(stage_after, of_save(trace, 2)), "the second save")
        kill_all(pids)

    run = launcher.run(TWO, *mine, during=kill_in_save, script=HELD_IN_SAVE,
                       env={"HOLD_STAGE": "fsync", "HOLD_SAVE": "2"})  # fmt: skip
    assert run.exit_codes == [-9, -9]
    assert not (killed / "global_step2").exists()
    launcher.train(TWO, *mine)
    for found, expected in zip(losses_of_ranks(killed, TWO, 1), losses_of_ranks(whole, TWO), strict=True):
        assert found == from_iteration([expected], 2)[0]
    assert hashes(killed / "global_step4", TWO) == hashes(whole / "global_step4", TWO)
    if more != ["--checkpoint-engine", "lazy"]:
        assert_same_checkpoint(killed / "global_step4", whole / "global_step4")


def of_save(trace: Path, step: int) -> list[dict[str, object]]:
    """Rank 0's records of the save of an iteration."""
    found = records(trace, 0, 0)
    operations = [r["op"] for r in found if r["type"] == "operation_begin" and r.get("step") == step]
    return [record for record in found if record.get("op") in operations]


def test_files_and_phases(launcher: Launcher) -> None:
    """DeepSpeed's names, small parameters gathered or not; every rank has all phases of a save and of a load."""
    save = launcher.directory / "run"
    flags = [*MODEL, *LLAMA_STYLE, *TRAINING, *DECAY, "--bf16", "--zero-stage", "3", *buffered_saving(save, 2)]
    launcher.train(TWO, *flags, "--train-iters", "2")
    directory = save / "global_step2"
    assert state_files(directory) == sorted(
        name for rank in range(2) for name in (
            f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
        )
    )  # fmt: skip
    assert json.loads((directory / "manifest.json").read_text())["layout"] == {"tp": 1, "pp": 1, "dp": 2, "zero": 3}
    module = load_file(directory / "zero_pp_rank_1_mp_rank_00_model_states.pt")["module"]
    assert module and all(tensor.numel() == 0 for tensor in module.values())
    launcher.train(TWO, *flags, "--train-iters", "3", "--load", str(save))
    for cycle, operation, phases in (
        (0, "save", {"collect", "device_to_host", "serialize", "flush", "barrier", "commit"}),
        (1, "load", {"discover", "load", "redistribute", "barrier"}),
    ):
        for rank in range(2):
            found = [r for r in records(save / "restart_trace", cycle, rank) if r.get("operation") == operation]
            needed = phases if rank == 0 else phases - {"commit"}
            assert needed <= {r["phase"] for r in found if r["type"] == "span"}, (rank, cycle)


def test_what_is_left_of_the_last_part_is_zero(launcher: Launcher) -> None:
    """Three ranks divide hardly any parameter; --deterministic on fills memory that nobody has set with NaN."""
    save, layout = launcher.directory / "run", Layout(tp=1, pp=1, dp=3)
    flags = [*MODEL, *TRAINING, *DECAY, "--global-batch-size", "3", "--deterministic", "on", "--train-iters", "1"]
    launcher.train(layout, *flags, *stage_3(launcher.directory), *buffered_saving(save, 1))
    left = []
    for rank in range(3):
        directory = save / "global_step1"
        shapes = load_file(directory / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")["param_shapes"]
        shard = load_file(directory / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
        flat, offset = torch.cat(shard["fp32_flat_groups"]), 0
        for shape in (shape for group in shapes for shape in group.values()):
            size = -(-shape.numel() // 3)
            held = min(max(shape.numel() - rank * size, 0), size)
            left.append(flat[offset + held : offset + size])
            offset += size
        assert offset == flat.numel()
    found = torch.cat(left)
    assert found.numel() and torch.equal(found, torch.zeros_like(found))


def test_what_cannot_load_it_says_so(launcher: Launcher) -> None:
    """Another number of ranks, and stage 1; weights alone are restored with --finetune."""
    save = launcher.directory / "run"
    flags = [*MODEL, *TRAINING, *DECAY, "--bf16"]
    launcher.train(TWO, *flags, "--zero-stage", "3", *buffered_saving(save, 1), "--train-iters", "1")
    load = [*flags, "--load", str(save), "--train-iters", "2"]
    for layout, more in ((FOUR, ["--zero-stage", "3"]), (TWO, [])):
        run = launcher.run(layout, *load, *more)
        assert run.exit_codes == [2] * layout.world_size
        assert "saved on TP1 PP1 DP2 ZERO3" in run.output and "start with --zero-stage 3 on 2 ranks" in run.output
    with pytest.raises(ConversionError, match="was saved with --zero-stage 3"):
        SavedModel(newest_checkpoint(save, None))
    trace = launcher.directory / "trace"
    launcher.train(TWO, *load, "--zero-stage", "3", "--finetune", "--restart-trace-dir", str(trace))
    assert sorted(losses(trace)) == [1, 2]


def test_an_optimizer_in_host_memory_changes_no_bit_of_zero_1(launcher: Launcher) -> None:
    """Its checkpoints are loaded with the flag and without; DeepSpeed's own code for it runs on a CPU, too.

    Without clipping: DeepSpeed adds the norm of gradients up differently then, and processors round that differently.
    """
    flags = [*CLASSIC, "--fp16", "--loss-scale", "1024", "--train-iters", "4", "--clip-grad", "0"]
    plain, offloaded, other = (launcher.directory / name for name in ("plain", "offloaded", "other"))
    layout = Layout(tp=1, pp=2, dp=2)
    launcher.train(layout, *flags, *buffered_saving(plain, 2))
    launcher.train(layout, *flags, "--cpu-optimizer", *buffered_saving(offloaded, 2))
    settings = load_file(offloaded / "global_step4" / "mp_rank_00_model_states.pt")["ds_config"]
    assert settings["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    load = ["--load", str(plain), "--load-tag", "global_step2"]
    launcher.train(layout, *flags, "--cpu-optimizer", *load, *buffered_saving(other, 2))
    expected = hashes(plain / "global_step4", layout)
    assert hashes(offloaded / "global_step4", layout) == expected == hashes(other / "global_step4", layout)
    assert losses_of_ranks(offloaded, layout) == losses_of_ranks(plain, layout)
