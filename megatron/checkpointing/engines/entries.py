"""The engines of this project, as strings: naming them imports nothing, so that launch scripts know them, too."""

from __future__ import annotations

from dataclasses import dataclass

_PACKAGE = "megatron.checkpointing.engines"
_OWN_IO = "its library does its own I/O, made for a file system"


@dataclass(frozen=True)
class EngineEntry:
    """Where an engine lives. `requires` are the modules that must be importable, `install` is how to get them.

    `redistributable` is the class's attribute of that name, known without importing it. `not_stored` is why the engine
    does not save to object storage; "": it does. `not_returning` is why a process that has used the engine does not
    start again (--in-process-restart); "": it does.
    """

    module: str
    class_name: str
    summary: str
    requires: tuple[str, ...] = ()
    install: str = ""
    redistributable: bool = False
    not_stored: str = ""
    not_returning: str = ""

    @property
    def package(self) -> str:
        """The folder of `engines` that has it: engines of one share a format."""
        return self.module.split(".")[-2]


ENGINES = {
    "torch": EngineEntry(
        f"{_PACKAGE}.torch.engine", "TorchEngine", "torch.save per file, as DeepSpeed's default", redistributable=True
    ),
    "lazy": EngineEntry(
        f"{_PACKAGE}.lazy.engine",
        "LazyEngine",
        "this project's own: asynchronous, one safetensors file per rank, direct I/O",
        redistributable=True,
    ),
    "memory": EngineEntry(
        f"{_PACKAGE}.memory.engine",
        "MemoryEngine",
        "as lazy, and each save is kept in host memory that outlives the rank; needs megatron.launch",
        redistributable=True,
        not_stored="its restarts in place have not been tried with a store behind them",
    ),
    "fastpersist": EngineEntry(
        f"{_PACKAGE}.fastpersist.engine",
        "FastPersistEngine",
        "DeepSpeed's checkpoint writer, in the training process",
        redistributable=True,
        not_stored=_OWN_IO,
    ),
    "fastpersist-decoupled": EngineEntry(
        f"{_PACKAGE}.fastpersist.decoupled_engine",
        "FastPersistDecoupledEngine",
        "DeepSpeed's checkpoint writer, in a process of its own",
        redistributable=True,
        not_stored=f"{_OWN_IO}, in a process that knows no uploads",
    ),
    "torchsnapshot": EngineEntry(
        f"{_PACKAGE}.torchsnapshot.engine",
        "TorchSnapshotEngine",
        "TorchSnapshot's asynchronous take, one snapshot per file",
        requires=("torchsnapshot",),
        install="pip install torchsnapshot==0.1.0",
        not_stored=_OWN_IO,
    ),
    "dcp": EngineEntry(f"{_PACKAGE}.dcp.engine", "DcpEngine", "torch.distributed.checkpoint, blocking"),
    "dcp-async": EngineEntry(
        f"{_PACKAGE}.dcp.engine", "DcpAsyncEngine", "torch.distributed.checkpoint, written by a thread"
    ),
    "dcp-process": EngineEntry(
        f"{_PACKAGE}.dcp.engine",
        "DcpProcessEngine",
        "torch.distributed.checkpoint, written by its checkpoint process",
        not_stored="it writes in a process of its own, which knows no uploads",
    ),
    "datastates": EngineEntry(
        f"{_PACKAGE}.datastates.engine",
        "DataStatesEngine",
        "DataStates-LLM; needs its package and a CUDA device",
        not_stored=f"{_OWN_IO} on a GPU's host",
        not_returning="it needs a CUDA device, and ranks on CUDA devices do not return",
    ),
    "none": EngineEntry(
        f"{_PACKAGE}.none.engine",
        "NoneEngine",
        "writes nothing: measures what is left",
        not_stored="it writes nothing, so a directory does as well",
    ),
}
