"""Checks of a run's input files and directories, before anything heavy is imported.

Made on every host: a node sees what it lacks itself, and no rank is left waiting for one that gave up. Of what is in
object storage rank 0 alone finds out; if it gives up, the launcher ends the others. Standard library only: what is read
here are headers and lengths, so that a wrong path or a damaged file costs milliseconds instead of a start-up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import logging
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron.checkpointing.store.search import read_latest
from megatron.config import CheckpointConfig, Config, ConfigError, DataConfig, deepspeed_file
from megatron.config.uris import is_uri
from megatron.data.index_header import (
    FLOATING_POINT,
    HEADER,
    REMAKE,
    TOKEN_BYTES,
    IndexedDatasetError,
    IndexHeader,
    parse_header,
)
from megatron.parallel.topology import Layout
from megatron.peers.placement import PlacementError, number_of_copies, read_domains
from restart_trace.cycles import is_restart_in_place

if TYPE_CHECKING:
    from megatron.checkpointing.preflight.first_start import FirstStart
    from megatron.checkpointing.store.bucket.checkpoints import StoredCheckpoints

logger = logging.getLogger(__name__)

_FULL_CHECK_SEQUENCES = 1 << 16
_PROBE_BYTES = 4096


class Vocabulary(NamedTuple):
    """Of the tokenizer, and of the model that a checkpoint may have padded."""

    size: int  # the tokenizer's
    padded: int
    eod: int  # id of the end of a document


class Checked(NamedTuple):
    """What the checks before the imports find out."""

    vocabulary: Vocabulary
    later_start: bool  # --save holds checkpoints of this run, from which it goes on
    back_to: str | None  # an older checkpoint in --save, by --on-repeated-error


def check_before_imports(config: Config) -> Checked:
    """All cheap checks of flags and files; of what is in object storage on rank 0 alone, which tells the others later.

    Raises ConfigError, CheckpointError or OSError, naming flag, file and fix.
    """
    from megatron.checkpointing.engines.registry import check_engine_name
    from megatron.checkpointing.preflight.compatibility import check_newest
    from megatron.checkpointing.preflight.directories import check_save

    check_engine_name(config.checkpoint.checkpoint_engine, in_object_storage=config.checkpoint.in_object_storage)
    with store_refusals(config):
        later = False
        if config.parallel.rank == 0 or not is_uri(config.checkpoint.save):
            list_save_once(config.checkpoint)
            later = is_later_start(config)
        if is_told(config, later):
            return _check_host(config)
        back_to = goes_back_to(config, later)
        save, config = config.checkpoint.save, of_this_start(config, later, back_to)
        if config.checkpoint.load != save:
            _list_once("--load", config.checkpoint.load, config.checkpoint)
        check_object_storage(config.checkpoint, warn=config.parallel.rank == 0)
        check_save(config.checkpoint, warn=config.parallel.rank == 0)
        check_not_lost(config)
        check_copies(config)
        check_exports(config)
        vocab_size, eod = check_inputs(config)
        padded = check_newest(config, Layout(**config.parallel.layout), vocab_size)
        return Checked(Vocabulary(vocab_size, padded, eod), later, back_to)


def is_told(config: Config, later: bool) -> bool:
    """Whether rank 0 tells this rank which checkpoints there are: hundreds of hosts must not all list a bucket.

    `later`: this start goes on from a directory of --save, so that a bucket of --load is not asked.
    """
    options = config.checkpoint
    return config.parallel.rank != 0 and (is_uri(options.save) or (is_uri(options.load) and not later))


def list_save_once(options: CheckpointConfig) -> None:
    """On rank 0, as the start begins: list --save for all of it, if in object storage. Raises ObjectStoreError."""
    if options.in_object_storage:
        from megatron.checkpointing.store.bucket.checkpoints import drop_listings

        drop_listings()
        _list_once("--save", options.save, options)


def _list_once(flag: str, uri: str | None, options: CheckpointConfig) -> None:
    if uri is None or not is_uri(uri):
        return
    from megatron.checkpointing.store.bucket.checkpoints import open_checkpoints
    from megatron.checkpointing.store.bucket.generations import ended_generation

    stored = open_checkpoints(flag, uri, options)
    stored.bucket.check_reachable(stored.uri.key(""))
    stored.list_once(ended_generation(stored.bucket, stored.uri) if flag == "--save" else None)


def _check_host(config: Config) -> Checked:
    """What a host that is_told can lack itself: the store, its own disk, the data. Raises as check_before_imports.

    Whether this start goes on from a --save in object storage is not known yet, so --load is not looked at then.
    """
    from megatron.checkpointing.preflight.repeated_errors import publish_crashes, remove_old_crashes

    options = config.checkpoint
    flag, uri = ("--save", options.save) if is_uri(options.save) else ("--load", options.load)
    stored = _check_storage_of_host(flag, uri or "", options)
    publish_crashes(options)
    remove_old_crashes(stored.root)
    check_copies(config)
    check_exports(config)
    vocab_size, eod = check_inputs(config, load=False)
    return Checked(Vocabulary(vocab_size, vocab_size, eod), False, None)


def check_not_lost(config: Config) -> None:
    """Check that a --save without checkpoints has lost none: the trace of earlier cycles tells what was saved.

    Not asked of a first start that begins from iteration 0 by its flags, nor with --allow-start-over or --start-over.

    Raises: ConfigError naming the directory, the last checkpoint that was saved there and the fixes; ObjectStoreError.
    """
    from megatron.checkpointing.preflight.first_start import holds_checkpoints, is_started_again
    from megatron.startup.lost_checkpoints import last_committed

    options, trace_dir = config.checkpoint, config.trace.restart_trace_dir
    if options.save is None or trace_dir is None or options.allow_start_over or options.start_over is not None:
        return
    if (options.load is None and not is_started_again(os.environ)) or holds_checkpoints(options):
        return
    lost = last_committed(Path(trace_dir), options.save)
    if lost is not None:
        raise ConfigError(
            f"--save {options.save}: holds no checkpoint, and this run has saved {lost.tag} there, as {lost.trace} "
            "tells: it was removed, or its storage is not mounted; restore it, or train again from the beginning with "
            "--allow-start-over"
        )


def is_later_start(config: Config) -> bool:
    """Whether this start goes on from --save, so that the flags of the first start are passed over.

    Raises: ConfigError naming the directory that cannot be read, or what object storage refuses.
    """
    from megatron.checkpointing.preflight.first_start import has_own_checkpoint

    with _reads_save(config):
        return has_own_checkpoint(config.checkpoint, os.environ)


def how_the_run_began(config: Config) -> FirstStart:
    """As megatron.checkpointing.preflight.first_start.began; raises as is_later_start."""
    from megatron.checkpointing.preflight.first_start import began

    with _reads_save(config):
        return began(config.checkpoint)


@contextlib.contextmanager
def _reads_save(config: Config) -> Iterator[None]:
    try:
        with store_refusals(config):
            yield
    except OSError as error:
        raise ConfigError(
            f"--save {config.checkpoint.save}: cannot be read: {error.strerror}; correct the path or its permissions"
        ) from error


def goes_back_to(config: Config, later: bool) -> str | None:
    """The checkpoint in --save that --on-repeated-error goes back to, if there is reason to. `later`: is_later_start.

    Raises: RepeatedErrorError if an error that has ended several starts would end this one; ConfigError as above.
    """
    from megatron.checkpointing.preflight.repeated_errors import checkpoint_before

    with _reads_save(config):
        return checkpoint_before(config.checkpoint, later)


def of_this_start(config: Config, later: bool, back_to: str | None) -> Config:
    """`config` without what describes the first start of the run, if it goes on from --save; and of that checkpoint."""
    from megatron.checkpointing.preflight.first_start import later_start

    options = later_start(config.checkpoint) if later else config.checkpoint
    if back_to is not None:
        options = dataclasses.replace(options, load_tag=back_to)
    return config if options is config.checkpoint else dataclasses.replace(config, checkpoint=options)


def check_without_writing(config: Config, *, with_data: bool) -> None:
    """The checks that write nothing and ask no object storage; `with_data`: those of datasets and tokenizer, too.

    Raises ConfigError or CheckpointError, naming flag, file and fix.
    """
    from megatron.checkpointing.engines.registry import check_engine_name

    check_engine_name(config.checkpoint.checkpoint_engine, in_object_storage=config.checkpoint.in_object_storage)
    check_copies(config)
    if with_data:
        check_data(config.data)


@contextlib.contextmanager
def store_refusals(config: Config) -> Iterator[None]:
    """Within it, what object storage refuses is raised as ConfigError."""
    if not config.checkpoint.in_object_storage:
        yield
        return
    from megatron.fileio.objects.errors import ObjectStoreError

    try:
        yield
    except ObjectStoreError as error:
        raise ConfigError(str(error)) from error


def check_copies(config: Config) -> None:
    """Check --replicas against the number of hosts (if LOCAL_WORLD_SIZE is set), and the lines of --failure-domain.

    After a restart in place this is not checked: there may be fewer hosts, or others, and slot_memory warns.

    Raises: ConfigError naming flag, value and fix.
    """
    if is_restart_in_place(os.environ):
        return
    options, on_a_host = config.checkpoint, int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    try:
        if on_a_host:
            number_of_copies(options.replicas, -(-config.parallel.world_size // on_a_host), served=True)
        if options.failure_domain is not None:
            read_domains(options.failure_domain)
    except PlacementError as error:
        raise ConfigError(str(error)) from error


def check_exports(config: Config) -> None:
    """Check that --export-hf-interval can export this model, and on rank 0 the directory.

    A path that is in the way is a warning for a run that has saved: it should train on, whatever becomes of exports.
    Raises: ConfigError naming each flag that Hugging Face's architectures do not have, or the path that is in the way.
    """
    options = config.checkpoint
    if options.export_directory is None:
        return
    from megatron.hf.configs import architecture_of
    from megatron.hf.errors import ConversionError

    try:
        architecture_of(config.model)
    except ConversionError as error:
        flag = f"--export-hf-interval {options.export_hf_interval}"
        raise ConfigError(f"{flag}: {error}, or drop the flag") from error
    if config.parallel.rank == 0:
        _check_export_directory(config, options.export_directory)


def _check_export_directory(config: Config, directory: str) -> None:
    from megatron.checkpointing.preflight.first_start import holds_checkpoints

    options = config.checkpoint
    default = f"--export-hf-interval {options.export_hf_interval}:"
    flag = default if options.export_hf_dir is None else "--export-hf-dir"
    another = "give another --export-hf-dir, or remove it"
    if os.path.lexists(directory) and not os.path.isdir(directory):
        raise ConfigError(f"{flag} {directory}: is there and no directory; {another}")
    check_writable(flag, directory, sync=False)
    in_the_way = list(_exports_in_the_way(config, directory))
    if in_the_way and not holds_checkpoints(options):
        what = f"{flag} {in_the_way[0]}: is there, and not of this run, which would export to it"
        raise ConfigError(f"{what}; {another}")
    if in_the_way:
        logger.warning(
            "%s %s: is there, and not of this run, which leaves it alone and makes no such export (%d in all); %s",
            flag, in_the_way[0], len(in_the_way), another,
        )  # fmt: skip


def _exports_in_the_way(config: Config, directory: str) -> Iterator[Path]:
    """What is called as an export of this run will be, and is none of its own."""
    from megatron.checkpointing.store.naming import tag_of
    from megatron.checkpointing.store.ownership import run_id_of
    from megatron.hf.source import Source, is_export_of

    save, interval = Path(config.checkpoint.save or ""), config.checkpoint.export_hf_interval or 1
    run_id, last = run_id_of(save), config.training.train_iters
    for name in sorted(os.listdir(directory)):
        found = re.fullmatch("iteration_([1-9][0-9]{0,17})", name)
        if found is None or int(found[1]) % interval or int(found[1]) > last:
            continue
        out = Path(directory, name)
        source = Source.of_export(out)
        mine = source is not None and source.is_of_run(run_id, save, out)
        if not mine and not is_export_of(out, save / tag_of(int(found[1]))):
            yield out


def check_tensorboard(config: Config) -> None:
    """Raises ConfigError if TensorBoard is asked for, by flag or in DeepSpeed's file, and is not installed."""
    path = config.parallel.deepspeed_config
    asked = None
    if config.training.tensorboard_dir is not None:
        asked = "--tensorboard-dir"
    elif path is not None and deepspeed_file.get(deepspeed_file.load_deepspeed_file(path), "tensorboard.enabled"):
        asked = f"--deepspeed_config {path}: tensorboard.enabled"
    if asked is not None and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(f"{asked}: tensorboard is not installed: pip install tensorboard, or drop it")


