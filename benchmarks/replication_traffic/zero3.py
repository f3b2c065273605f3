"""One rank of a training by DeepSpeed's ZeRO-3, whose gathers and reduce-scatters are the traffic beside the copies.

A small GPT, of which each rank keeps a part of weights, master weights and moments. It saves that part after each
iteration as the plan says, by engine `memory` and the writer of this project's trainer. The flags are that trainer's,
for the model, the batch and the copies.
"""

from __future__ import annotations

import functools
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.replication_traffic.plan import NONE, VARIABLE, Plan, read_plan
from benchmarks.replication_traffic.ranks import note_sent_bytes, set_variant
from megatron.checkpointing.engines.base import CheckpointEngine, FileState
from megatron.checkpointing.engines.errors import CheckpointSaveError
from megatron.checkpointing.engines.options import engine_options
from megatron.checkpointing.engines.registry import create_engine
from megatron.checkpointing.save.background import release_before_steps
from megatron.checkpointing.save.writer import CheckpointIdentity, CheckpointWriter, SaveDirectory
from megatron.config import Config
from megatron.config.arguments import parse_or_exit
from megatron.config.deepspeed_config import build_deepspeed_config
from megatron.optimizer.build import build_optimizer
from megatron.parallel.topology import Layout
from megatron.peers.client import Peer, own_peer
from megatron.peers.placement import number_of_copies, place
from megatron.startup.initialize import Runtime, import_heavy, initialize_megatron
from restart_trace.clock import now_ns
from restart_trace.process import RankIdentity, open_rank_trace
from restart_trace.recorder import Recorder
from restart_trace.startup import Startup

ENTERED_NS = now_ns()
_PERSISTENT = 10_000  # elements: smaller parameters stay gathered, here norms and biases, as in large models


class _Waits(torch.autograd.Function):
    """Identity that takes so many seconds, and twice that in the backward pass, without a processor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class Block(nn.Module):
    """Attention and MLP, which take `compute_s` as for an accelerator."""

    def __init__(self, hidden: int, ffn: int, heads: int, compute_s: float) -> None:
        super().__init__()
        self.heads, self.compute_s = heads, compute_s
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, hidden] to the same."""
        x = _Waits.apply(x, self.compute_s)  # type: ignore[assignment]
        batch, length, hidden = x.shape
        fused = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = fused.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """[b, s + 1] token ids to the mean cross entropy of each id after the first."""

    def __init__(self, config: Config, compute_s: float) -> None:
        super().__init__()
        model, vocab = config.model, vocabulary_of(config)
        sizes = model.hidden_size, model.ffn_hidden_size, model.num_attention_heads, compute_s / model.num_layers
        self.tokens = nn.Embedding(vocab, model.hidden_size)
        self.positions = nn.Embedding(model.seq_length, model.hidden_size)
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(model.num_layers))
        self.norm = nn.LayerNorm(model.hidden_size)
        self.head = nn.Linear(model.hidden_size, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids[:, :-1]) + self.positions(torch.arange(ids.shape[1] - 1))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), ids[:, 1:].flatten())


def vocabulary_of(config: Config) -> int:
    """With the token at the end of a document, as a NullTokenizer has it."""
    assert config.data.vocab_size is not None
    return config.data.vocab_size + 1


def build_engine(config: Config, compute_s: float) -> Any:
    """DeepSpeed's engine of stage 3 around the model; collective.

    By default DeepSpeed keeps what has been gathered until 1e9 elements are: a model as small as this one would be
    gathered once a step. Here a block is released after its pass, and the next one fetched ahead, as in a model that no
    device holds.
    """
    import deepspeed

    model = GPT(config, compute_s)
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    zero = {
        "stage": 3, "stage3_param_persistence_threshold": _PERSISTENT, "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 2 * block, "stage3_prefetch_bucket_size": block, "reduce_bucket_size": block,
    }  # fmt: skip
    settings = build_deepspeed_config(config) | {"zero_optimization": zero}
    optimizer = build_optimizer(model, config.optimizer)
    engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)[0]
    return engine


def state_of(engine: Any, rank: int) -> list[FileState]:
    """What this rank keeps of weights, master weights and moments. All of it changes in the optimizer's step alone."""
    optimizer = engine.optimizer
    masters = optimizer.fp32_partitioned_groups_flat
    moments = [optimizer.optimizer.state[master] for master in masters]
    state = {
        "weights": list(optimizer.fp16_partitioned_groups_flat), "masters": [one.detach() for one in masters],
        "exp_avg": [one["exp_avg"] for one in moments], "exp_avg_sq": [one["exp_avg_sq"] for one in moments],
    }  # fmt: skip
    return [FileState(f"zero3_rank_{rank:05d}", state)]


