"""Brings up the accelerator, torch.distributed and the random seeds of one rank."""

from __future__ import annotations

import datetime
import gc
import logging
import os
from dataclasses import dataclass
from typing import Any

from megatron.config import Config, ConfigError
from megatron.parallel.accelerator import accelerator
from megatron.parallel.control_plane import ControlPlane
from megatron.parallel.random import seed_everything
from megatron.parallel.topology import Coordinates, Layout
from megatron.processes import in_process_restart
from megatron.startup import lean_imports
from megatron.startup.communicators import Communicators
from megatron.startup.determinism import make_deterministic
from megatron.startup.rendezvous import init_method, look_up_master
from restart_trace.clock import now_ns
from restart_trace.devices import available_accelerator, device_index
from restart_trace.startup import Interruptions, Startup
from restart_trace.under_way import RANKS, UnderWay

logger = logging.getLogger(__name__)
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}  # by device type, what hides devices


@dataclass(frozen=True)
class Runtime:
    """What initialize_megatron brought up."""

    layout: Layout
    coordinates: Coordinates
    rank: int
    device: Any  # torch.device
    backend: str
    communicators: Communicators
    control: ControlPlane  # of the main thread
    commit_control: ControlPlane  # of the thread that commits asynchronous saves; the same one if there is none


def prepare_environment() -> None:
    """Set the environment variables that DeepSpeed reads, before it is imported.

    Asks the driver for devices, unless DS_ACCELERATOR is set: in a process that forks ranks it has to be.
    """
    if "DS_ACCELERATOR" not in os.environ:
        import torch  # noqa: F401 - asked next

        os.environ["DS_ACCELERATOR"] = available_accelerator() or "cpu"
    # DeepSpeed's CPU accelerator counts the ranks of this host by LOCAL_SIZE
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)  # started without a launcher: a single process
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if os.environ["WORLD_SIZE"] == "1" and "MASTER_PORT" not in os.environ:
        from megatron.net.free_port import free_port

        os.environ["MASTER_PORT"] = str(free_port())


def import_heavy(imports: Interruptions | None = None) -> None:
    """Import torch and DeepSpeed; everything else that is slow to import comes with them.

    With `imports`, the phase around this, a rank that is to compute on a device initialises torch for it in between,
    which counts as `cuda_context`: DeepSpeed would do it as it is imported.
    """
    import torch

    lean_imports.install()
    began = now_ns()
    prepare_environment()
    kind = os.environ["DS_ACCELERATOR"]
    if imports is not None and kind != "cpu" and torch.get_device_module(kind).is_available():
        torch.get_device_module(kind).init()  # loads the driver and finds the devices: no context on any of them yet
        imports.windows.append(("cuda_context", None, began, now_ns()))
    import deepspeed

    with lean_imports.without_compile():
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - when it looks at the optimizer, otherwise

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    _without_shared_memory_op(accelerator())
    if accelerator().device_name() == "cpu":
        # DeepSpeed's is torch.manual_seed, which also keeps the seed, with the text of the stack, for three kinds of
        # devices that may be initialised later.
        accelerator().manual_seed = torch.default_generator.manual_seed


def _without_shared_memory_op(device_type: Any) -> None:
    """Keep DeepSpeed from its op for collectives in shared memory, which it has for CPUs.

    It is compiled for half a minute at first use and leaves 66 MiB for each rank in /dev/shm after every run; gloo
    gives the same results. DeepSpeed also asks `deepspeed.ops.__compatible_ops__`, but whoever touches that has all ops
    tried: compilers are started, and CUDA is asked for devices.
    """
    create = device_type.create_op_builder
    device_type.create_op_builder = lambda name: None if name == "ShareMemCommBuilder" else create(name)


def freeze_imported_objects() -> None:
    """Exclude the imported objects from garbage collection.

    DeepSpeed collects garbage several times while it starts; each pass over the half million objects of the
    imported modules costs 0.3 s and finds nothing.
    """
    gc.freeze()


def group_timeout(config: Config) -> datetime.timedelta:
    """--distributed-timeout-minutes, which every process group of the run is created with."""
    return datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)