def check_otlp(config: Config) -> None:
    """Raises ConfigError if spans are to be sent (--otlp), and cannot be."""
    endpoint = config.trace.otlp
    if endpoint is None:
        return
    from restart_trace.follower import refusal

    if reason := refusal(endpoint):
        raise ConfigError(f"--otlp {endpoint}: {reason}")


def check_inputs(config: Config, *, load: bool = True) -> tuple[int, int]:
    """Check datasets, tokenizer files, the --load directory, and that what is asked for can be written.

    Returns what check_tokenizer does.

    Creates the directories that will be written to. Rank 0 logs a warning when --load holds no checkpoint and
    the run will start from iteration 0.

    Raises: ConfigError naming flag, file and fix.
    """
    first = config.parallel.rank == 0
    tokenizer = check_data(config.data)
    if load:
        check_load(config.checkpoint, warn=first)
    check_tensorboard(config)
    check_otlp(config)
    for flag, directory in (
        ("--save", config.checkpoint.save),
        ("--restart-trace-dir", config.trace.restart_trace_dir),
        ("--tensorboard-dir", config.training.tensorboard_dir),
        ("--data-cache-path", config.data.data_cache_path),
    ):
        if directory is not None and not is_uri(directory):
            # A synchronisation only where one was asked for: the trace must not add any.
            durable = flag == "--save" and config.checkpoint.checkpoint_durability == "fsync"
            check_writable(flag, directory, sync=first and durable)
    return tokenizer


