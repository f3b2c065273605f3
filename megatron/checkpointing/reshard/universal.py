"""--redistribute universal: DeepSpeed's universal checkpoint, the baseline that `direct` is compared with.

Rank 0 has deepspeed.checkpoint.ds_to_universal write each parameter whole, with its master and its moments, to a
directory of its own beside the checkpoint; every rank then loads its part by DeepSpeed's load_universal, and the
directory is removed. It has the name of an unfinished checkpoint: no load takes it for one, and the next save removes
what a killed process left. DeepSpeed's: all of it but the patterns (state.universal_checkpoint_info).

Upstream's patterns split fused QKV as one matrix. An upstream checkpoint is converted by ours instead, out of a
directory of links to its files in which mp_rank_00 has them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing import naming as names
from megatron.checkpointing.agreement import run_on_all_ranks
from megatron.checkpointing.engines.errors import CheckpointError, CheckpointMismatchError, reading
from megatron.checkpointing.engines.torch_files import verify_file
from megatron.checkpointing.engines.unpickling import known_classes
from megatron.checkpointing.foreign import FIRST_FILE, ForeignCheckpoint
from megatron.checkpointing.ownership import newest_owner
from megatron.checkpointing.reshard.base import LayoutLoad
from megatron.checkpointing.state import Progress, preserving_settings, restore_progress, universal_checkpoint_info
from megatron.parallel.topology import Layout

CONVERSION_EVENT = "universal_conversion"  # notice in the trace of rank 0: JSON, seconds of imports and of the rest
_LAST_WORDS = 2000  # characters


class UniversalLoad(LayoutLoad):
    """By DeepSpeed's universal checkpoint, out of files of torch.save."""

    _patterns: dict[str, Any] | None = None  # to convert by, where the checkpoint has others: upstream's

    def run(self) -> Progress:
        """Verify, convert, load, apply; collective over all ranks, and raises on all of them as `run_on_all_ranks`.

        CheckpointMismatchError, before anything is converted, says that the checkpoint was saved with other patterns.
        """
        control = self._ctx.control
        run_on_all_ranks(control, self._op, self._check)
        attempt = _attempt_in(self._directory.parent)
        name = names.temporary_directory(f"universal_{self._directory.name}", attempt)
        folder = self._directory.with_name(name)
        try:
            folders = run_on_all_ranks(control, self._op, lambda: self._convert(folder))
            run_on_all_ranks(control, self._op, lambda: self._load(folders[0]))
        finally:
            if control.rank == 0:
                with self._op.span("redistribute", "reshard"):
                    shutil.rmtree(folder, ignore_errors=True)
        return self._apply()

    def _check(self) -> None:
        """The patterns are those of this program, and the files (a share of them on each rank) are what was saved."""
        old = Layout(**self._manifest.layout)
        files = self._manifest.files
        first = names.model_states_file(old, old.coordinates(0))
        with reading(self._directory / first):
            self._common = self._reader.load_values(first, self._checkpoint, self._op)
            padded = self._manifest.model["padded_vocab_size"]
            patterns = universal_checkpoint_info(self._ctx.config.model, old.tp, self._ctx.vocab_size, padded)
        if self._foreign is not None:
            self._check_foreign(self._foreign)
            self._patterns = patterns_for_upstream(patterns)
        elif self._common.get("universal_checkpoint_info") != patterns:
            raise CheckpointMismatchError(
                f"--redistribute universal: {self._directory / first} was saved with other patterns for DeepSpeed's "
                "conversion than this program would use, which may split its parameters wrongly; drop the flag"
            )
        self._check_optimizer()
        if not self._reader.options.verify_checksums:
            return
        states = sorted(name for name in files if name.endswith(".pt"))
        for name in states[self._ctx.control.rank :: self._ctx.control.world_size]:
            verify_file(self._directory / name, files[name], self._op)

    def _check_foreign(self, foreign: ForeignCheckpoint) -> None:
        if foreign.heads_interleaved:
            raise CheckpointMismatchError(
                f"--redistribute universal: {self._directory} is of an upstream before December 2024, whose fused QKV "
                "lies head by head, and DeepSpeed's conversion leaves it so; drop the flag"
            )

    def _convert(self, folder: Path) -> Path | None:
        """On rank 0: have `folder` made, with the checkpoint in it; returns where."""
        if self._ctx.control.rank != 0:
            return None
        target = folder / self._directory.name
        source = folder / "source" if self._patterns is not None else self._directory
        arguments = (os.fspath(source), os.fspath(target), os.getpid())
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from megatron.checkpointing.reshard.universal_convert import main; main{arguments!r}"
        )
        with self._op.span("redistribute", "reshard"):
            try:
                folder.mkdir()
                if self._patterns is not None:
                    make_source(source, self._directory, self._manifest.files, self._patterns)
            except OSError as exc:
                raise CheckpointError(self._cannot_convert(target, str(exc))) from exc
            done = subprocess.run(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=_environment(),
                check=False,
            )
        if done.returncode != 0:
            last_words = done.stderr.strip()[-_LAST_WORDS:]
            raise CheckpointError(
                self._cannot_convert(target, f"exit code {done.returncode}, after saying\n{last_words}")
            )
        self._op.event(CONVERSION_EVENT, json.dumps(json.loads(done.stdout.splitlines()[-1])))
        return target

    def _cannot_convert(self, target: Path, why: str) -> str:
        return (
            f"--redistribute universal: DeepSpeed could not convert {self._directory} into {target}; make room or "
            f"rights there, or drop the flag: {why}"
        )

    def _load(self, folder: Path) -> None:
        """DeepSpeed reads, slices and copies parameter by parameter: one span for all of it."""
        with self._op.span("load", "deserialize"), preserving_settings(self._engine.optimizer):
            try:
                self._engine.optimizer.load_state_dict(
                    state_dict_list=None,
                    checkpoint_folder=os.fspath(folder),
                    load_optimizer_states=True,
                    load_from_fp32_weights=True,
                )
            except OSError as exc:  # of the converted copy: it tells nothing against the checkpoint
                raise CheckpointError(f"--redistribute universal: {folder} cannot be read: {exc}") from exc

    def _apply(self) -> Progress:
        """Make what was read the state of training; collective over all ranks."""
        with self._op.span("load", "host_to_device"):
            progress = restore_progress(self._engine, self._common, self._ctx.config)
        with self._op.span("redistribute", "all_gather"):
            self._engine.optimizer.update_lp_params()
        return progress


