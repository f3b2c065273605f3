"""A real training state of a wanted size: DeepSpeed's engine around the model, ready to be saved and loaded."""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
from pathlib import Path
from typing import Any

from megatron.config import Config, padded_vocab_size
from megatron.config.arguments import config_from_args, parse_args
from restart_trace.clock import now_ns
from restart_trace.recorder import untraced_recorder
from restart_trace.startup import Startup

_BYTES_PER_PARAMETER = 14  # bf16 weight in a layer file; fp32 master weight and two moments in the shard
_LAYERS = 24  # aimed at: more layers are more files, and files are what tracing costs time for
_HIDDEN_STEP = 64
_VOCAB_SIZE = 256


@dataclasses.dataclass
class SavableState:
    """An engine and the RunContext it is saved in, without a trace; replace what a variant has other."""

    engine: Any
    context: Any

    def checkpointer(self, **changes: Any) -> Any:
        """The Checkpointer of the context with `changes`; one that saves asynchronously commits by the same group."""
        from megatron.checkpointing.manager import Checkpointer

        context = dataclasses.replace(self.context, **changes)
        return Checkpointer(context, "0", commit_control=context.control)


def model_flags(bytes_per_rank: int, ranks: int) -> list[str]:
    """Flags of a LLaMA-style model whose checkpoint has about `bytes_per_rank` per rank with TP = `ranks`.

    A layer has 12.25 hidden^2 parameters: four projections and an MLP of 2.75 hidden.
    """
    parameters = bytes_per_rank / _BYTES_PER_PARAMETER * ranks
    step = _HIDDEN_STEP * ranks
    hidden = max(step, round(math.sqrt(parameters / (_LAYERS * 12.25)) / step) * step)
    layers = max(1, round(parameters / (12.25 * hidden**2)))
    return [
        "--tensor-model-parallel-size", str(ranks), "--num-layers", str(layers), "--hidden-size", str(hidden),
        "--ffn-hidden-size", str(hidden * 11 // 4), "--num-attention-heads", str(hidden // 32),
        "--seq-length", "32", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-4", "--bf16",
        "--use-rotary-position-embeddings", "--untie-embeddings-and-output-weights", "--swiglu",
        "--normalization", "rmsnorm", "--disable-bias-linear",
        "--tokenizer-type", "NullTokenizer", "--vocab-size", str(_VOCAB_SIZE - 1), "--data-path", "none",
    ]  # fmt: skip


def build_state(bytes_per_rank: int, ranks: int) -> SavableState:
    """Bring up torch.distributed, the model and DeepSpeed's engine, with moments that are not all zero."""
    config = config_from_args(parse_args(model_flags(bytes_per_rank, ranks)), os.environ)
    return build_from(config, _VOCAB_SIZE)


def build_from(config: Config, vocab_size: int) -> SavableState:
    """As `build_state`, of the model and layout of `config`; `vocab_size` is the tokenizer's."""
    from megatron.startup.initialize import import_heavy, initialize_megatron

    import_heavy()
    from megatron.checkpointing.context import RunContext
    from megatron.checkpointing.engines.base import EngineOptions
    from megatron.checkpointing.engines.registry import create_engine
    from megatron.checkpointing.state.restore import start_over
    from megatron.checkpointing.store.naming import RankPlace
    from megatron.model.gpt_model import GPTModelPipe
    from megatron.startup.engine_setup import build_engine
    from megatron.startup.logging_setup import printed_as_debug

    runtime = initialize_megatron(config, Startup(untraced_recorder(), None, config.parallel.rank, 0, now_ns()))
    vocab = padded_vocab_size(vocab_size, config.model.make_vocab_size_divisible_by, runtime.layout.tp)
    with printed_as_debug():
        model = GPTModelPipe(config.model, vocab, runtime.layout, runtime.coordinates.tp, runtime.device, _no_loss)
        engine = build_engine(config, model, lambda batch: batch)
    start_over(engine, config.training.seed)
    _fill_moments(engine)
    context = RunContext(
        config=config,
        place=RankPlace(runtime.layout, runtime.coordinates, config.model.params_dtype),
        vocab_size=vocab_size,
        padded_vocab_size=vocab,
        control=runtime.control,
        recorder=untraced_recorder(),
        checkpoint_engine=create_engine("torch", EngineOptions()),
    )
    return SavableState(engine, context)


def _fill_moments(engine: Any) -> None:
    """Let the optimizer make its moments, as its first step does, and give them values.

    Zeros may not be in memory at all, and would be read at no cost.
    """
    import torch

    shards = [shard for group in engine.basic_optimizer.param_groups for shard in group["params"]]
    for shard in shards:
        shard.grad = torch.zeros_like(shard)
    engine.basic_optimizer.step()
    for shard in shards:
        shard.grad = None
        for value in engine.basic_optimizer.state[shard].values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.uniform_()


def _no_loss(*_: Any) -> Any:
    raise RuntimeError("this model is saved and loaded, never trained")


def touch_free_memory(num_bytes: int) -> None:
    """Let the free pages that the sample will use be ones that were in use a moment ago.

    A virtual machine may have given free memory back to its host; getting it back is slow, and how much of it
    a sample needs is chance.
    """
    with mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE)) as memory:
        for offset in range(0, num_bytes, mmap.PAGESIZE):
            memory[offset] = 1


def config_for(config: Config, directory: Path) -> Config:
    """`config` with saves to and loads from `directory`."""
    checkpoint = dataclasses.replace(config.checkpoint, save=str(directory), save_interval=1, load=str(directory))
    return dataclasses.replace(config, checkpoint=checkpoint)