def check_data(data: DataConfig) -> tuple[int, int]:
    """Check datasets and tokenizer files. Returns and raises what check_tokenizer does."""
    for flag, prefix in data.prefixes:
        check_dataset(flag, prefix)
    return check_tokenizer(data)


def check_object_storage(checkpoint: CheckpointConfig, *, warn: bool = True) -> None:
    """Check that object storage answers to --save and --load, that --load-tag is there, and what else is.

    Whether --save can be written is found out when it is claimed.

    Raises: ConfigError naming flag, URI and fix; ObjectStoreError.
    """
    from megatron.checkpointing.preflight.repeated_errors import remove_old_crashes

    for flag, uri in (("--save", checkpoint.save), ("--load", checkpoint.load)):
        if uri is None or not is_uri(uri):
            continue
        stored = _check_storage_of_host(flag, uri, checkpoint)
        remove_old_crashes(stored.root)
        if flag == "--load" and checkpoint.load_tag is not None and stored.newest_manifest(checkpoint.load_tag) is None:
            there = ", ".join(sorted({tag for tag, _ in stored.listed()})) or "none"
            raise ConfigError(f"--load-tag {checkpoint.load_tag}: not in --load {uri}; there are: {there}")
        if flag == "--save":
            stored.check_latest()
        if flag == "--save" or uri != checkpoint.save:
            _check_prefix(flag, stored, checkpoint, warn)


