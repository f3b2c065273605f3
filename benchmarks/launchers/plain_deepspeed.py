"""The baseline: a plain DeepSpeed training script, as one would write it, with DeepSpeed's default checkpoint engine.

    torchrun --nproc-per-node 8 -m benchmarks.launchers.plain_deepspeed --data PREFIX --save DIR

The same model, batch, layout and saves as the demonstration's, of which nothing is imported (plain_model.py is part of
the script). One thing a user would not have written: DeepSpeed's operator for collectives in shared memory is off, as
it is in the demonstration. On a CPU it is compiled for half a minute when it is first used, and leaves files in
/dev/shm behind a killed job.
"""

from __future__ import annotations

import os
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from benchmarks.launchers.plain_model import Block, Embedding, Head, TensorParallel, batches, loss_of, parse_arguments


def build_model(args: Any, dp: int) -> PipelineModule:
    """The stage of this rank."""
    tp = args.tensor_parallel
    blocks = [
        LayerSpec(Block, args.hidden_size, args.ffn_size, args.heads, args.kv_heads, tp) for _ in range(args.layers)
    ]
    model = PipelineModule(
        layers=[
            LayerSpec(Embedding, args.vocab_size, args.hidden_size, tp),
            *blocks,
            LayerSpec(Head, args.vocab_size, args.hidden_size, tp),
        ],
        loss_fn=loss_of,
        topology=PipeModelDataParallelTopology(num_pp=args.pipeline_parallel, num_mp=tp, num_dp=dp),
        partition_method="type:Block",
        activation_checkpoint_interval=1,
        checkpointable_layers=["Block"],
    )
    grid: Any = model._grid
    TensorParallel.group = grid.get_slice_parallel_group()
    TensorParallel.size, TensorParallel.rank = tp, grid.get_slice_parallel_rank()
    return model


def main() -> None:
    args = parse_arguments(__doc__)
    if not torch.cuda.is_available():  # with CUDA there is no such operator, and this line would try all others
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # see above
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, world = dist.get_rank(), dist.get_world_size()
    dp = world // (args.tensor_parallel * args.pipeline_parallel)
    torch.manual_seed(1234 + rank)
    model = build_model(args, dp)
    engine: Any
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1),
        config={
            "train_batch_size": args.global_batch,
            "train_micro_batch_size_per_gpu": args.micro_batch,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": args.dtype == "bf16"},
            "zero_optimization": {"stage": 1},
            "steps_per_print": 1_000_000,
        },
    )
    iteration = 0
    if os.path.exists(os.path.join(args.save, "latest")):
        _, client_state = engine.load_checkpoint(args.save)
        iteration = client_state["iteration"]
    data = batches(args, iteration * args.global_batch, dp, engine.grid.get_data_parallel_rank())
    while iteration < args.iterations:
        loss = float(engine.train_batch(data_iter=data))
        iteration += 1
        if rank == world - 1:
            print(f" iteration {iteration:8d}/{args.iterations:8d} | lm loss: {loss:.6E} |", flush=True)
        if iteration % args.save_interval == 0:
            engine.save_checkpoint(args.save, client_state={"iteration": iteration})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
