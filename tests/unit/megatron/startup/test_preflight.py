"""The checks before a start: each damaged, missing or misplaced input gets one error that names it."""

from __future__ import annotations

import dataclasses
import errno
import io
import itertools
import json
import logging
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing.preflight.directories import check_save
from megatron.checkpointing.preflight.first_start import began
from megatron.checkpointing.store.commit import write_manifest
from megatron.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TraceConfig,
    TrainingConfig,
)
from megatron.startup.preflight import (
    check_dataset,
    check_exports,
    check_inputs,
    check_load,
    check_tokenizer,
    check_writable,
    is_later_start,
    is_told,
    of_this_start,
)
from tests.unit.hostile import blocking_fails, fifo
from tests.unit.megatron.checkpointing.store.test_commit import manifest_of

ROOT = Path(__file__).resolve().parents[4]
UPSTREAM_RUN = ROOT / "tests" / "golden" / "upstream_run"
HEADER_BYTES = 34
LENGTHS = [3, 0, 5, 2]


def write_dataset(prefix: Path, lengths: list[int] = LENGTHS, code: int = 8, width: int = 2) -> str:
    """A dataset in the mmap format with one sequence per document; returns the prefix."""
    offsets = [total * width for total in itertools.accumulate(lengths[:-1], initial=0)] if lengths else []
    content = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(lengths), len(lengths) + 1)
    content += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *offsets)
    content += struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1))
    prefix.with_suffix(".idx").write_bytes(content)
    prefix.with_suffix(".bin").write_bytes(bytes(sum(lengths) * width))
    return str(prefix)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_dataset(tmp_path / "corpus_text_document")


def refused_dataset(prefix: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_dataset("--data-path", prefix)
    assert str(caught.value).startswith("--data-path")
    return str(caught.value)


def patch(path: str, offset: int, content: bytes) -> None:
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(content)


def test_sound_dataset_passes(prefix: str) -> None:
    check_dataset("--data-path", prefix)


def test_bin_longer_than_its_index_is_legal(prefix: str) -> None:
    with open(prefix + ".bin", "ab") as stream:
        stream.write(b"tail")
    check_dataset("--data-path", prefix)


def test_files_of_an_upstream_run_pass() -> None:
    data = UPSTREAM_RUN / "data"
    check_dataset("--data-path", str(data / "corpus_text_document"))
    model = str(data / "tokenizer.model")
    check_tokenizer(DataConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=model, vocab_size=500))
    check_load(CheckpointConfig(load=str(UPSTREAM_RUN), load_tag="global_step5"))
    check_load(CheckpointConfig(load=str(UPSTREAM_RUN), exit_on_missing_checkpoint=True))


@pytest.mark.parametrize("ending", [".idx", ".bin"])
def test_missing_file(prefix: str, ending: str) -> None:
    os.remove(prefix + ending)
    assert f"{prefix}{ending}: No such file or directory; correct the path" in refused_dataset(prefix)


def test_near_name_is_offered(prefix: str) -> None:
    message = refused_dataset(prefix.removesuffix("_text_document"))
    assert message.endswith(f"did you mean {prefix}?")


def test_ending_in_the_prefix(prefix: str) -> None:
    assert refused_dataset(prefix + ".bin").endswith(f"give the path without its ending: {prefix}")


def test_directory_instead_of_file(tmp_path: Path) -> None:
    (tmp_path / "d.idx").mkdir()
    assert "d.idx is not a regular file" in refused_dataset(str(tmp_path / "d"))


@pytest.mark.parametrize("cut", [1, HEADER_BYTES + 1])
def test_truncated_bin_or_idx(prefix: str, cut: int) -> None:
    size = os.path.getsize(prefix + ".idx")
    os.truncate(prefix + ".idx", size - cut)
    assert f"{prefix}.idx is truncated: {size - cut} bytes, and its header says {size}" in refused_dataset(prefix)