def _check_storage_of_host(flag: str, uri: str, checkpoint: CheckpointConfig) -> StoredCheckpoints:
    """Check that `uri` answers to this host, and the host's own disk.

    Removes what killed processes have left on this node. Raises as check_object_storage.
    """
    from megatron.checkpointing.store.bucket.checkpoints import open_checkpoints
    from megatron.fileio.objects.node_directory import remove_abandoned

    stored = open_checkpoints(flag, uri, checkpoint)
    stored.bucket.check_reachable(stored.uri.key(""))
    check_writable("--storage-cache", str(stored.root), sync=False)
    remove_abandoned(stored.root)
    return stored


def _check_prefix(flag: str, stored: StoredCheckpoints, checkpoint: CheckpointConfig, warn: bool) -> None:
    """As check_load, of a prefix; and a warning if `warn` where somebody else's objects are, too.

    Raises: ConfigError naming flag, URI and fix.
    """
    attempts, foreign = stored.survey()
    there = any("manifest.json" in files for files in attempts.values())
    first = f"; objects of others are there, such as {stored.bucket.uri(foreign[0])}" if foreign else ""
    if not there and checkpoint.load == str(stored.uri):
        if any(
            key.endswith("/manifest.json") and key.count("/") <= stored.uri.key("").count("/") + 1 for key in foreign
        ):
            parent, _, tag = str(stored.uri).rstrip("/").rpartition("/")
            raise ConfigError(
                f"--load {checkpoint.load}: is one checkpoint itself: give --load {parent} --load-tag {tag}"
            )
        if checkpoint.finetune:
            raise ConfigError(
                f"--finetune takes the weights of --load {checkpoint.load}, where no checkpoint is; correct the prefix"
            )
        upstreams = any(key.endswith("mp_rank_00_model_states.pt") for key in foreign)
        hint = "copy upstream's checkpoint to a directory and load it from there" if upstreams else "correct the prefix"
        if checkpoint.exit_on_missing_checkpoint:
            raise ConfigError(
                f"--load {checkpoint.load}: no checkpoint there{first}; {hint}, or drop --exit-on-missing-checkpoint "
                "to start from iteration 0"
            )
        if warn and checkpoint.load != checkpoint.save:
            logger.warning(
                "--load %s: no checkpoint there%s (%s): training starts from iteration 0; give "
                "--exit-on-missing-checkpoint to stop instead", checkpoint.load, first, hint,
            )  # fmt: skip
            return
    if foreign and warn and flag == "--save":
        logger.warning(
            "%s %s: %d objects there are not this program's, such as %s; they are left alone, but a prefix is meant to "
            "be one run's own: give another", flag, stored.uri, len(foreign), stored.bucket.uri(foreign[0]),
        )  # fmt: skip


