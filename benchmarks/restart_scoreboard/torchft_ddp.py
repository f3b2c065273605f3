"""The plain model under torchft: every rank is a replica group of its own, which leaves and joins while others train.

    torchft.sh RANKS PORT RESTARTS --data PREFIX --save DIR ...

Written as torchft's example train_ddp.py is. torchft does not save to storage: the first replica does, with torch.save
and the state of the manager, as its documentation asks. A replica that comes back takes its state from another one.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # pyright: ignore[reportMissingImports]

from benchmarks.launchers.plain_model import Block, Embedding, Head, TensorParallel, batches, loss_of, parse_arguments

MICRO_STEPS = 2  # of the plain script: here one batch


def main() -> None:
    args = parse_arguments(__doc__)
    group, groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    dist.init_process_group("gloo")  # of the ranks of this group
    TensorParallel.group = dist.group.WORLD
    torch.manual_seed(1234)
    blocks = [Block(args.hidden_size, args.ffn_size, args.heads, args.kv_heads, 1) for _ in range(args.layers)]
    net = nn.Sequential(
        Embedding(args.vocab_size, args.hidden_size, 1), *blocks, Head(args.vocab_size, args.hidden_size, 1)
    )
    adam = torch.optim.AdamW(net.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)), min_replica_size=groups - 1, load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": adam.state_dict()},
        replica_id=f"replica_{group}", timeout=timedelta(seconds=30),
        init_sync=False,  # as the seed is the same for all
    )  # fmt: skip
    save = Path(args.save) / "checkpoint.pt"
    if save.exists():
        state = torch.load(save, weights_only=True)
        load(state)
        manager.load_state_dict(state["manager"])
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, adam)
    args.micro_batch *= MICRO_STEPS
    while (done := manager.current_step()) < args.iterations:
        optimizer.zero_grad()  # this also begins the quorum of the step
        tokens, labels = next(batches(args, done * args.global_batch, groups, group))
        loss = loss_of(model(tokens), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        mean = loss.detach().clone()
        manager.allreduce(mean).wait()
        optimizer.step()  # only if no replica was lost in it
        step = manager.current_step()
        if step == done or manager.participating_rank() != 0:
            continue
        print(f" iteration {step:8d}/{args.iterations:8d} | lm loss: {mean.item():.6E} |", flush=True)
        if step % args.save_interval == 0:
            save.parent.mkdir(parents=True, exist_ok=True)
            state = {"model": net.state_dict(), "optimizer": adam.state_dict(), "manager": manager.state_dict()}
            torch.save(state, save.with_suffix(".new"))
            os.replace(save.with_suffix(".new"), save)
    manager.shutdown()


if __name__ == "__main__":
    main()
