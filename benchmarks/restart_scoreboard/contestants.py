"""Who starts a training again after a fault, each as its documentation recommends for one host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from benchmarks.launchers.variants import (
    BASELINE,
    IN_PLACE,
    IN_PROCESS,
    PLAIN,
    Setting,
    arguments_of_plain,
    command,
    environment_of_plain,
)
from megatron.net.free_port import free_port

HERE = Path(__file__).parent
TORCHFT = "benchmarks.restart_scoreboard.torchft_ddp"
TORCHRUN_NODES = "torchrun-spare"
INPROCESS = "benchmarks.restart_scoreboard.nvrx_inprocess"
OURS = "pretrain_gpt.py"
ONE, ALL, NODE = KINDS = "one", "all", "node"  # what is killed: a rank, all of them, or an agent with its ranks
NODES, SPARES = 2, 1  # of agents, where they stand for nodes


@dataclass(frozen=True)
class Contestant:
    """One way to start a training again.

    what: what it is, for people
    command: of a setting and the directory of its checkpoints, the command that is run, and again when it has ended
    trainer: the module or script that trains; its losses are compared with its own without a fault
    package: the distribution that it needs, if not torch or this one
    written: what its user writes besides the plain script
    docs: where its recommended use stands
    goes_on: whether the ranks that are left go on with the next iteration, instead of from a checkpoint
    reserves: ranks that wait to take the place of one that is killed
    kinds: of its faults, in turn
    """

    what: str
    command: Callable[[Setting, Path], list[str]]
    trainer: str = PLAIN
    package: str | None = None
    written: tuple[Path, ...] = ()
    docs: str = ""
    goes_on: bool = False
    reserves: int = 0
    kinds: tuple[str, ...] = (ONE, ALL)

    @property
    def lines(self) -> int | None:
        """Lines that its user writes besides the plain script and its model; None with another trainer."""
        if self.trainer == OURS:
            return None
        texts = [path.read_text().splitlines() for path in self.written]
        return sum(bool(line.strip()) and not line.lstrip().startswith("#") for text in texts for line in text)

    @property
    def missing(self) -> str | None:
        """Why it cannot be run here, if its package is missing."""
        try:
            return None if self.package is None or metadata.version(self.package) else None
        except metadata.PackageNotFoundError:
            return f"{self.package} is not installed (EXTRAS=scoreboard)"


def _ours(variant: str) -> Callable[[Setting, Path], list[str]]:
    return lambda setting, save: command(variant, setting, save)


def _launcher(*words: str, variables: Sequence[str] = ()) -> Callable[[Setting, Path], list[str]]:
    """The plain script under a launcher with torchrun's flags; "PORT" stands for a free one."""

    def build(setting: Setting, save: Path) -> list[str]:
        port = str(free_port())
        program = [word.replace("PORT", port) for word in words]
        program[0] = str(Path(sys.executable).with_name(program[0]))
        ranks = ["--nnodes", "1", "--nproc_per_node", str(setting.world_size)]
        restarts = ["--max_restarts", str(setting.restarts), "-m", PLAIN]
        environment = [*environment_of_plain(setting), *variables]
        return [*environment, *program, *ranks, *restarts, *arguments_of_plain(setting, save)]

    return build


def _script(name: str, words: Callable[[Setting], list[int]]) -> Callable[[Setting, Path], list[str]]:
    """A script here, with `words` and the arguments of the plain script."""

    def build(setting: Setting, save: Path) -> list[str]:
        programs = f"PATH={Path(sys.executable).parent}:/usr/bin:/bin"
        script = ["bash", str(HERE / name), *map(str, words(setting))]
        return [*environment_of_plain(setting), programs, *script, *arguments_of_plain(setting, save)]

    return build


# The store of torchrun's agents must outlive them: where one of them serves it, its loss ends all.
_STORE = """import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
while True: time.sleep(1000)"""
# Without it, torch 2.13 keeps the store of the ranks that have ended: gloo finds their addresses there, and the new
# ranks fail or wait for ever.
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