def check_dataset(flag: str, prefix: str) -> None:
    """Check `prefix`.idx (header, length, that its parts fit together) and that `prefix`.bin is long enough.

    A .bin file may be longer than its index says: upstream writes such files.

    Raises: ConfigError naming flag, file and fix.
    """
    if prefix.endswith((".bin", ".idx")) and not os.path.exists(prefix + ".idx"):
        raise ConfigError(f"{flag} {prefix}: give the path without its ending: {prefix[:-4]}")
    idx, data = prefix + ".idx", prefix + ".bin"
    idx_bytes, bin_bytes = (_file_size(flag, path, _dataset_hint(prefix)) for path in (idx, data))
    try:
        with open(idx, "rb") as stream:
            header = _check_header(flag, idx, stream.read(HEADER.size), idx_bytes)
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                needed = _check_index(flag, idx, content, header)
    except OSError as error:
        raise ConfigError(f"{flag} {prefix}: cannot read {idx}: {error.strerror}") from error
    if bin_bytes < needed:
        raise ConfigError(
            f"{flag} {prefix}: {data} is truncated: it has {bin_bytes} bytes and its index needs {needed}; "
            "copy it again or preprocess again"
        )


def _check_header(flag: str, idx: str, content: bytes, size: int) -> IndexHeader:
    """The header of an index of token ids, in which there is a document."""
    try:
        header = parse_header(idx, content, size)
    except IndexedDatasetError as error:
        raise ConfigError(f"{flag}: {error}") from error
    if header.code in FLOATING_POINT:
        raise ConfigError(f"{flag}: {idx} has data type code {header.code}, which is no integer type: {REMAKE}")
    if header.sequences == 0 or header.documents < 2:
        raise ConfigError(f"{flag}: {idx} holds no documents: {REMAKE}")
    return header