def test_truncated_bin(prefix: str) -> None:
    os.truncate(prefix + ".bin", 19)
    assert f"{prefix}.bin is truncated: it has 19 bytes and its index needs 20" in refused_dataset(prefix)


@pytest.mark.parametrize(
    ("offset", "content", "message"),
    [
        (0, b"\x00", "is no index of the mmap format"),
        (0, b"TNTIDX\x00\x00", "has the old lazy/cached format"),
        (9, b"\x02", "has format version 2"),
        (17, b"\x63", "has data type code 99"),
        (17, b"\x07", "has data type code 7, which is no integer type"),
        (18, b"\x05", "is truncated"),
        (18, b"\x03", "is too long"),
        (HEADER_BYTES, b"\x04", "its lengths, offsets and documents do not fit together"),
        (HEADER_BYTES + 4 * 4 + 8, b"\x07", "its lengths, offsets and documents do not fit together"),
        (HEADER_BYTES + 12 * 4 + 8 * 4, b"\x03", "its lengths, offsets and documents do not fit together"),
        (HEADER_BYTES + 3, b"\xff", "its lengths, offsets and documents do not fit together"),
    ],
)
def test_corrupt_index(prefix: str, offset: int, content: bytes, message: str) -> None:
    patch(prefix + ".idx", offset, content)
    shown = refused_dataset(prefix)
    assert message in shown and prefix + ".idx" in shown


@pytest.mark.parametrize("size", [0, 5, 20])
def test_index_shorter_than_its_header(prefix: str, size: int) -> None:
    os.truncate(prefix + ".idx", size)
    assert prefix + ".idx is " in refused_dataset(prefix)


def test_dataset_without_documents(tmp_path: Path) -> None:
    assert "holds no documents" in refused_dataset(write_dataset(tmp_path / "empty", lengths=[]))


def test_large_index_is_checked_at_its_ends(tmp_path: Path) -> None:
    lengths = [1] * 70_000
    prefix = write_dataset(tmp_path / "large", lengths, code=4, width=4)
    check_dataset("--data-path", prefix)
    os.truncate(prefix + ".bin", 4 * len(lengths) - 1)
    assert "needs 280000" in refused_dataset(prefix)


# Tokenizers


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import sentencepiece

    written = io.BytesIO()
    lines = [f"the quick brown fox {number} jumps over a lazy dog" for number in range(200)]
    sentencepiece.SentencePieceTrainer.train(  # type: ignore[attr-defined]
        sentence_iterator=iter(lines), model_writer=written, vocab_size=64, model_type="bpe", minloglevel=2
    )
    path = tmp_path_factory.mktemp("spm") / "tokenizer.model"
    path.write_bytes(written.getvalue())
    return path


def sentencepiece_data(path: Path, vocab_size: int | None = None) -> DataConfig:
    return DataConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(path), vocab_size=vocab_size)


def refused_tokenizer(data: DataConfig) -> str:
    with pytest.raises(ValueError) as caught:  # ConfigError or TokenizerError
        check_tokenizer(data)
    return str(caught.value)


def test_sentencepiece_model_passes_and_is_counted(sentencepiece_model: Path) -> None:
    check_tokenizer(sentencepiece_data(sentencepiece_model, vocab_size=64))
    message = refused_tokenizer(sentencepiece_data(sentencepiece_model, vocab_size=65))
    assert message == "--vocab-size 65: the tokenizer has 64 tokens; drop the flag or correct it"


