"""The plain script under the in-process wrapper of nvidia-resiliency-ext: ranks that live go on in their processes.

    nvrx_inprocess.sh RANKS RESERVES PORT PORT --data PREFIX --save DIR ...

Written as its example optimal_example.py is, which uses gloo on CPUs. Model and optimizer of DeepSpeed depend on the
process group, so that main() makes them again.
"""

import os
from datetime import timedelta

import torch.distributed as dist
from deepspeed.comm import comm
from nvidia_resiliency_ext import inprocess  # pyright: ignore[reportMissingImports]
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.launchers.plain_deepspeed import main

RANKS = int(os.environ["ACTIVE_RANKS"])


# As the example's on CPUs. Only by it do ranks whose neighbours wait as well learn of a lost one, as the wrapper aborts
# the groups of NCCL alone; DeepSpeed makes its groups with the default, of 30 minutes.
TIMEOUT = timedelta(seconds=10)
dist.distributed_c10d.default_pg_timeout = TIMEOUT


@inprocess.Wrapper(
    initialize=inprocess.initialize.RetryController(min_world_size=RANKS),
    rank_assignment=inprocess.Compose(  # the last is called first
        inprocess.rank_assignment.MaxActiveWorldSize(RANKS), inprocess.rank_assignment.ShiftRanks()
    ),
)
def train(store: Store, call: inprocess.CallWrapper = None) -> None:
    comm.cdb = None  # DeepSpeed would go on with the process group of the ranks before
    dist.init_process_group(
        "gloo", store=PrefixStore(str(call.iteration), store), timeout=TIMEOUT,
        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
    )  # fmt: skip
    main()


if __name__ == "__main__":
    rank, ranks, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "STORE_PORT"))
    train(TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, multi_tenant=True))
