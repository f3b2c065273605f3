"""Checkpoints: where, when and how they are saved, and what is restored from them."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from megatron.config.errors import ConfigError, refuse
from megatron.config.flags import FlagGroup, flag
from megatron.config.uris import URI_FORM, ObjectUri, is_uri, location_of

_OF_INTERLEAVED = ("comm_profile_steps", "span_threshold", "span_alpha", "max_blocks_in_span", "snapshot_buffer_size")
_OF_MEMORY = (
    "persist_interval", "replicas", "failure_domain", "replica_compression", "peer_timeout", "replication_traffic",
    *_OF_INTERLEAVED,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(FlagGroup):
    """Checkpointing: saving, loading, verifying."""

    save: str | None = flag(None, f"directory, or {URI_FORM}, to save checkpoints to")
    save_interval: int | None = flag(None, "iterations between saves; needed with --save", least=1)
    keep_last: int | None = flag(
        None,
        "keep only this many newest checkpoints, of those that this run has saved; default: all",
        least=1,
        needs="save",
    )
    take_over: bool = flag(
        False,
        "save to --save although another live launch saves there: that launch stops saving and ends",
        needs="save",
    )
    no_save_optim: bool = flag(False, "save no optimizer state", needs="save")
    no_save_rng: bool = flag(False, "save no random-number state", needs="save")
    export_hf_interval: int | None = flag(
        None,
        "iterations between exports of saved checkpoints as Hugging Face models, which a process beside the training "
        "writes; a multiple of --save-interval (docs/hf.md)",
        least=1,
        needs="save",
    )
    export_hf_dir: str | None = flag(
        None,
        "directory in which --export-hf-interval writes a model directory iteration_N for each export (default: hf in "
        "--save)",
        needs="export_hf_interval",
    )
    export_hf_wait: float | None = flag(
        None,
        "seconds for which the end of training waits for exports (default: 300); the next start makes those that are "
        "left",
        least=0,
        needs="export_hf_interval",
    )
    load: str | None = flag(
        None, f"directory, or {URI_FORM}, to load a checkpoint from; if it has none, training starts from iteration 0"
    )
    load_tag: str | None = flag(
        None,
        "which checkpoint of --load to load, such as global_step5 (default: the newest complete one)",
        needs="load",
    )
    ckpt_fully_parallel_load: bool = flag(
        False,
        "each data-parallel replica reads a part of the weights and broadcasts it to the others, which pays where the "
        "network is faster than the storage (default: each reads all weights of its stage)",
        needs="load",
    )
    load_timeout: float | None = flag(
        None,
        "seconds that a rank may take to read its files of a checkpoint before the run ends (default: as long as the "
        "other ranks wait for it, --distributed-timeout-minutes)",
        above=0,
        needs="load",
    )
    no_load_optim: bool = flag(False, "restore no optimizer state", needs="load")
    no_load_rng: bool = flag(False, "restore no random-number state", needs="load")
    no_load_lr_state: bool = flag(False, "restore no schedule state", needs="load")
    finetune: bool = flag(False, "restore weights only and start from iteration 0", needs="load")
    reset_iteration: bool = flag(
        False,
        "restore weights, optimizer and random state, but count iterations and samples from 0; the schedule continues "
        "from the checkpoint unless --no-load-lr-state is given",
        needs="load",
    )
    exit_on_missing_checkpoint: bool = flag(
        False, "stop if --load holds no checkpoint, instead of starting from iteration 0", needs="load"
    )
    allow_start_over: bool = flag(
        False,
        "start from iteration 0 if every checkpoint in --load is damaged, or `latest` names a missing one",
        needs="load",
    )
    start_over: str | None = flag(
        None,
        "begin as --load, --finetune and the like say, although --save holds checkpoints of this run; LABEL is kept in "
        "those of the new start, from which restarts with the same LABEL go on",
        needs="save",
    )
    allow_other_checkpoints: bool = flag(
        False, "save into a --save that holds checkpoints which this run does not resume from", needs="save"
    )
    on_repeated_error: str = flag(
        "stop",
        "when the same error has ended three starts in a row at the same iteration; stop: end with exit code 65 and "
        "name the checkpoint and the iteration; back: go on from the checkpoint before, once; retry: go on",
        choices=("stop", "back", "retry"),
    )
    checkpoint_engine: str = flag("torch", "how checkpoint files are written; an unknown name lists the engines")
    checkpoint_durability: str = flag(
        "fsync", "fsync: a committed checkpoint survives a power loss; none: as upstream", choices=("fsync", "none")
    )
    checkpoint_files_per_node: int | None = flag(
        None,
        "engine lazy: the ranks of a node write into so many files, each rank its own extents; fewer files are less "
        "work for a file system's metadata servers (default: a file per rank)",
        least=1,
        needs="save",
    )
    checkpoint_compression: str = flag(
        "none",
        "engine lazy: how files are compressed, without loss; zstd pays where the storage is slower than "
        "free processors compress, which ckpt-plan --compress-rate computes",
        choices=("none", "zstd"),
    )
    persist_interval: int | None = flag(
        None,
        "engine memory: write every N-th save to --save, too, and the last one; the others are kept in host memory "
        "alone (default: 1, all)",
        least=1,
        needs="save",
    )
    replicas: int | None = flag(
        None,
        "engine memory: copies of each save in host memory, that of its own host included (default: 2 where there are "
        "2 hosts or more, and megatron.launch has a coordinator)",
        least=1,
        needs="save",
    )
    failure_domain: str | None = flag(
        None,
        "engine memory: file with a line `HOST DOMAIN` for each host; no two copies of a save are kept in one domain, "
        "such as a rack",
        needs="save",
    )
    replica_compression: str = flag(
        "none",
        "engine memory: how copies are compressed, without loss, on their way to and from other hosts; zstd pays where "
        "the network is slower than free processors compress, which ckpt-plan --compress-rate computes",
        choices=("none", "zstd"),
    )
    replication_traffic: str = flag(
        "naive",
        "engine memory: when copies go to other hosts; naive: at once; interleave: while training leaves the network "
        "idle, as profiled steps did (docs/peers.md)",
        choices=("naive", "interleave"),
    )
    comm_profile_steps: int | None = flag(
        None, "--replication-traffic interleave: steps to profile (default: 4; GEMINI's artifact: 20)", least=2
    )
    span_threshold: float | None = flag(
        None,
        "--replication-traffic interleave: use idle spans longer than so many ms (default: 2; GEMINI's artifact: 10)",
        least=0,
    )
    span_alpha: float | None = flag(
        None,
        "--replication-traffic interleave: share of each idle span to use (default: 1, with a margin around traffic; "
        "GEMINI's artifact: 0.6)",
        above=0,
    )
    max_blocks_in_span: int | None = flag(
        None,
        "--replication-traffic interleave: blocks that a copy sends in an idle span (default: all that fit; GEMINI's "
        "artifact: 2)",
        least=1,
    )
    snapshot_buffer_size: float | None = flag(
        None,
        "--replication-traffic interleave: size of a block, in 2^20 values of 4 bytes (default: what the network takes "
        "in 2 ms, at least 256 KiB; GEMINI's artifact: 4)",
        least=2**-10,
    )
    peer_timeout: float = flag(
        10.0, "engine memory: seconds without an answer after which a host that holds copies counts as stalled", above=0
    )
    host_cache_size: float | None = flag(
        None,
        "host memory that an asynchronous save may use, GiB per rank (default: the size of the rank's "
        "checkpoint, at most half of its share of the free memory)",
        above=0,
    )
    io_threads: int | None = flag(None, "threads that write or read files (default: the engine's own)", least=1)
    io_block_size: float = flag(8.0, "size of one read or write of an I/O thread, MiB; engine lazy")
    direct_io: str = flag(
        "auto",
        "bypass the page cache: auto falls back to buffered I/O, and logs it, if the file system refuses; engine lazy",
        choices=("auto", "on", "off"),
    )
    prefetch_on_start: bool = flag(
        False, "read the rank's part of the checkpoint into the page cache while the process starts", needs="load"
    )
    prefetch_limit: float | None = flag(
        None,
        "page cache that --prefetch-on-start may fill, GiB per rank (default: half of the rank's share of the free "
        "memory)",
        above=0,
        needs="prefetch_on_start",
    )
    checksum: str = flag(
        "crc32", "checksum to compute while saving, if the file format has none of its own", choices=("crc32", "none")
    )
    verify_checkpoint: str = flag(
        "checksum",
        "check of a checkpoint's files before it is loaded; none: as size, and engine datastates does not read back "
        "what its library has saved",
        names=("--checkpoint-verify",),
        choices=("checksum", "size", "none"),
    )
    storage_cache: str | None = flag(
        None, "directory on the node's own disk for files on their way to and from object storage (default: in TMPDIR)"
    )
    storage_deadline: float = flag(
        120.0, "seconds that a request to object storage may take, with its retries", least=1
    )
    universal_checkpoint: bool = flag(
        False,
        "load what DeepSpeed's ds_to_universal has written to --load: what `latest_universal` or --load-tag names",
        needs="load",
    )
    verify_restored_state: bool = flag(
        False, "record a hash of every tensor when saving, and compare them after loading"
    )
    # For the engine's library, of a --deepspeed_config stanza.
    library_options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        self.check_values()
        for name in ("save", "load"):
            if getattr(self, name) == "":
                refuse("--" + name, "''", "is empty; give a directory")
        if self.save is not None and self.save_interval is None:
            self.refuse("save", "add --save-interval N")
        self._check_uris()
        if self.io_block_size <= 0 or (self.io_block_size * 256) % 1:
            self.refuse("io_block_size", "must be a multiple of 4 KiB (0.00390625)")
        if self.prefetch_on_start and self.direct_io == "on":
            raise ConfigError(
                "--prefetch-on-start reads into the page cache, and --direct-io on reads around it: drop one of "
                "them, or use --direct-io auto"
            )
        self._check_memory()
        self._check_shared_files()
        self._check_compression()
        self._check_exports()
        if self.start_over is not None:
            self._check_start_over(self.start_over)
        if self.load_tag is not None and ("/" in self.load_tag or self.load_tag in ("", ".", "..")):
            self.refuse("load_tag", "must name one directory inside --load, as global_step5")

    def _check_start_over(self, label: str) -> None:
        if not label or not label.isprintable() or " " in label:
            self.refuse("start_over", "must be one printable word, such as second")
        another = self.load_tag or self.universal_checkpoint or self.finetune or self.reset_iteration
        if self.load == self.save and not another:
            self.refuse(
                "start_over",
                f"--load {self.load} is the directory of --save, so the run would go on from its newest checkpoint; "
                "give --load-tag, or drop --load to begin from iteration 0",
            )

    def _check_memory(self) -> None:
        """What --checkpoint-engine memory asks for, and what only that engine takes."""
        memory = self.checkpoint_engine == "memory"
        given = [name for name in _OF_MEMORY if getattr(self, name) != getattr(CheckpointConfig, name)]
        if given and not memory:
            why = f"--checkpoint-engine {self.checkpoint_engine} keeps no saves in host memory; drop the flag, or use "
            self.refuse(given[0], why + "--checkpoint-engine memory")
        for name in ("failure_domain", "replica_compression", "replication_traffic"):
            if name in given and self.replicas == 1:
                self.refuse(name, "--replicas 1 keeps no copy on another host; drop one of the flags")
        paced = [name for name in _OF_INTERLEAVED if name in given]
        if paced and self.replication_traffic != "interleave":
            self.refuse(
                paced[0],
                f"--replication-traffic {self.replication_traffic} sends copies at once; use interleave, or drop the "
                "flag",
            )
        if self.span_alpha is not None and self.span_alpha > 1:
            self.refuse("span_alpha", "is a share; give at most 1")
        if memory and self.checksum == "none":
            self.refuse("checksum", "--checkpoint-engine memory loads nothing that it cannot verify; use crc32")

    def _check_shared_files(self) -> None:
        """What --checkpoint-files-per-node asks of engine and storage."""
        if self.checkpoint_files_per_node is None:
            return
        if self.checkpoint_engine != "lazy":
            why = f"--checkpoint-engine {self.checkpoint_engine} has no files that ranks share; use lazy, or drop the "
            self.refuse("checkpoint_files_per_node", why + "flag")
        if is_uri(self.save):
            why = f"--save {self.save} is object storage, where only one rank can write an object; drop the flag"
            self.refuse("checkpoint_files_per_node", why)

    def _check_compression(self) -> None:
        """What --checkpoint-compression asks of engine and files."""
        if self.checkpoint_compression == "none":
            return
        if self.save is None:
            self.refuse("checkpoint_compression", "does nothing without --save DIR: add it or drop the flag")
        if self.checkpoint_engine != "lazy":
            why = f"--checkpoint-engine {self.checkpoint_engine} writes no compressed files; use lazy, or drop the flag"
            self.refuse("checkpoint_compression", why)
        if self.checkpoint_files_per_node is not None:
            why = f"--checkpoint-files-per-node {self.checkpoint_files_per_node}: ranks that share a file must know "
            why += "where each other's bytes lie before these are compressed; drop one of the flags"
            self.refuse("checkpoint_compression", why)

    def _check_exports(self) -> None:
        """What --export-hf-interval asks of saves, and of --export-hf-dir."""
        if self.export_hf_dir is not None and (not self.export_hf_dir or is_uri(self.export_hf_dir)):
            self.refuse("export_hf_dir", "exports are written to a directory; give one")
        if self.export_hf_interval is None or self.save_interval is None:
            return
        drop = "or drop the flag"
        if is_uri(self.save):
            why = f"exports read checkpoints in directories, and --save {self.save} is none; give a directory, {drop}"
            self.refuse("export_hf_interval", why)
        if self.checkpoint_engine == "none":
            self.refuse("export_hf_interval", f"--checkpoint-engine none writes nothing to export; use another, {drop}")
        stored, of = self.save_interval, f"--save-interval {self.save_interval}"
        if self.persist_interval is not None:
            stored *= self.persist_interval
            of += f" x --persist-interval {self.persist_interval}, which are on storage"
        if self.export_hf_interval % stored:
            self.refuse("export_hf_interval", f"must be a multiple of {stored} ({of}): checkpoints are exported")

    @property
    def export_directory(self) -> str | None:
        """Where --export-hf-interval writes exports; None without it."""
        if self.export_hf_interval is None or self.save is None:
            return None
        return self.export_hf_dir or os.path.join(self.save, "hf")

    @property
    def in_object_storage(self) -> bool:
        """Whether checkpoints are saved to or loaded from object storage."""
        return is_uri(self.save) or is_uri(self.load)

    def _check_uris(self) -> None:
        for name in ("save", "load"):
            text = getattr(self, name)
            if text is not None and isinstance(uri := location_of("--" + name, text), ObjectUri):
                object.__setattr__(self, name, str(uri))  # one spelling: a run resumes where both flags are the same
        if not self.in_object_storage:
            for name in ("storage_cache", "storage_deadline"):
                if getattr(self, name) != getattr(CheckpointConfig, name):
                    self.refuse(name, f"does nothing without a --save or --load of {URI_FORM}; drop the flag")
            return
        if is_uri(self.load) and self.prefetch_on_start:
            raise ConfigError(f"--prefetch-on-start reads files ahead, and --load {self.load} has none; drop the flag")
        if is_uri(self.load) and self.universal_checkpoint:
            raise ConfigError(
                f"--universal-checkpoint loads from a directory, and --load {self.load} is object storage: copy the "
                "universal checkpoint to a directory"
            )