def patterns_for_upstream(patterns: dict[str, Any]) -> dict[str, Any]:
    """`patterns`, and where upstream has more on the last stage than this program: a copy of the position embedding."""
    replicated = patterns["pipeline_replicated_parameter_patterns"]
    positions = ["tied_modules.embed.position_embeddings.weight"] if replicated else []
    return patterns | {"pipeline_replicated_parameter_patterns": replicated + positions}


def make_source(source: Path, checkpoint: Path, files: Iterable[str], patterns: dict[str, Any]) -> None:
    """Make the directory `source` of links to `files` of an upstream checkpoint, with `patterns` in its mp_rank_00."""
    source.mkdir()
    for name in files:
        if name != FIRST_FILE:
            (source / name).symlink_to(checkpoint.absolute() / name)
    with known_classes():
        state = torch.load(checkpoint / FIRST_FILE, map_location="cpu", weights_only=True)
    del state["args"]  # it has a class of upstream's, and the conversion has no use for it
    torch.save(state | {"universal_checkpoint_info": patterns}, source / FIRST_FILE)


def _environment() -> dict[str, str]:
    """One thread, no device, and no class unpickled but those of the allow-list, whatever DeepSpeed asks for."""
    return os.environ | {
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
    }


def _attempt_in(save_dir: Path) -> str:
    """The name of the attempt: of this launch's generation where it saves there, so that the next one clears it away.

    In the directory of others it is removed by nobody but this launch: they may be saving there.
    """
    owner = newest_owner(save_dir)
    if owner is None or owner.pid != os.getpid():
        return f"{os.getpid()}_{time.time_ns():x}"
    return f"{names.attempt_of(owner.generation)}_0"
