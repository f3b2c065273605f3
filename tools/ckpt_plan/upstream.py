"""The same checkpoint as upstream Megatron-DeepSpeed writes it, for comparison with listings of its directories.

Names, layout and tensors equal ours. Differences, seen in checkpoints of upstream (commit 4efb479d):

- torch.save is given a path, so that each record of a file contains the file's name: some 100 bytes per tensor.
- `args` in mp_rank_* holds two tensors that upstream stores there during training: `attn_mask`, [1, 1, s, s] bool, and
  with rotary embeddings `rotary_pos_emb`, [s, 1, 1, rotary channels] fp32. For 2,048 tokens and heads of 128 they are
  4 MiB and 1 MiB. (pretrain_gpt.py, model_provider; megatron/utils.py, update_rotary_pos_emb)
- `args` has some 300 more settings: about 7 kB in each mp_rank_* file, which depend on upstream's version and are not
  planned. So the sizes of these files are exact except for that, of shards to 200 bytes, of layers to the byte.
- Random states are in mp_rank_* only, not in the shards.
- With experts, and with --no-pipeline-parallel, there are no files of layers (upstream_modules.py). If a rank's experts
  have more than 178,956,971 elements, its shard has several groups of them, and is some kB larger than planned.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from megatron.checkpointing.engines.base import FileState, SavedFile
from megatron.config import Config, ConfigError, ModelConfig
from megatron.parallel.topology import Coordinates, Layout

from .engines import torch_named_file_size, without_data
from .upstream_modules import check_experts, holds_modules, upstreams_files

_SHARDS = ("zero_pp_rank_", "bf16_zero_pp_rank_")


def check_model(config: Config) -> None:
    """Raises ConfigError naming a flag of a model that upstream does not have."""
    model = config.model
    if model.has_experts:
        check_experts(config)
    flags = {"--position-embedding-type alibi": model.uses_alibi, "--embed-layernorm": model.embed_layernorm}
    for flag, given in flags.items():
        if given:
            raise ConfigError(f"{flag}: upstream Megatron-DeepSpeed has no such model; drop it or --upstream")


def upstream_sizes(files: Sequence[FileState], config: Config, layout: Layout, at: Coordinates) -> list[SavedFile]:
    """What upstream writes for the states `files` of the rank at `at`; it has no checksums."""
    if holds_modules(config):
        files = upstreams_files(files, config, layout, at)
    tensors = {name: without_data(tensor) for name, tensor in args_tensors(config.model).items()}
    found = []
    for file in files:
        state = dict(file.state) if file.name.startswith(("mp_rank_", *_SHARDS)) else file.state
        if "args" in state:
            state["args"] = argparse.Namespace(**vars(state["args"]) | tensors)
        elif "optimizer_state_dict" in state:
            state.pop("rng_state", None)
        found.append(SavedFile(file.name, torch_named_file_size(state, file.name), "none"))
    return found


def args_tensors(model: ModelConfig) -> dict[str, torch.Tensor]:
    """The tensors that upstream keeps in its arguments."""
    seq = model.seq_length
    tensors = {"attn_mask": torch.empty((1, 1, seq, seq), dtype=torch.bool, device="meta")}
    if model.use_rotary_position_embeddings:
        shape = (seq, 1, 1, model.rotary_dim)
        tensors["rotary_pos_emb"] = torch.empty(shape, dtype=torch.float32, device="meta")
    return tensors