def test_truncated_sentencepiece_model(sentencepiece_model: Path, tmp_path: Path) -> None:
    content = sentencepiece_model.read_bytes()
    path = tmp_path / "cut.model"
    for size in (1, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        assert f"--tokenizer-model {path}: not a complete SentencePiece model" in refused_tokenizer(
            sentencepiece_data(path)
        )


@pytest.mark.parametrize("content", [b"", b'{"version": "1.0"}', b"\x80\x02}q\x00", b"PK\x03\x04", bytes(64)])
def test_file_of_another_kind_is_no_sentencepiece_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    assert "not a complete SentencePiece model" in refused_tokenizer(sentencepiece_data(path))


def test_missing_tokenizer_file(tmp_path: Path) -> None:
    message = refused_tokenizer(sentencepiece_data(tmp_path / "absent"))
    assert message.startswith(f"--tokenizer-model {tmp_path / 'absent'}: no such file")


def gpt2_data(tmp_path: Path, vocab: str, merges: str | bytes) -> DataConfig:
    (tmp_path / "vocab.json").write_text(vocab)
    (tmp_path / "merges.txt").write_bytes(merges if isinstance(merges, bytes) else merges.encode())
    return DataConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(tmp_path / "vocab.json"),
        merge_file=str(tmp_path / "merges.txt"),
    )


VOCAB = json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3})
MERGES = "#version: 0.2\na b\n"


def test_gpt2_files_pass(tmp_path: Path) -> None:
    data = gpt2_data(tmp_path, VOCAB, MERGES)
    check_tokenizer(data)
    check_tokenizer(dataclasses.replace(data, vocab_size=4))
    assert "the tokenizer has 4 tokens" in refused_tokenizer(dataclasses.replace(data, vocab_size=5))


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        ("a b", MERGES, "vocab.json: Expecting value"),
        ('{"a": ' * 100_000, MERGES, "vocab.json: maximum recursion depth"),
        ('{"a": 0, "b": 1, "a": 2, "<|endoftext|>": 3}', MERGES, "vocab.json: its ids are not 0 to 2"),
        ('["a"]', MERGES, "vocab.json: has no <|endoftext|>"),
        ('{"a": "b", "<|endoftext|>": 1}', MERGES, "vocab.json: its ids are not 0 to 1"),
        ('{"a": 0}', MERGES, "vocab.json: has no <|endoftext|>"),
        (VOCAB, VOCAB, "merges.txt: line 1 is"),
        (VOCAB, "#version: 0.2\na b\nabc\n", "merges.txt: line 3 is 'abc'; every line must be two tokens"),
        (VOCAB, "#version: 0.2\n", "merges.txt: holds no merges"),
        (VOCAB, b"\xff\xfe", "merges.txt: not UTF-8 text"),
    ],
)
def test_wrong_gpt2_files(tmp_path: Path, vocab: str, merges: str | bytes, message: str) -> None:
    assert message in refused_tokenizer(gpt2_data(tmp_path, vocab, merges))


# Directories


def test_load_without_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for load in (str(tmp_path), str(tmp_path / "absent")):
        caplog.clear()
        check_load(CheckpointConfig(load=load))
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert f"--load {load}: no checkpoint there" in caplog.messages[0]
        with pytest.raises(ConfigError, match="drop --exit-on-missing-checkpoint to start from iteration 0"):
            check_load(CheckpointConfig(load=load, exit_on_missing_checkpoint=True))
    caplog.clear()
    check_load(CheckpointConfig(load=str(tmp_path), save=str(tmp_path), save_interval=1))  # the first launch of a run
    assert caplog.records == []


@pytest.mark.parametrize("mark", ["latest", "global_step5/manifest.json"])
def test_load_with_a_checkpoint(tmp_path: Path, mark: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "global_step5").mkdir()
    (tmp_path / mark).write_text("global_step5")
    check_load(CheckpointConfig(load=str(tmp_path), exit_on_missing_checkpoint=True))
    assert caplog.messages == []