def _check_index(flag: str, idx: str, content: mmap.mmap, header: IndexHeader) -> int:
    """The bytes that the .bin file must have; checks that lengths, offsets and documents fit together.

    Every entry of a small index is checked, the first and last ones of a large one.
    """
    sequences, documents, token_bytes = header.sequences, header.documents, TOKEN_BYTES[header.code]
    offsets_at = HEADER.size + 4 * sequences
    documents_at = offsets_at + 8 * sequences
    checked = min(sequences, _FULL_CHECK_SEQUENCES)
    lengths = struct.unpack_from(f"<{checked}i", content, HEADER.size)
    offsets = struct.unpack_from(f"<{checked}q", content, offsets_at)
    (last_length,) = struct.unpack_from("<i", content, offsets_at - 4)
    last_offset, first_document = struct.unpack_from("<2q", content, documents_at - 8)
    (last_document,) = struct.unpack_from("<q", content, documents_at + 8 * (documents - 1))
    ends = itertools.accumulate((length * token_bytes for length in lengths[:-1]), initial=0)
    if (
        min(*lengths, last_length, last_offset) < 0
        or offsets != tuple(ends)
        or (first_document, last_document) != (0, sequences)
    ):
        raise ConfigError(
            f"{flag}: {idx} is damaged: its lengths, offsets and documents do not fit together; "
            "copy it again or preprocess again"
        )
    return last_offset + last_length * token_bytes


def check_tokenizer(data: DataConfig) -> tuple[int, int]:
    """Size and end-of-document id of the tokenizer; checks its files, and --vocab-size against them.

    Raises: ConfigError or TokenizerError naming flag, file and fix.
    """
    from megatron.tokenizer import tokenizer_info

    size, eod = tokenizer_info(
        data.tokenizer_type or "",
        tokenizer_model=data.tokenizer_model,
        vocab_file=data.vocab_file,
        merge_file=data.merge_file,
        vocab_size=data.vocab_size,
    )
    if data.merge_file and data.tokenizer_type == "GPT2BPETokenizer":
        _check_merges(data.merge_file)
    if data.tokenizer_type != "NullTokenizer" and data.vocab_size not in (None, size):
        data.refuse("vocab_size", f"the tokenizer has {size} tokens; drop the flag or correct it")
    return size, eod


def _check_merges(path: str) -> None:
    content = _read("--merge-file", path)
    wanted = "every line must be two tokens with a space between; give GPT-2's merges.txt"
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--merge-file {path}: not UTF-8 text; {wanted}") from error
    merges = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        if len(line.split(" ")) != 2:
            raise ConfigError(f"--merge-file {path}: line {number} is {line[:40]!r}; {wanted}")
        merges += 1
    if merges == 0:
        raise ConfigError(f"--merge-file {path}: holds no merges; {wanted}")


def check_load(checkpoint: CheckpointConfig, *, warn: bool = True) -> None:
    """Check that --load holds a checkpoint: a directory with a manifest, or one that `latest` names.

    Without one the run starts from iteration 0, with a logged warning if `warn` and --save is elsewhere, or stops if
    --exit-on-missing-checkpoint is given. It also stops if `latest` names a missing one: a checkpoint was lost, and
    only --allow-start-over starts again. A missing --load-tag is always an error. Whether a checkpoint is complete is
    checked on load. With --universal-checkpoint a universal checkpoint must be there, without it other ones.

    Raises: ConfigError naming flag, directory and fix.
    """
    from megatron.checkpointing.preflight.universal_directory import (
        check_no_universal,
        is_universal,
        universal_directory,
    )

    load = checkpoint.load
    if load is None or is_uri(load):
        return
    if os.path.exists(load) and not os.path.isdir(load):
        raise ConfigError(f"--load {load}: is not a directory; give the directory that --save wrote to")
    if checkpoint.universal_checkpoint:
        universal_directory(checkpoint)
        return
    tags = _tags(load)
    if checkpoint.load_tag is not None:
        # A save that was killed while it published leaves the older checkpoint of its tag under this name.
        there_as = (checkpoint.load_tag, checkpoint.load_tag + ".replaced")
        if not any(os.path.isdir(os.path.join(load, name)) for name in there_as):
            there = ", ".join(tags) or "none"
            raise ConfigError(f"--load-tag {checkpoint.load_tag}: not in --load {load}; there are: {there}")
        check_no_universal(checkpoint, alone=False)
        return
    if any(os.path.lexists(os.path.join(load, tag, "manifest.json")) for tag in tags):
        return
    if os.path.lexists(os.path.join(load, "latest")):
        check_no_universal(checkpoint, alone=False)
        _check_latest(checkpoint, load)
        return
    check_no_universal(checkpoint, alone=True)
    if any(os.path.isfile(os.path.join(load, name)) for name in ("manifest.json", "mp_rank_00_model_states.pt")):
        parent, tag = os.path.split(os.path.abspath(load))
        flag = " --universal-checkpoint" if is_universal(Path(load)) else ""
        raise ConfigError(f"--load {load}: is one checkpoint itself: give --load {parent} --load-tag {tag}{flag}")
    if checkpoint.finetune:
        raise ConfigError(f"--finetune takes the weights of --load {load}, where no checkpoint is; correct the path")
    if checkpoint.exit_on_missing_checkpoint:
        raise ConfigError(
            f"--load {load}: no checkpoint there; correct the path, or drop "
            "--exit-on-missing-checkpoint to start from iteration 0"
        )
    if warn and load != checkpoint.save:  # a first launch into its own directory finds nothing, as it should
        logger.warning(
            "--load %s: no checkpoint there (correct the path): training starts from iteration 0; "
            "give --exit-on-missing-checkpoint to stop instead",
            load,
        )