def choose_device(kind: str, local_rank: int) -> Any:
    """This rank's device of type `kind`, made the current one. Raises ConfigError if there are too few."""
    import torch

    visible = torch.accelerator.device_count()
    index = device_index(local_rank, visible)
    if index is None:
        variable = _VISIBLE.get(kind, _VISIBLE["cuda"])
        raise ConfigError(
            f"LOCAL_RANK {local_rank}: this rank sees {visible} {kind.upper()} devices ({variable}="
            f"{os.environ.get(variable, 'not set')}); start at most {visible} ranks on this host, or "
            "show each rank the one that is its own"
        )
    # DeepSpeed takes LOCAL_RANK for the number of the device, in its process groups, its pipeline and its engine.
    os.environ["LOCAL_RANK"] = str(index)
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def _connect_world(backend: str, world_size: int, device: Any, timeout: datetime.timedelta, startup: Startup) -> Any:
    """All ranks find the store (`name_lookup`) and meet there (`rendezvous`), then connect as the default group
    (`communicators`); the store."""
    import deepspeed
    import torch
    from torch.distributed import PrefixStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]

    from megatron.parallel.reconnecting import create_world

    with startup.phase("name_lookup"):
        look_up_master()
    with startup.phase("rendezvous"), UnderWay(RANKS, "meeting of all ranks"):
        store, rank, _ = next(rendezvous(init_method(), timeout=timeout))
        store.set_timeout(timeout)
    with startup.phase("communicators", "world"), UnderWay(RANKS, "connecting of all ranks"):
        if in_process_restart.is_possible():  # they connect when all have built their engines, or have kept them
            create_world(rank, world_size, timeout)
        else:
            torch.distributed.init_process_group(
            backend, store=PrefixStore("default_pg", store), rank=rank, world_size=world_size, timeout=timeout,
            device_id=device if binds_device(backend, world_size, torch.__version__) else None,
        )  # fmt: skip
        # It finds the default group there, and puts its own interface in front of it.
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)
    return store


def binds_device(backend: str, world_size: int, torch_version: Any) -> bool:
    """Whether the default group is bound to the device: then NCCL connects it at once, and splits the others off it.

    As DeepSpeed 0.19.8 decides: not for a single rank, which has nobody to connect to, and not between torch 2.6.0 and
    2.7.1, where it hangs (pytorch issue 153960). `torch_version`: a torch.torch_version.TorchVersion.
    """
    return backend == "nccl" and world_size > 1 and not (2, 6, 0) < torch_version < (2, 7, 1)


def _prepare_accelerator(config: Config) -> tuple[str, str]:
    """The device type that this rank computes on, and the backend of its default group; ConfigError if they do not fit.

    The backend of an accelerator is the one that DeepSpeed has for it, such as nccl for cuda.
    """
    device_type = accelerator()
    kind = device_type.device_name()
    on_cpu = kind == "cpu"
    backend = config.parallel.distributed_backend or ("gloo" if on_cpu else device_type.communication_backend_name())
    if backend == "nccl" and kind != "cuda":
        raise ConfigError("--distributed-backend nccl: this machine has no CUDA device; use gloo, or drop the flag")
    if config.model.params_dtype == "fp16" and on_cpu and not device_type.is_fp16_supported():
        # DeepSpeed refuses on CPUs without half-precision instructions, though torch computes there too.
        device_type.is_fp16_supported = lambda: True
    if config.training.deterministic:
        make_deterministic()
    return kind, backend


def initialize_megatron(config: Config, startup: Startup, *, commits_in_background: bool = False) -> Runtime:
    """Rendezvous, process groups, control planes and seeds. Raises RuntimeError from torch if the rendezvous fails.

    With `commits_in_background` there is a second control plane: agreements of two threads on one would mix.
    """
    import torch

    parallel = config.parallel
    layout = Layout(**parallel.layout)
    with startup.phase("engine_init"):
        kind, backend = _prepare_accelerator(config)
    device = torch.device("cpu")
    if kind != "cpu":
        with startup.phase("cuda_context"):
            device = choose_device(kind, parallel.local_rank)
            torch.empty(1, device=device)  # to select it makes no context in every version of torch and CUDA
    timeout = group_timeout(config)
    store = _connect_world(backend, layout.world_size, device, timeout, startup)
    communicators = Communicators(startup, layout, timeout)
    planes = communicators.control_planes(store, parallel.rank, 2 if commits_in_background else 1)
    coordinates = layout.coordinates(parallel.rank)
    with startup.phase("model_build"):
        seed_everything(
            config.training.seed,
            coordinates,
            sequence_parallel_size=parallel.ds_sequence_parallel_size,
            replicas_differ=config.training.data_parallel_random_init,
        )
    return Runtime(layout, coordinates, parallel.rank, device, backend, communicators, planes[0], planes[-1])
