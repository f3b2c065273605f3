"""What faults are injected into: a save of the trainer, and a start that loads; each in a process that is forked.

One process builds the trainer's model and DeepSpeed's engine for one rank and trains; what it forks has all of that,
and saves or loads with the code of the trainer. Of two ranks each builds its own after the fork: their collectives need
threads, which a forked process does not have.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import pretrain_gpt
from megatron.checkpointing.engines.errors import CheckpointError, CheckpointSaveError, EngineUnavailableError
from megatron.checkpointing.manager import Checkpointer
from megatron.checkpointing.preflight.first_start import FirstStart
from megatron.checkpointing.state.collect import Progress
from megatron.checkpointing.state.hashes import tensor_hashes
from megatron.checkpointing.state.restore import start_over
from megatron.checkpointing.store.bucket.checkpoints import open_checkpoints
from megatron.checkpointing.store.bucket.generations import ObjectOwnership
from megatron.checkpointing.store.bucket.generations import claim as claim_prefix
from megatron.checkpointing.store.ownership import Ownership, claim
from megatron.config import Config, ConfigError
from megatron.config.arguments import config_from_args, parse_args
from megatron.config.uris import is_uri
from megatron.fileio.objects.errors import ObjectStoreError
from megatron.startup.engine_setup import build_engine
from megatron.startup.initialize import Runtime, initialize_megatron
from megatron.startup.preflight import check_before_imports
from megatron.training.checkpoints import build_checkpointer, restore
from megatron.training.data import batch_request
from restart_trace.clock import now_ns
from restart_trace.recorder import untraced_recorder
from restart_trace.startup import Startup
from tests.dist.harness import LLAMA_STYLE, ROOT

VOCABULARY = 128
_MODEL = [
    *LLAMA_STYLE, "--num-layers", "1", "--hidden-size", "16", "--ffn-hidden-size", "32", "--num-attention-heads", "2",
    "--seq-length", "8", "--bf16", "--micro-batch-size", "1", "--train-iters", "100",
    "--lr", "1e-3", "--num-workers", "0", "--eval-iters", "0", "--make-vocab-size-divisible-by", str(VOCABULARY),
]  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a save or a start ended. `step`: that was saved or loaded; None if it `failed`, which is what it said.

    `hashes`: of the state that was loaded; `warnings`: what was logged besides.
    """

    step: int | None
    failed: str | None
    hashes: str
    warnings: list[str]


def copy_data(directory: Path) -> None:
    """The data set of `Trained`: a copy, as its index is cached beside it."""
    directory.mkdir(parents=True)
    golden = ROOT / "tests" / "golden" / "upstream_run" / "data"
    for name in ("corpus_text_document.bin", "corpus_text_document.idx"):
        (directory / name).write_bytes((golden / name).read_bytes())