def _check_latest(checkpoint: CheckpointConfig, load: str) -> None:
    """Check that `latest` names a directory in `load`, in which there is no manifest."""
    path = os.path.join(load, "latest")
    try:
        tag = read_latest(Path(load))
        if tag is not None and os.path.isdir(os.path.join(load, tag)):
            return  # upstream's, or damaged: the load finds out
        wrong = f"{path} names {tag}, which is not there"
    except ValueError as error:
        wrong = str(error)
    if not checkpoint.allow_start_over:
        raise ConfigError(
            f"--load {load}: {wrong}, and there is no other checkpoint; restore it, or start from iteration 0 with "
            "--allow-start-over"
        )


def _tags(load: str) -> list[str]:
    """Names of the directories in `load` that could be checkpoints."""
    try:
        names = sorted(entry.name for entry in os.scandir(load) if os.path.isdir(entry.path))  # no link in a circle
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            f"--load {load}: cannot be read: {error.strerror}; correct the path or its permissions"
        ) from error
    return [name for name in names if name != "restart_trace" and not name.startswith(".")]


def check_writable(flag: str, directory: str, *, sync: bool = True) -> None:
    """Create `directory` and write, sync and remove a file in it. One rank that syncs is enough.

    Raises: ConfigError naming flag, directory and the operating system's reason.
    """
    try:
        os.makedirs(directory, exist_ok=True)
        with os.fdopen(_open_probe(directory), "wb") as stream:
            stream.write(bytes(_PROBE_BYTES))
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
    except OSError as error:
        raise ConfigError(
            f"{flag} {directory}: cannot be written to: {error.strerror}; "
            "give another directory, free space, or change its permissions"
        ) from error


def _open_probe(directory: str) -> int:
    """A descriptor of a new file without a name, which is gone however this process ends."""
    with contextlib.suppress(OSError):  # network file systems have no O_TMPFILE; other reasons come again below
        return os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    probe = os.path.join(directory, f".write_probe_{os.urandom(8).hex()}")
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.unlink(probe)
    return fd


def _file_size(flag: str, path: str, hint: str = "") -> int:
    """The size of a regular file in bytes."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise ConfigError(f"{flag}: {path}: {error.strerror}; correct the path{hint}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{flag}: {path} is not a regular file; correct the path{hint}")
    return status.st_size


def _dataset_hint(prefix: str) -> str:
    """ "; did you mean ...?" with a dataset whose name begins like `prefix`, or nothing."""
    directory, name = os.path.split(prefix)
    try:
        found = sorted(entry for entry in os.listdir(directory or ".") if entry.endswith(".idx"))
    except OSError:
        return ""
    near = [entry for entry in found if entry.startswith(name)]
    return (
        f"; did you mean {os.path.join(directory, near[0][:-4])}?" if name and near and near[0] != name + ".idx" else ""
    )


def _read(flag: str, path: str) -> bytes:
    _file_size(flag, path)
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: cannot be read: {error.strerror}; correct the path or its permissions"
        ) from error