def _torchrun_nodes(setting: Setting, save: Path) -> list[str]:
    port = str(free_port())
    agent = [
        *environment_of_plain(setting), _OWN_STORE, str(Path(sys.executable).with_name("torchrun")),
        "--nnodes", f"{NODES}:{NODES}", "--nproc_per_node", str(setting.world_size // NODES), "--rdzv_id", port,
        "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--max_restarts", str(setting.restarts),
        "-m", PLAIN, *arguments_of_plain(setting, save),
    ]  # fmt: skip
    return _agents(port, [sys.executable, "-c", _STORE, port], agent)


def _our_nodes(setting: Setting, save: Path, *flags: str) -> list[str]:
    """`flags`: of the agents."""
    words = command("fork", setting, save)
    launcher = next(i for i, word in enumerate(words) if word.endswith("megatron/launch"))
    script = next(i for i, word in enumerate(words) if word.endswith(OURS))
    start = words[: launcher + 1]
    port, ranks = str(free_port()), ["--nproc-per-node", str(setting.world_size // NODES)]
    nodes = ["--nnodes", str(NODES), "--spares", str(SPARES), "--max-restarts", str(setting.restarts)]
    place = ["--address", "127.0.0.1", "--secret-file", str(save.with_name("secret")), *words[script:]]
    agent = [*start, "--coordinator", f"127.0.0.1:{port}", "--node-rank", "NUMBER", *flags, *ranks, *place]
    return _agents(port, [*start, "coordinate", *nodes, *ranks, "--port", port, *place], agent)


def _agents(port: str, outlives: Sequence[str], agent: Sequence[str]) -> list[str]:
    return ["bash", str(HERE / "agents.sh"), str(NODES), str(SPARES), port, *outlives, "--", *agent]


_RESERVES = 1  # of the wrapper: faults of one rank and of all take turns, and after the latter all are there again
_RENDEZVOUS = ("--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:PORT")
CONTESTANTS = {
    BASELINE: Contestant("a plain DeepSpeed script, run again with torchrun by a loop of the shell", _ours(BASELINE)),
    "torchrun-elastic": Contestant(
        "the same script; torchrun --max-restarts starts its ranks again",
        _launcher("torchrun", *_RENDEZVOUS, variables=[_OWN_STORE]),
        docs="https://docs.pytorch.org/docs/stable/elastic/run.html",
    ),
    "nvrx-launcher": Contestant(
        "the same script under ft_launcher of nvidia-resiliency-ext",
        _launcher("ft_launcher", *_RENDEZVOUS, "--ignore-missing-fault-tol-cfg"),
        package="nvidia-resiliency-ext",
        docs="https://nvidia.github.io/nvidia-resiliency-ext/fault_tolerance/usage_guide.html",
    ),
    "dlrover": Contestant(
        "the same script under dlrover-run with a master of its own",
        _launcher("dlrover-run", "--standalone"),
        package="dlrover",
        docs="https://github.com/intelligent-machine-learning/dlrover",
    ),
    "nvrx-inprocess": Contestant(
        "the same script's main() under the in-process wrapper of nvidia-resiliency-ext, with a rank in reserve",
        _script("nvrx_inprocess.sh", lambda setting: [setting.world_size, _RESERVES, free_port(), free_port()]),
        INPROCESS,
        "nvidia-resiliency-ext",
        (HERE / "nvrx_inprocess.py", HERE / "nvrx_inprocess.sh"),
        "https://nvidia.github.io/nvidia-resiliency-ext/inprocess/usage_guide.html",
        reserves=_RESERVES,
    ),
    "torchft": Contestant(
        "the same model in a script for torchft: DDP over replica groups of one rank, which come and go",
        _script("torchft.sh", lambda setting: [setting.world_size, free_port(), setting.restarts]),
        TORCHFT,
        "torchft-nightly",
        (HERE / "torchft_ddp.py", HERE / "torchft.sh"),
        "https://docs.pytorch.org/torchft/",
        goes_on=True,
    ),
    "torchrun": Contestant("the demonstration, run again with torchrun", _ours("torchrun"), OURS),
    "fork": Contestant("the demonstration, run again with megatron.launch", _ours("fork"), OURS),
    IN_PLACE: Contestant(
        "the demonstration; megatron.launch --max-restarts starts its ranks again", _ours(IN_PLACE), OURS
    ),
    IN_PROCESS: Contestant(
        "the same with --in-process-restart: the other ranks start again in their processes", _ours(IN_PROCESS), OURS
    ),
    "fork-standby-load": Contestant(
        "the same with --standby-load: ranks that have loaded the checkpoint ahead take their place",
        _ours("fork-standby-load"),
        OURS,
    ),
    TORCHRUN_NODES: Contestant(
        "the plain script under two agents of torchrun, and a third that waits",
        _torchrun_nodes,
        docs="https://docs.pytorch.org/docs/stable/elastic/run.html",
        kinds=(NODE,),
    ),
    "fork-spare": Contestant(
        "the demonstration under two agents of megatron.launch, and a hot spare", _our_nodes, OURS, kinds=(NODE,)
    ),
    "fork-spare-in-process": Contestant(
        "the same with --in-process-restart: the ranks of the other node start again in their processes",
        lambda setting, save: _our_nodes(setting, save, "--in-process-restart"),
        OURS,
        kinds=(NODE,),
    ),
}
# What is not tried, and why.
LEFT_OUT = {
    "torchft's HSDP": "it needs several hosts, this is one",
    "Slurm's requeue": "slurmctld holds a requeued job back for 120 s, and then starts it as plain is started",
}