class Trained:
    """A rank of a trainer, with a state that each step changes.

    `directory`: of the data set. `claimed`: called when a save or a start has claimed --save and the ranks have met.
    """

    def __init__(self, directory: Path, claimed: Callable[[], object] = lambda: None) -> None:
        golden = ROOT / "tests" / "golden" / "upstream_run" / "data"
        self._claimed = claimed
        self._flags = [
            *_MODEL, "--global-batch-size", os.environ.get("WORLD_SIZE", "1"),
            "--data-path", str(directory / "corpus_text_document"), "--split", "100,0,0", "--tokenizer-type",
            "GPTSentencePieceTokenizer", "--tokenizer-model", str(golden / "tokenizer.model"),
        ]  # fmt: skip
        config = self.config()
        startup = Startup(untraced_recorder(), None, 0, 0, now_ns())
        self._runtime: Runtime = initialize_megatron(config, startup, commits_in_background=True)
        self._vocabulary = check_before_imports(config).vocabulary
        model = pretrain_gpt.model_provider(config, self._vocabulary.padded, self._runtime)
        request = batch_request(config, self._runtime, None)
        self._engine = build_engine(config, model, functools.partial(pretrain_gpt.get_batch_pipe, request=request))
        start_over(self._engine, seed=1)
        self._steps = 0

    def config(self, *flags: str) -> Config:
        return config_from_args(parse_args([*self._flags, *flags]))

    def train(self) -> None:
        """One step."""
        generator = torch.Generator().manual_seed(self._steps)
        batches = ({"text": torch.randint(0, VOCABULARY, (1, 9), generator=generator)} for _ in itertools.count())
        self._engine.lr_scheduler.begin_iteration(1, self._steps)
        self._engine.train_batch(data_iter=batches)
        self._steps += 1

    def forget(self) -> None:
        """Zero the live state, as a start that loads it after another would hide what it does not load."""
        state = self._engine.optimizer.state_dict()
        moments = [value for slot in state["base_optimizer_state"]["state"].values() for value in slot.values()]
        with torch.no_grad():
            for tensor in (*self._engine.module.parameters(), *state["single_partition_of_fp32_groups"], *moments):
                if isinstance(tensor, torch.Tensor):
                    tensor.zero_()

    def hashes(self) -> str:
        """Of the live state."""
        return hashlib.sha256(json.dumps(tensor_hashes(self._engine), sort_keys=True).encode()).hexdigest()

    def save(self, config: Config, step: int) -> Ended:
        """In a forked process: a launch claims --save, saves the live state as that of iteration `step`, and ends."""
        log = _Log()
        try:
            failed = self._save(config, step)
        except (CheckpointSaveError, ConfigError, ObjectStoreError, OSError) as error:
            failed = f"{type(error).__name__}: {error}"
        return Ended(step if failed is None else None, failed, self.hashes(), log.warnings)

    def _save(self, config: Config, step: int) -> str | None:
        random.seed(step)  # a fork seeds it anew; equal saves have equal bytes, and one start tells of them all
        ownership = _claim(config)
        checkpointer = self._checkpointer(config, ownership)
        self._claimed()
        checkpointer.save(self._engine, Progress(step, step, 0, (100, 0, 0)))
        checkpointer.background.release_state()
        checkpointer.background.drain()
        errors = [save.error for save in checkpointer.finished() if save.error is not None]
        checkpointer.close()
        if ownership is not None:
            ownership.release()
        return errors[0] if errors else None

    def start(self, config: Config) -> Ended:
        """In a forked process: a launch starts and loads; its state is another one until then."""
        log, step, failed = _Log(), None, None
        try:
            step = self._start(config)
        except (CheckpointError, ConfigError, EngineUnavailableError) as error:
            failed = f"{type(error).__name__}: {error}"
        return Ended(step, failed, self.hashes(), log.warnings)

    def _start(self, config: Config) -> int:
        """The iteration that was loaded; 0: none."""
        try:  # as the trainer does, which tells of these by name
            check_before_imports(config)
            ownership = _claim(config)
        except (ObjectStoreError, OSError) as error:
            raise ConfigError(str(error)) from error
        checkpointer = self._checkpointer(config, ownership)
        self._claimed()
        progress = restore(checkpointer, self._engine)
        checkpointer.close()
        if ownership is not None:
            ownership.release()
        return 0 if progress is None else progress.iteration

    def _checkpointer(self, config: Config, ownership: Ownership | ObjectOwnership | None) -> Checkpointer:
        return build_checkpointer(
            config, self._runtime, self._runtime.control, untraced_recorder(), ownership, self._vocabulary[:2],
            None, None, None, FirstStart(),
        )  # fmt: skip


def _claim(config: Config) -> Ownership | ObjectOwnership | None:
    """Claim --save as rank 0 does. Saves in memory are of use to a launch alone that was restarted in place."""
    options = config.checkpoint
    assert options.save is not None
    if config.parallel.rank != 0:
        return None
    if is_uri(options.save):
        stored = open_checkpoints("--save", options.save, options)
        ownership = claim_prefix(stored.bucket, stored.uri, "faults")
        stored.claimed(ownership.generation)
        return ownership
    return claim(Path(options.save), "faults", restarted=options.checkpoint_engine == "memory")


class _Log(logging.Handler):
    """The warnings and errors of this process from now on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []
        root = logging.getLogger()
        for handler in root.handlers[:]:
            root.removeHandler(handler)
        root.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage()[:1000])
