"""A checkpoint of another model or layout is refused with every difference named."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.checkpointing.engines.base import SavedFile
from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointMismatchError
from megatron.checkpointing.preflight.compatibility import (
    check_candidate,
    check_newest,
    model_identity,
    training_identity,
)
from megatron.checkpointing.store.manifest import Manifest, content_checksum
from megatron.checkpointing.store.search import Candidate
from megatron.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from megatron.parallel.topology import Layout
from tests.unit.hostile import altered
from tests.unit.megatron.checkpointing.engines.datastates_files import packed

FILES = {"f.pt": SavedFile("f.pt", 1, "none")}
HERE = Layout(tp=2, pp=1, dp=2)
VOCAB = 512
OF_BLOOM: dict[str, Any] = {"position_embedding_type": "alibi", "embed_layernorm": True}
UPSTREAM = Path(__file__).resolve().parents[4] / "golden" / "upstream_run"


def config(
    training: Mapping[str, Any] | None = None, optimizer: Mapping[str, Any] | None = None, **model: Any
) -> Config:
    of_training: dict[str, Any] = {"micro_batch_size": 1, "train_iters": 9} | dict(training or {})
    of_optimizer: dict[str, Any] = {"lr": 1e-3} | dict(optimizer or {})
    shape = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "params_dtype": "bf16"}
    return Config(
        model=ModelConfig(**(shape | model)),
        parallel=ParallelConfig(),
        training=TrainingConfig(**of_training),
        optimizer=OptimizerConfig(**of_optimizer),
        data=DataConfig(tokenizer_type="NullTokenizer", vocab_size=500),
    )


def candidate(config: Config, layout: Layout = HERE) -> Candidate:
    identity = model_identity(config.model, VOCAB)
    training = training_identity(config)
    manifest = Manifest("global_step5", 5, "torch", layout.as_dict(), identity, FILES, training=training)
    return Candidate(Path("/save/global_step5"), "global_step5", 5, manifest)


def test_same_model_and_layout_pass() -> None:
    check_candidate(candidate(config()), config(), HERE, VOCAB)
    # What may change between two launches is no part of the model.
    check_candidate(candidate(config(hidden_dropout=0.0)), config(hidden_dropout=0.1), HERE, VOCAB)


@pytest.mark.parametrize(
    ("saved", "here", "difference"),
    [
        ({"hidden_size": 128}, {}, "hidden_size is 128 in the checkpoint and 64 here"),
        ({"num_layers": 5}, {}, "num_layers is 5 in the checkpoint and 4 here"),
        ({"num_key_value_heads": 2}, {}, "num_key_value_heads is 2 in the checkpoint and 4 here"),
        ({"ffn_hidden_size": 100}, {}, "ffn_hidden_size is 100 in the checkpoint and 256 here"),
        ({"swiglu": True}, {}, "swiglu is True in the checkpoint and False here"),
        ({"params_dtype": "fp32"}, {}, "params_dtype is fp32 in the checkpoint and bf16 here"),
        ({}, {"normalization": "rmsnorm"}, "normalization is layernorm in the checkpoint and rmsnorm here"),
        ({"max_position_embeddings": 128}, {}, "max_position_embeddings is 128 in the checkpoint and 64 here"),
        ({"embed_layernorm": True}, {}, "embed_layernorm is True in the checkpoint and False here"),
        (
            {"use_rotary_position_embeddings": True},
            {"position_embedding_type": "alibi"},
            "position_embedding_type is rotary in the checkpoint and alibi here",
        ),
    ],
)
def test_another_model(saved: dict[str, Any], here: dict[str, Any], difference: str) -> None:
    with pytest.raises(CheckpointMismatchError) as caught:
        check_candidate(candidate(config(**saved)), config(**here), HERE, VOCAB)
    assert str(caught.value).startswith("/save/global_step5: another model: ")
    assert difference in str(caught.value)


@pytest.mark.parametrize("kind", ["absolute", "rotary", "none"])
def test_what_an_earlier_version_did_not_write_is_what_it_had(kind: str) -> None:
    """Its manifests lack both settings, and say by two others which position embeddings the model has."""
    here = config(position_embedding_type=kind)
    saved = candidate(here)
    assert saved.manifest is not None
    model = {name: value for name, value in saved.manifest.model.items() if name not in OF_BLOOM}
    model |= {"use_rotary_position_embeddings": kind == "rotary", "add_position_embedding": kind == "absolute"}
    earlier = dataclasses.replace(saved, manifest=dataclasses.replace(saved.manifest, model=model))
    check_candidate(earlier, here, HERE, VOCAB)
    for name, value in OF_BLOOM.items():
        with pytest.raises(CheckpointMismatchError, match=f"{name} is .* in the checkpoint and {value} here"):
            other: dict[str, Any] = {"position_embedding_type": kind} | {name: value}
            check_candidate(earlier, config(**other), HERE, VOCAB)


ANOTHER = "learning-rate schedule: {} in the checkpoint and {} here"


@pytest.mark.parametrize(
    ("saved", "here", "difference"),
    [
        ({"optimizer": {"optimizer": "sgd"}}, {}, "--optimizer adam: .* was saved with --optimizer sgd"),
        ({"optimizer": {"lr": 2e-3}}, {}, ANOTHER.format("max_lr is 0.002", "0.001")),
        ({"optimizer": {"lr_decay_style": "cosine"}}, {}, ANOTHER.format("lr_decay_style is cosine", "linear")),
        ({"training": {"train_iters": 12}}, {}, ANOTHER.format("lr_decay_steps is 12", "9")),
        ({"optimizer": {"weight_decay": 0.5}}, {}, ANOTHER.format("start_wd is 0.5", "0.01")),
    ],
)
def test_another_optimizer_or_schedule_is_refused_by_the_manifest(
    saved: dict[str, Any], here: dict[str, Any], difference: str, tmp_path: Path
) -> None:
    """Before torch is imported, and before anything else of the checkpoint is read."""
    found = candidate(config(**saved))
    with pytest.raises(CheckpointMismatchError, match=difference):
        check_candidate(found, config(**here), HERE, VOCAB)
    assert found.manifest is not None
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "global_step5" / "manifest.json").write_text(found.manifest.to_json())
    loading = dataclasses.replace(config(**here), checkpoint=CheckpointConfig(load=str(tmp_path)))
    with pytest.raises(CheckpointMismatchError, match=difference):
        check_newest(loading, HERE, 500)
    passing: list[dict[str, Any]] = [{"finetune": True}, {"no_load_optim": True, "no_load_lr_state": True}]
    for flags in passing:
        check_newest(dataclasses.replace(loading, checkpoint=CheckpointConfig(load=str(tmp_path), **flags)), HERE, 500)
    decided = dataclasses.replace(loading.optimizer, override_opt_param_scheduler=True)
    if "--optimizer" not in difference:
        check_newest(dataclasses.replace(loading, optimizer=decided), HERE, 500)


@pytest.mark.parametrize(
    ("state", "told"),
    [("optim", "holds no optimizer state"), ("rng", "holds no random state, and dropout would repeat")],
)
def test_a_state_that_was_not_saved_is_asked_for_by_the_manifest(state: str, told: str) -> None:
    """Before anything of the checkpoint is read; random state is of one layout and asked for there alone."""
    saves: dict[str, Any] = {f"no_save_{state}": True}
    bare = CheckpointConfig(save="/save", save_interval=1, **saves)
    found = candidate(dataclasses.replace(config(), checkpoint=bare))
    with pytest.raises(CheckpointMismatchError, match=f"^/save/global_step5: {told}.*give --no-load-{state}"):
        check_candidate(found, config(), HERE, VOCAB)
    loads: tuple[dict[str, Any], ...] = ({f"no_load_{state}": True}, {"finetune": True})
    for flags in loads:
        here = dataclasses.replace(config(), checkpoint=CheckpointConfig(load="/save", **flags))
        check_candidate(found, here, HERE, VOCAB)
    if state == "rng":
        check_candidate(found, config(), Layout(tp=1, pp=1, dp=1), VOCAB, redistributable=True)


def test_what_an_earlier_version_did_not_keep_of_a_training_is_not_compared() -> None:
    found = candidate(config(optimizer={"lr": 2e-3}))
    assert found.manifest is not None
    older = dataclasses.replace(found, manifest=dataclasses.replace(found.manifest, training={}))
    assert "training" not in json.loads(older.manifest.to_json())  # pyright: ignore[reportOptionalMemberAccess]
    check_candidate(older, config(), HERE, VOCAB)


def test_every_difference_is_named() -> None:
    with pytest.raises(CheckpointMismatchError) as caught:
        check_candidate(candidate(config(hidden_size=128, num_layers=5)), config(), HERE, 1024)
    for name in ("hidden_size", "num_layers", "padded_vocab_size is 512 in the checkpoint and 1024 here"):
        assert name in str(caught.value)


@pytest.mark.parametrize("layout", [Layout(1, 2, 2), Layout(2, 1, 1), Layout(2, 2, 1)])
def test_another_layout(layout: Layout) -> None:
    with pytest.raises(CheckpointMismatchError) as caught:
        check_candidate(candidate(config(), layout), config(), HERE, VOCAB, redistributable=False)
    message = str(caught.value)
    assert f"saved on {layout}, but this run is {HERE}, and only a checkpoint of" in message
    assert f"--tensor-model-parallel-size {layout.tp} --pipeline-model-parallel-size {layout.pp}" in message
    assert f"on {layout.world_size} ranks" in message
    for known in (True, None):  # another TP pads the vocabulary otherwise
        assert check_candidate(candidate(config(), layout), config(), HERE, 2 * VOCAB, redistributable=known)
    assert not check_candidate(candidate(config()), config(), HERE, VOCAB, redistributable=True)


@pytest.mark.parametrize(
    ("saved", "here", "fix"),
    [
        (Layout(1, 1, 4, zero=3), Layout(1, 1, 4), "start with --zero-stage 3 on 4 ranks"),
        (Layout(1, 1, 4, zero=3), Layout(1, 1, 2, zero=3), "start with --zero-stage 3 on 4 ranks"),
        (Layout(1, 1, 4), Layout(1, 1, 4, zero=3), "start with --zero-stage 1, or"),
    ],
)
def test_divided_weights_are_loaded_where_they_were_saved_alone(saved: Layout, here: Layout, fix: str) -> None:
    tuned = dataclasses.replace(config(), checkpoint=CheckpointConfig(load="/save", finetune=True))
    with pytest.raises(CheckpointMismatchError) as caught:
        check_candidate(candidate(config(), saved), tuned, here, VOCAB, redistributable=True)
    assert f"saved on {saved}, but this run is {here}" in str(caught.value) and fix in str(caught.value)
    assert not check_candidate(candidate(config(), saved), config(), saved, VOCAB, redistributable=True)


COUNTERS = {"iteration": 5, "global_steps": 5, "global_samples": 20, "skipped_steps": 0}
SINCE_BLOCKS = "ds_sequence_parallel_fpdt"  # upstream's fused QKV is [Q; K; V] since it has this argument


def foreign(directory: Path, **content: Any) -> Candidate:
    tag = directory / "global_step5"
    tag.mkdir(exist_ok=True)
    if content:
        torch.save((COUNTERS if "args" in content else {}) | content, tag / "mp_rank_00_model_states.pt")
    return Candidate(tag, "global_step5", 5, None)


def arguments(**changes: Any) -> argparse.Namespace:
    known = vars(config().model) | {"padded_vocab_size": VOCAB, "bf16": True, "fp16": False}
    known |= {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
    for name in ("params_dtype", *OF_BLOOM):
        known.pop(name)
    known |= {"consumed_train_samples": 20, "consumed_valid_samples": 0, "global_batch_size": 4, "train_iters": 9}
    known |= {"eval_interval": 0, "eval_iters": 0, SINCE_BLOCKS: False}
    return argparse.Namespace(**(known | changes))


def test_checkpoint_without_manifest_is_judged_by_its_arguments(tmp_path: Path) -> None:
    check_candidate(foreign(tmp_path, args=arguments(), dp_world_size=2), config(), HERE, VOCAB)
    with pytest.raises(CheckpointMismatchError, match="hidden_size is 32 in the checkpoint and 64 here"):
        check_candidate(foreign(tmp_path, args=arguments(hidden_size=32), dp_world_size=2), config(), HERE, VOCAB)
    with pytest.raises(CheckpointMismatchError, match="params_dtype is fp16 in the checkpoint and bf16 here"):
        changed = arguments(bf16=False, fp16=True)
        check_candidate(foreign(tmp_path, args=changed, dp_world_size=2), config(), HERE, VOCAB)


def test_bigsciences_checkpoints_are_refused(tmp_path: Path) -> None:
    found = foreign(tmp_path, args=arguments(embed_layernorm=True), dp_world_size=2)
    with pytest.raises(CheckpointMismatchError, match="has args.embed_layernorm, so BigScience's Megatron-DeepSpeed"):
        check_candidate(found, config(embed_layernorm=True), HERE, VOCAB)


def test_upstreams_is_for_another_layout_too_where_torch_reads_it(tmp_path: Path) -> None:
    found = foreign(tmp_path, args=arguments(), dp_world_size=4)
    assert check_candidate(found, config(), HERE, VOCAB, redistributable=True)
    assert check_candidate(found, config(), HERE, 2 * VOCAB, redistributable=True)
    with pytest.raises(CheckpointMismatchError, match="saved on TP2 PP1 DP4, but this run is TP2 PP1 DP2"):
        check_candidate(found, config(), HERE, VOCAB, redistributable=False)
    foreign(tmp_path, args=arguments(), dp_world_size=2)
    assert not check_candidate(found, config(), HERE, VOCAB, redistributable=True)


def test_upstreams_is_cut_anew_where_its_shards_are_other_ones(tmp_path: Path) -> None:
    """Fused QKV head by head (before December 2024); a second position embedding on the last stage."""
    older = arguments()
    delattr(older, SINCE_BLOCKS)
    assert check_candidate(foreign(tmp_path, args=older, dp_world_size=2), config(), HERE, VOCAB)
    stages = Layout(1, 2, 2)
    spare = arguments(tensor_model_parallel_size=1, pipeline_model_parallel_size=2)
    assert check_candidate(foreign(tmp_path, args=spare, dp_world_size=2), config(), stages, VOCAB)
    spare.untie_embeddings_and_output_weights = True
    untied = config(untie_embeddings_and_output_weights=True)
    assert not check_candidate(foreign(tmp_path, args=spare, dp_world_size=2), untied, stages, VOCAB)


def test_checkpoint_of_datastates_without_manifest_is_read_for_who_asks_for_it(tmp_path: Path) -> None:
    found = foreign(tmp_path)
    content = COUNTERS | {"args": arguments(hidden_size=32), "dp_world_size": 2, "some": torch.zeros(3)}
    (found.directory / "mp_rank_00_model_states.pt").write_bytes(packed(content))
    asking = dataclasses.replace(config(), checkpoint=CheckpointConfig(checkpoint_engine="datastates"))
    with pytest.raises(CheckpointMismatchError, match="hidden_size is 32 in the checkpoint and 64 here"):
        check_candidate(found, asking, HERE, VOCAB)
    with pytest.raises(CheckpointDamagedError, match="not a complete torch.save file"):
        check_candidate(found, config(), HERE, VOCAB)


def test_our_own_checkpoint_without_its_manifest_is_damaged(tmp_path: Path) -> None:
    ours = foreign(tmp_path, args=arguments(indexed_samples=(1, 1, 1)), dp_world_size=2)
    with pytest.raises(CheckpointDamagedError, match=f"{tmp_path}/global_step5/manifest.json: missing"):
        check_candidate(ours, config(), HERE, VOCAB)


def test_other_files_without_manifest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointDamagedError, match=r"mp_rank_00_model_states.pt: file is missing"):
        check_candidate(foreign(tmp_path), config(), HERE, VOCAB)
    with pytest.raises(CheckpointMismatchError, match="not a Megatron-DeepSpeed checkpoint"):
        check_candidate(foreign(tmp_path, module={}), config(), HERE, VOCAB)
    (tmp_path / "global_step5" / "mp_rank_00_model_states.pt").write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointDamagedError, match=r"mp_rank_00_model_states.pt: not a complete torch.save file"):
        check_candidate(foreign(tmp_path), config(), HERE, VOCAB)


def test_upstreams_own_checkpoint_tells_what_it_is() -> None:
    found = Candidate(UPSTREAM / "global_step5", "global_step5", 5, None)
    with pytest.raises(CheckpointMismatchError, match="swiglu is True in the checkpoint and False here"):
        check_candidate(found, config(), HERE, VOCAB)


# Before torch is imported


def written(load: Path, step: int, layout: Layout = HERE, **model: Any) -> None:
    manifest = candidate(config(**model), layout).manifest
    assert manifest is not None
    directory = load / f"global_step{step}"
    directory.mkdir()
    (directory / "manifest.json").write_text(manifest.to_json())


def loading(load: Path, tag: str | None = None) -> Config:
    return dataclasses.replace(config(), checkpoint=CheckpointConfig(load=str(load), load_tag=tag))


def test_newest_manifest_decides(tmp_path: Path) -> None:
    written(tmp_path, 9, hidden_size=32)
    written(tmp_path, 10)
    check_newest(loading(tmp_path), HERE, VOCAB)
    with pytest.raises(CheckpointMismatchError, match="hidden_size is 32 in the checkpoint and 64 here"):
        check_newest(loading(tmp_path, "global_step9"), HERE, VOCAB)
    (tmp_path / "global_step10" / "manifest.json").write_text("{")  # the load will tell of it
    with pytest.raises(CheckpointMismatchError, match="global_step9: another model"):
        check_newest(loading(tmp_path), HERE, VOCAB)


def test_of_a_manifest_that_fits_the_beginning_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, 9)
    monkeypatch.setattr(Manifest, "of", lambda directory: pytest.fail("the whole manifest was read"))
    assert check_newest(loading(tmp_path), HERE, VOCAB) == VOCAB


def test_what_only_the_checksum_tells_is_told_by_the_whole_manifest(tmp_path: Path) -> None:
    written(tmp_path, 9)
    written(tmp_path, 10)
    damaged = tmp_path / "global_step10" / "manifest.json"
    damaged.write_text(damaged.read_text().replace('"hidden_size": 64', '"hidden_size": 65'))
    assert check_newest(loading(tmp_path), HERE, VOCAB) == VOCAB  # that of step 9, as the load will find


def test_without_a_manifest_there_is_nothing_to_decide(tmp_path: Path) -> None:
    check_newest(config(), HERE, VOCAB)
    check_newest(loading(tmp_path / "absent"), HERE, VOCAB)
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "restart_trace").mkdir()
    (tmp_path / "latest").write_text("global_step5")
    check_newest(loading(tmp_path), HERE, VOCAB)
    check_newest(loading(tmp_path, "global_step5"), HERE, VOCAB)


def test_an_engine_that_is_not_here_is_missed_before_the_imports(tmp_path: Path) -> None:
    written(tmp_path, 9)
    text = (tmp_path / "global_step9" / "manifest.json").read_text()
    manifest = dataclasses.replace(Manifest.from_json(text), engine="elsewhere")
    (tmp_path / "global_step9" / "manifest.json").write_text(manifest.to_json())
    with pytest.raises(CheckpointMismatchError, match="saved with --checkpoint-engine elsewhere, and only that can"):
        check_newest(loading(tmp_path), HERE, VOCAB)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_manifest_of_any_content_fits_or_is_told_of(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """With the right checksum: before the imports nothing but a mismatch ends the run."""
    load = tmp_path_factory.mktemp("load")
    written(load, 9)
    path = load / "global_step9" / "manifest.json"
    content = json.loads(path.read_text())
    del content["checksum"]
    content = data.draw(altered(content))
    if isinstance(content, dict):
        content["checksum"] = content_checksum(content)
    path.write_text(json.dumps(content, indent=data.draw(st.sampled_from((1, None)))))
    try:
        padded = check_newest(loading(load), HERE, VOCAB)
    except CheckpointMismatchError:
        return
    assert type(padded) is int and padded >= VOCAB


def test_the_padding_of_the_checkpoint_is_kept_where_tp_divides_it(tmp_path: Path) -> None:
    """500 tokens, in multiples of 8 x TP: 504 with TP1, 512 with TP2 or 4. A padding of no TP is no padding of them."""
    model = dataclasses.replace(config().model, make_vocab_size_divisible_by=8)
    here = dataclasses.replace(loading(tmp_path), model=model)
    assert check_newest(here, Layout(1, 1, 1), 500) == 504
    for saved, tp, kept in ((504, 4, 504), (512, 1, 512), (504, 16, 512), (504, 1, 504)):
        shutil.rmtree(tmp_path / "global_step3", ignore_errors=True)
        (tmp_path / "global_step3").mkdir()
        identity = model_identity(here.model, saved)
        manifest = Manifest("global_step3", 3, "torch", Layout(2, 1, 1).as_dict(), identity, FILES)
        (tmp_path / "global_step3" / "manifest.json").write_text(manifest.to_json())
        assert check_newest(here, Layout(tp, 1, 2), 500) == kept
    same = dataclasses.replace(manifest, model=identity | {"padded_vocab_size": 508})
    (tmp_path / "global_step3" / "manifest.json").write_text(same.to_json())
    with pytest.raises(CheckpointMismatchError, match="padded_vocab_size is 508 in the checkpoint and 512 here"):
        check_newest(here, Layout(2, 1, 1), 500)


def upstreams(load: Path = UPSTREAM, **model: Any) -> Config:
    llama = {"use_rotary_position_embeddings": True, "swiglu": True, "normalization": "rmsnorm"}
    llama |= {"ffn_hidden_size": 176, "untie_embeddings_and_output_weights": True, "add_bias_linear": False}
    return dataclasses.replace(config(**(llama | model)), checkpoint=CheckpointConfig(load=str(load)))


def test_the_padding_of_an_upstream_checkpoint_is_kept_too() -> None:
    """512 rows of 500 tokens, from TP2. 128 x TP would be 1,024 on TP8; TP3 does not divide 512, and needs 768."""
    for tp, padded in ((1, 512), (2, 512), (8, 512), (3, 768)):
        assert check_newest(upstreams(), Layout(tp, 1, 1), 500) == padded


def test_another_model_than_upstreams_costs_no_start_up(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match="swiglu is True in the checkpoint and False here"):
        check_newest(upstreams(swiglu=False), HERE, 500)
    foreign(tmp_path, module={}, optimizer=None)
    (tmp_path / "latest").write_text("global_step5")
    with pytest.raises(CheckpointMismatchError, match="mp_rank_00_model_states.pt: no `args` in it"):
        check_newest(loading(tmp_path), HERE, VOCAB)
    foreign(tmp_path, args=arguments(indexed_samples=(1, 1, 1)), dp_world_size=2)
    check_newest(loading(tmp_path), HERE, VOCAB)  # ours without its manifest: the load passes it over


@pytest.mark.parametrize("latest", ["global_step5/..", "/", "", "x" * 300, "a\0b"])
def test_a_latest_that_names_no_directory_here_is_the_loads_to_tell(tmp_path: Path, latest: str) -> None:
    foreign(tmp_path, args=arguments(hidden_size=32), dp_world_size=2)
    (tmp_path / "latest").write_text(latest)
    check_newest(loading(tmp_path), HERE, VOCAB)


def test_a_latest_that_is_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "latest")
    check_newest(loading(tmp_path), HERE, VOCAB)
    (tmp_path / "global_step5").mkdir()
    os.mkfifo(tmp_path / "global_step5" / "mp_rank_00_model_states.pt")
    check_newest(loading(tmp_path, "global_step5"), HERE, VOCAB)
