"""Upstream's own checkpoint, of TP2 PP2 DP2, goes on on other layouts with upstream's losses.

That every bit of its masters and moments arrives is tested in unit/test_upstream_layouts.py, over many layouts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.parallel.topology import Layout
from tests.dist.harness import Zygote, losses, records
from tests.dist.redistribute_runs import read
from tests.dist.test_upstream_compat import (
    LAYOUT,
    LOSS_TOLERANCE,
    SHARPENED_LOSSES,
    SHARPENED_TOLERANCE,
    UPSTREAM,
    UPSTREAM_ARGUMENTS,
    UPSTREAM_LOSSES,
    copied,
    sharpen,
)
from tests.dist.tiny_runs import Launcher, buffered_saving
from tests.placement_reader import bits
from tests.upstream_files import GOLDEN, SINCE_BLOCKS, assembled, interleaved, load_known


@pytest.fixture
def launcher(zygote: Zygote, dataset: list[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, dataset, tmp_path)


def resumed(launcher: Launcher, layout: Layout, load: Path, *flags: str) -> tuple[dict[int, float], str]:
    """Losses to the end, and the log of rank 0."""
    trace = launcher.directory / "trace"
    run = launcher.train(layout, *UPSTREAM_ARGUMENTS, "--load", load, "--restart-trace-dir", trace, *flags)
    assert "resumed from iteration 5" in run.log(0)
    assert "global_step5 has no manifest (upstream wrote it, on TP2 PP2 DP2)" in run.log(0)
    assert run.log(0).count("Random state is seeded anew") == 1
    return losses(trace), run.log(0)


def test_goes_on_elsewhere_with_upstreams_losses(launcher: Launcher) -> None:
    found, log = resumed(launcher, Layout(4, 1, 1), UPSTREAM)
    assert found == pytest.approx(UPSTREAM_LOSSES, abs=LOSS_TOLERANCE)
    assert "continues with L2" in log
    spans = [r for r in records(launcher.directory / "trace", rank=0) if r["type"] == "span"]
    assert ("load", "verify") in {(span["phase"], span.get("detail")) for span in spans}


def test_a_rank_that_alone_cannot_read_it_ends_all(launcher: Launcher) -> None:
    script = str(Path(__file__).parent / "scripts" / "failing_rank.py")
    at = "megatron.checkpointing.load.newest:check_candidate"
    env = {"FAILS_AT": at, "FAILS_ON": "1", "FAILS_WITH": "CheckpointDamagedError"}
    argv = [*UPSTREAM_ARGUMENTS, "--load", UPSTREAM]
    run = launcher.run(Layout(2, 1, 1), *argv, script=script, env=env)
    assert run.exit_codes == [2, 2], run.output[-6000:]
    assert "no checkpoint there is whole: rank 1: of rank 1 alone." in run.log(0)


def lay_by_heads(checkpoint: Path) -> None:
    """Make of an upstream checkpoint one from before December 2024."""
    name = "query_key_value.weight"
    for path in checkpoint.glob("layer_*.pt"):
        layer = load_known(path)
        torch.save({n: interleaved(t, GOLDEN) if name in n else t for n, t in layer.items()}, path)
    for path in checkpoint.glob("mp_rank_*.pt"):
        state = load_known(path)
        del state["args"].model_type  # a class of upstream's
        delattr(state["args"], SINCE_BLOCKS)
        torch.save(state, path)
    shards = {path: load_known(path) for path in sorted(checkpoint.glob("*optim_states.pt"))}
    for rank in range(LAYOUT.tp * LAYOUT.pp):
        replicas = [s["optimizer_state_dict"] for path, s in shards.items() if f"mp_rank_{rank:02d}" in path.name]
        for mapping in replicas[0]["param_slice_mappings"][0] | replicas[1]["param_slice_mappings"][0]:
            if name in mapping:
                _lay_master_by_heads(replicas, mapping)
    for path, shard in shards.items():
        torch.save(shard, path)


def _lay_master_by_heads(replicas: list[dict[str, Any]], name: str) -> None:
    """Of one fused QKV, whose master and moments lie in the shards of the DP replicas, one after the other."""
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        views = []
        for shard in replicas:
            base = shard["base_optimizer_state"]["state"][0]
            flat = shard["single_partition_of_fp32_groups"][0] if kind == "master" else base[kind]
            at = shard["param_slice_mappings"][0].get(name)
            views += [flat.data[at.start : at.start + at.numel]] if at else []
        moved = interleaved(torch.cat(views).reshape(-1, GOLDEN.hidden), GOLDEN).reshape(-1)
        for view, part in zip(views, moved.split([len(view) for view in views]), strict=True):
            view.copy_(part)


@pytest.mark.parametrize("layout", [LAYOUT, Layout(1, 4, 1)], ids=str)
def test_heads_of_an_older_upstream_find_each_other(launcher: Launcher, layout: Layout) -> None:
    """Sharpened: rows of query, key and value in another order each move a loss by 0.05 or more."""
    load = copied(UPSTREAM, launcher.directory / "load")
    sharpen(load / "global_step5")
    lay_by_heads(load / "global_step5")
    found, log = resumed(launcher, layout, load)
    assert found == pytest.approx(SHARPENED_LOSSES, abs=SHARPENED_TOLERANCE)
    assert "its fused QKV rearranged from heads to blocks" in log


def test_every_bit_arrives_in_a_real_training(launcher: Launcher) -> None:
    """Loaded onto TP1 PP4 DP1 and saved again at once, with the model's own parameters for targets."""
    save = launcher.directory / "run"
    at_once = ["--train-iters", "5", "--checkpoint-engine", "lazy"]
    launcher.train(Layout(1, 4, 1), *UPSTREAM_ARGUMENTS, *buffered_saving(save, 5)[:-1], "--load", UPSTREAM, *at_once)
    expected = assembled(GOLDEN, UPSTREAM / "global_step5", LAYOUT)
    reader = read(save, 5)
    for kind, of_kind in expected.items():
        found = reader.whole(kind)
        assert found.keys() == of_kind.keys()
        for name, values in of_kind.items():
            assert torch.equal(bits(found[name].reshape(-1)), bits(values.reshape(-1))), (kind, name)
    for name, weight in reader.whole("weight").items():
        assert torch.equal(weight, expected["master"][name].bfloat16()), name