def test_latest_that_names_nothing_ends_the_run(tmp_path: Path) -> None:
    """Something was lost: that is no new directory, and training does not begin again in it unless told."""
    load = str(tmp_path)
    (tmp_path / "latest").write_text("global_step10")
    (tmp_path / ".incomplete_global_step11_a").mkdir()
    (tmp_path / ".incomplete_global_step11_a" / "manifest.json").write_text("{}")
    for content, told in (
        (b"global_step10", f"{load}/latest names global_step10, which is not there"),
        (b"", f"{load}/latest: names no checkpoint: '' is empty"),
        (b"\xff", f"{load}/latest: names no checkpoint: it is not text"),
        (b"x" * 300, f"{load}/latest: names no checkpoint: "),
    ):
        (tmp_path / "latest").write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            check_load(CheckpointConfig(load=load))
        message = str(caught.value)
        assert message.startswith(f"--load {load}: {told}") and message.endswith("with --allow-start-over")
        check_load(CheckpointConfig(load=load, allow_start_over=True))
    (tmp_path / "global_step9").mkdir()
    (tmp_path / "global_step9" / "manifest.json").write_text("{}")
    check_load(CheckpointConfig(load=load))  # the load uses the older one, and reports `latest`


def test_latest_that_is_no_file_does_not_block(tmp_path: Path) -> None:
    fifo(tmp_path / "latest")
    with blocking_fails(), pytest.raises(ConfigError, match="latest: names no checkpoint: is a FIFO"):
        check_load(CheckpointConfig(load=str(tmp_path)))


# --save among checkpoints


def options(save: Path, load: Path | None = None, **more: Any) -> CheckpointConfig:
    return CheckpointConfig(save=str(save), save_interval=1, load=load and str(load), **more)


def checkpoint_in(directory: Path, step: int = 5) -> None:
    tag = f"global_step{step}"
    (directory / tag).mkdir(parents=True)
    write_manifest(directory / tag, manifest_of(step), fsync=False)
    (directory / "latest").write_text(tag)


def refused_save(checkpoint: CheckpointConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check_save(checkpoint)
    return str(caught.value)


def test_run_that_does_not_resume_is_not_mixed_into_another(tmp_path: Path) -> None:
    save = tmp_path / "run"
    checkpoint_in(save, 5)
    checkpoint_in(save, 10)
    assert refused_save(options(save)) == (
        f"--save {save}: holds checkpoints already (the newest is global_step10), and this run begins from iteration "
        f"0: its own would replace them or hide them; give --load {save} to resume from there, another --save, or "
        "--allow-other-checkpoints to save among them"
    )
    elsewhere = tmp_path / "pretrained"
    checkpoint_in(elsewhere)
    assert f"and this run begins from --load {elsewhere}: " in refused_save(options(save, elsewhere))
    assert "begins from --load" in refused_save(options(save, elsewhere, finetune=True))
    check_save(options(save, allow_other_checkpoints=True))
    check_save(options(save, elsewhere, allow_other_checkpoints=True))
    check_save(options(save, checkpoint_engine="none"))  # writes nothing
    (save / "latest").write_bytes(b"\xff")
    assert "the newest is global_step10" in refused_save(options(save))
    (save / "global_step10" / "manifest.json").write_text("{}")
    assert "the newest is global_step10" in refused_save(options(save, elsewhere))


def test_upstreams_checkpoints_are_not_mixed_either(tmp_path: Path) -> None:
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "global_step5" / "mp_rank_00_model_states.pt").write_bytes(b"x")
    (tmp_path / "latest").write_text("global_step5")
    assert "the newest is global_step5" in refused_save(options(tmp_path))


def test_saves_into_its_own_or_an_empty_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save = tmp_path / "run"
    check_save(CheckpointConfig())
    check_save(options(save))
    check_save(options(save, tmp_path / "pretrained"))
    save.mkdir()
    (save / "restart_trace").mkdir()
    (save / ".incomplete_global_step5_a").mkdir()
    (save / ".incomplete_global_step5_a" / "manifest.json").write_text("{}")
    check_save(options(save))
    checkpoint_in(save)
    check_save(options(save, save))
    (tmp_path / "link").symlink_to("run")
    check_save(options(save, tmp_path / "link"))
    check_save(options(save, save, load_tag="global_step5"))
    assert caplog.messages == []


