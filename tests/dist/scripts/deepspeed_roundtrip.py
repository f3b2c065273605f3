"""One rank: DeepSpeed's own load_checkpoint reads a checkpoint of ours, and its own save_checkpoint writes it again.

Takes the trainer's flags; --load and --load-tag name the checkpoint, ROUNDTRIP_OUT the directory to save to. Ends with
an error if a tensor in the live engine does not have the hash that was recorded when the checkpoint was saved.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron.config import padded_vocab_size
from megatron.config.arguments import parse_or_exit
from megatron.tokenizer import tokenizer_info
from pretrain_gpt import model_provider
from restart_trace.clock import now_ns
from restart_trace.recorder import untraced_recorder
from restart_trace.startup import Startup


def build() -> tuple[Any, Any]:
    """(config, engine) as the trainer builds them, with nothing restored."""
    from megatron.startup.engine_setup import build_engine
    from megatron.startup.initialize import initialize_megatron

    config = parse_or_exit()
    runtime = initialize_megatron(config, Startup(untraced_recorder(), None, config.parallel.rank, 0, now_ns()))
    size, _ = tokenizer_info(config.data.tokenizer_type or "", tokenizer_model=config.data.tokenizer_model)
    vocab = padded_vocab_size(size, config.model.make_vocab_size_divisible_by, runtime.layout.tp)
    model = model_provider(config, vocab, runtime)
    return config, build_engine(config, model, lambda batch: batch)


def main() -> None:
    import torch.distributed as dist

    from megatron.checkpointing.state.hashes import tensor_hashes

    config, engine = build()
    directory, tag = config.checkpoint.load, config.checkpoint.load_tag
    path, client_state = engine.load_checkpoint(directory, tag)
    assert path is not None, f"DeepSpeed found no {tag} in {directory}"
    del client_state["checkpoint_parallel_dimensions"]  # its own: it hands it out, and refuses to take it back
    recorded = Path(directory, tag, f"tensor_hashes_rank_{config.parallel.rank:05d}.json")
    assert tensor_hashes(engine) == json.loads(recorded.read_text()), f"restored otherwise than {recorded} says"
    engine.save_checkpoint(os.environ["ROUNDTRIP_OUT"], tag, client_state=client_state)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