class Saves:
    """The saves of this rank, each of the variant of its iteration."""

    def __init__(self, config: Config, runtime: Runtime, recorder: Recorder, engine: Any) -> None:
        """Collective. Raises EngineUnavailableError without megatron.launch."""
        options = engine_options(config.checkpoint, runtime.rank, config.parallel.distributed_timeout_minutes)
        self.saver = create_engine("memory", options)
        self.saver.check_can_save()
        share_with_other_hosts(self.saver, runtime, config.checkpoint.replicas)
        identity = CheckpointIdentity(runtime.layout.as_dict(), {}, place=runtime.coordinates._asdict())
        self._writer = CheckpointWriter(
            self.saver, runtime.control, recorder, identity, "0", commit_control=runtime.commit_control
        )
        assert config.checkpoint.save is not None
        self._directory, self._rank, self._engine = SaveDirectory(Path(config.checkpoint.save)), runtime.rank, engine
        release_before_steps(engine, self._writer.background, over_within=1)

    def save(self, iteration: int, variant: str) -> None:
        """After an iteration. Raises CheckpointSaveError if the one before has failed."""
        set_variant(self.saver, variant)
        if variant != NONE:
            collect = functools.partial(state_of, self._engine, self._rank)
            self._writer.save(self._directory, iteration, collect, on_storage=False)
        self.check()

    def check(self) -> None:
        """Raises CheckpointSaveError if a save has failed."""
        for save in self._writer.background.finished():
            if save.error is not None:
                raise CheckpointSaveError(save.error)

    def close(self) -> None:
        """Wait for the last save. Raises CheckpointSaveError if it fails."""
        self._writer.background.drain()
        self.check()
        self._writer.close()
        self.saver.close()


def share_with_other_hosts(saver: CheckpointEngine, runtime: Runtime, replicas: int | None) -> None:
    """Tell the engine which hosts hold copies of this rank's saves; collective.

    They take the memory for it when the first copy comes. Raises PlacementError.
    """
    own = own_peer()
    gathered = runtime.control.gather(None if own is None else tuple(own))
    peers = [Peer(*peer) for peer in runtime.control.broadcast(gathered) if peer is not None]
    hosts = list(dict.fromkeys(peers))
    copies, _ = number_of_copies(replicas or 2, len(hosts), len(peers) == runtime.layout.world_size)
    others = place([str(host) for host in hosts], copies, None)[hosts.index(peers[runtime.rank])]
    saver.share_with([hosts[other] for other in others])


def batch_of(config: Config, rank: int, number: int) -> torch.Tensor:
    """Token ids [b, s + 1] of the micro-batch of that number of this rank, the same in each run."""
    generator = torch.Generator().manual_seed(number * config.parallel.world_size + rank)
    shape = config.training.micro_batch_size, config.model.seq_length + 1
    return torch.randint(vocabulary_of(config), shape, generator=generator)


def train(plan: Plan, config: Config, recorder: Recorder, startup: Startup) -> None:
    """The iterations of the plan; collective."""
    runtime = initialize_megatron(config, startup, commits_in_background=True)
    engine = build_engine(config, plan.compute_s)
    saves = Saves(config, runtime, recorder, engine)
    each = config.training.num_micro_batches
    batches = [batch_of(config, runtime.rank, number) for number in range(each)]  # of each iteration
    for iteration in range(1, plan.iterations + 1):
        start = now_ns()
        saves.saver.begin_step(start)
        losses = []
        for batch in batches:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        recorder.iteration(iteration, start, now_ns(), math.fsum(losses) / each)
        saves.save(iteration, plan.variant(iteration))
    saves.close()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> int:
    plan = read_plan(Path(os.environ[VARIABLE]))
    config = parse_or_exit()
    import_heavy()
    if config.parallel.local_rank == 0:
        note_sent_bytes(Path(plan.directory) / f"sent_{config.parallel.rank}.jsonl")
    parallel, trace_dir = config.parallel, config.trace.restart_trace_dir
    assert trace_dir is not None
    coordinates = Layout(*parallel.sizes).coordinates(parallel.rank)
    identity = RankIdentity(parallel.rank, parallel.world_size, parallel.local_rank, coordinates, parallel.sizes)
    recorder, cycle = open_rank_trace(
        Path(trace_dir), identity, os.environ, engine_asked="memory", durability="none", probes=False
    )
    train(plan, config, recorder, Startup(recorder, Path(trace_dir), parallel.rank, cycle, ENTERED_NS))
    recorder.process_ended(None)
    recorder.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