def test_load_given_the_checkpoint_itself(tmp_path: Path) -> None:
    tag = tmp_path / "global_step5"
    tag.mkdir()
    (tag / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        check_load(CheckpointConfig(load=str(tag), exit_on_missing_checkpoint=True))
    assert f"give --load {tmp_path} --load-tag global_step5" in str(caught.value)


def test_load_tag_that_is_not_there(tmp_path: Path) -> None:
    for name in ("global_step5", "global_step10", "restart_trace"):
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError) as caught:
        check_load(CheckpointConfig(load=str(tmp_path), load_tag="global_step7"))
    assert str(caught.value).endswith(f"not in --load {tmp_path}; there are: global_step10, global_step5")


def test_load_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a directory"):
        check_load(CheckpointConfig(load=str(tmp_path / "file")))


def test_writable_directory_is_created_and_left_empty(tmp_path: Path) -> None:
    check_writable("--save", str(tmp_path / "a" / "b"))
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("nameless", [True, False])
def test_a_kill_amid_the_check_leaves_no_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nameless: bool) -> None:
    """Network file systems have no files without names."""
    there: list[list[Path]] = []
    fsync, open_ = os.fsync, os.open

    def watched(fd: int) -> None:
        there.append(list(tmp_path.iterdir()))
        fsync(fd)

    def refuses(path: str, flags: int, *mode: int, **where: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
        return open_(path, flags, *mode, **where)

    monkeypatch.setattr(os, "fsync", watched)
    if not nameless:
        monkeypatch.setattr(os, "open", refuses)
    check_writable("--save", str(tmp_path))
    assert there == [[]]


def test_a_link_in_a_circle_is_no_reason_to_refuse_a_start(tmp_path: Path) -> None:
    (tmp_path / "global_step4").mkdir()
    (tmp_path / "global_step4" / "manifest.json").write_text("{}")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    check_load(CheckpointConfig(load=str(tmp_path)))


def test_directory_that_even_root_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (str(tmp_path / "file" / "ckpt"), str(tmp_path / "file"), "/proc/ckpt"):
        with pytest.raises(ConfigError) as caught:
            check_writable("--save", directory)
        assert str(caught.value).startswith(f"--save {directory}: cannot be written to: ")


def test_write_that_fails_leaves_no_probe(tmp_path: Path) -> None:
    # A file-size limit of 0 makes the write itself fail, as a full disk does.
    code = (
        "import resource, sys\n"
        "from megatron.config import ConfigError\n"
        "from megatron.startup.preflight import check_writable\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "try:\n    check_writable('--save', sys.argv[1])\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-B", "-c", code, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    assert result.stdout.startswith(f"--save {tmp_path}: cannot be written to: File too large")
    assert list(tmp_path.iterdir()) == []


# Everything together


def config_for(prefix: str, tmp_path: Path, save: str) -> Config:
    return Config(
        model=ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=64),
        parallel=ParallelConfig(),
        training=TrainingConfig(micro_batch_size=1, train_iters=2, tensorboard_dir=str(tmp_path / "tb")),
        optimizer=OptimizerConfig(lr=1e-3),
        data=DataConfig(
            data_path=("1", prefix, "2", prefix),
            data_cache_path=str(tmp_path / "cache"),
            tokenizer_type="NullTokenizer",
            vocab_size=10,
        ),
        checkpoint=CheckpointConfig(save=save, save_interval=1, load=save),
    )


@pytest.mark.slow
def test_an_outage_is_told_as_any_refusal(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standby ranks that are released ask for it alone, apart from the other checks."""
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:9", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    save = "s3://nobody-serves-it/run"
    checkpoint = CheckpointConfig(
        save=save, save_interval=1, load=str(tmp_path), checkpoint_engine="torch", storage_deadline=1
    )
    config = config_for(prefix, tmp_path, str(tmp_path))
    config = dataclasses.replace(config, checkpoint=checkpoint, trace=TraceConfig(restart_trace=False))
    with pytest.raises(ConfigError, match=f"{save}.* within 1 s"):
        is_later_start(config)


def test_a_run_that_goes_on_from_its_directory_asks_no_bucket_of_its_first_start(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On no host: what the first start was loaded from may be gone."""
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:9", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    save = tmp_path / "run"
    config = config_for(prefix, tmp_path, str(save))
    checkpoint = CheckpointConfig(
        save=str(save), save_interval=1, load="s3://nobody-serves-it/pretrained", checkpoint_engine="torch",
        storage_deadline=1,
    )  # fmt: skip
    kept = began(checkpoint)
    directory = save / "global_step5"
    directory.mkdir(parents=True)
    manifest = dataclasses.replace(manifest_of(5), loaded_from=kept.loaded_from, first_start=kept.flags)
    write_manifest(directory, manifest, fsync=False)
    (save / "latest").write_text(directory.name)
    config = dataclasses.replace(config, checkpoint=checkpoint, trace=TraceConfig(restart_trace=False))
    assert is_later_start(config)
    training = dataclasses.replace(config.training, global_batch_size=2)
    for rank in (0, 1):
        parallel = dataclasses.replace(config.parallel, rank=rank, world_size=2)
        of_rank = dataclasses.replace(config, parallel=parallel, training=training)
        assert not is_told(of_rank, is_later_start(of_rank))
        assert of_this_start(of_rank, True, None).checkpoint.load == str(save)
    first = dataclasses.replace(checkpoint, save=str(tmp_path / "another"))
    beginning = dataclasses.replace(of_rank, checkpoint=first)
    assert is_told(beginning, is_later_start(beginning))


def test_an_export_that_is_in_the_way_is_refused_at_the_first_start_alone(prefix: str, tmp_path: Path) -> None:
    """A run that has checkpoints goes on: its own exports may be of checkpoints that were copied here, or moved."""
    save = tmp_path / "run"
    config = config_for(prefix, tmp_path, str(save))
    checkpoint = CheckpointConfig(save=str(save), save_interval=1, load=str(save), export_hf_interval=1)
    config = dataclasses.replace(config, checkpoint=checkpoint)
    (save / "hf" / "iteration_2").mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"{save}/hf/iteration_2: is there, and not of this run"):
        check_exports(config)
    (save / "global_step2").mkdir()
    write_manifest(save / "global_step2", manifest_of(2), fsync=False)
    check_exports(config)


def test_a_board_that_cannot_be_written_is_refused(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as where it is not installed
    with pytest.raises(ConfigError, match="--tensorboard-dir: tensorboard is not installed: pip install tensorboard"):
        check_inputs(config_for(prefix, tmp_path, str(tmp_path / "ckpt")))
    config = config_for(prefix, tmp_path, str(tmp_path / "ckpt"))
    file = tmp_path / "ds.json"
    parallel = dataclasses.replace(config.parallel, deepspeed_config=str(file))
    training = dataclasses.replace(config.training, tensorboard_dir=None)
    config = dataclasses.replace(config, parallel=parallel, training=training)
    file.write_text('{"tensorboard": {"enabled": true}}')
    with pytest.raises(ConfigError, match=f"--deepspeed_config {file}: tensorboard.enabled: tensorboard is not instal"):
        check_inputs(config)
    assert not (tmp_path / "ckpt").exists()
    file.write_text('{"tensorboard": {"enabled": false}}')
    check_inputs(config)


def test_check_inputs_checks_every_part(prefix: str, tmp_path: Path) -> None:
    save = tmp_path / "ckpt"
    check_inputs(config_for(prefix, tmp_path, str(save)))
    assert (save / "restart_trace").is_dir() and (tmp_path / "tb").is_dir() and (tmp_path / "cache").is_dir()

    os.truncate(prefix + ".bin", 1)
    other = tmp_path / "other"
    with pytest.raises(ConfigError, match="is truncated"):
        check_inputs(config_for(prefix, tmp_path, str(other)))
    assert not other.exists()  # nothing is created for a run whose inputs are bad
