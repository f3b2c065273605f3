"""Who computes what: the process layout, the backend, ZeRO and the placement of saved activations."""

from __future__ import annotations

import dataclasses

from megatron.config.errors import ConfigError, refuse, require_at_least
from megatron.config.flags import FlagGroup, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig(FlagGroup):
    """Parallelism: layout of the processes, DeepSpeed and ZeRO."""

    tensor_model_parallel_size: int = flag(1, "ranks that share each layer (TP)", least=1)
    pipeline_model_parallel_size: int = flag(1, "pipeline stages (PP)", least=1)
    moe_expert_parallel_size: int = flag(
        1,
        "data-parallel ranks that the experts of a layer are divided over (EP), one expert each where the layer has "
        "fewer; it must divide the number of replicas, and the number of experts, or that number it",
        least=1,
    )
    sequence_parallel: bool = flag(
        False,
        "split activations along the sequence over the TP ranks wherever layers are not split: less memory of "
        "activations, as much communication; TP must divide --seq-length",
    )
    ds_sequence_parallel_size: int = flag(
        1,
        "ranks that each hold a part of the same sequences (SP), as in DeepSpeed-Ulysses: for attention they exchange "
        "parts of the sequence for parts of the heads; the world size is TP x PP x DP x SP, TP x SP must divide the "
        "numbers of heads, and SP --seq-length",
        least=1,
    )
    distributed_backend: str | None = flag(
        None,
        "torch.distributed backend: nccl or gloo (default: nccl where CUDA is there, else gloo)",
        choices=("nccl", "gloo"),
    )
    distributed_timeout_minutes: float = flag(
        10,
        "how long an operation of any process group may wait for the other ranks, and a save for its device; "
        "0.5: half a minute",
    )
    warmup_communicators: bool = flag(
        False,
        "connect all process groups and neighbouring pipeline stages before the first step, as phase warmup of the "
        "start-up; otherwise NCCL connects many of them in that step",
    )
    warmup_kernels: bool = flag(
        False,
        "compute with one layer of each kind, and update a small parameter of its own, before a checkpoint is loaded, "
        "as phase warmup of the start-up, and throw the result away; otherwise CUDA loads kernels, cuBLAS makes its "
        "workspace and torch's allocator grows in the first step",
    )
    no_pipeline_parallel: bool = flag(
        False,
        "no pipeline stages: --pipeline-model-parallel-size must be 1; at ZeRO stage 1 DeepSpeed's pipeline engine has "
        "one",
    )
    zero_stage: int = flag(
        1,
        "ZeRO stage. 1 partitions the optimizer state over DP; 0 and 2 compute the same, so they are taken as 1, with "
        "a word about memory; 3 partitions gradients and weights, too, without TP and stages (docs/upstream_flags.md)",
    )
    deepspeed_config: str | None = flag(
        None,
        "DeepSpeed configuration, a JSON file; optional. A flag that was not given takes the file's value, "
        "one that was given must agree with it; a key without effect is refused",
        names=("--deepspeed_config", "--deepspeed-config"),
    )
    deepspeed_activation_checkpointing: bool = flag(
        False, "recompute through DeepSpeed's activation checkpointing; needs --checkpoint-activations"
    )
    partition_activations: bool = flag(
        False, "split saved activations over the TP ranks", needs="deepspeed_activation_checkpointing"
    )
    contigious_checkpointing: bool = flag(
        False, "keep split activations in one buffer; needs --partition-activations", needs="partition_activations"
    )
    checkpoint_in_cpu: bool = flag(False, "keep saved activations in host memory", needs="partition_activations")
    synchronize_each_layer: bool = flag(
        False, "synchronize the device around each recomputed layer", needs="deepspeed_activation_checkpointing"
    )
    profile_backward: bool = flag(
        False, "time the backward pass of each recomputed layer", needs="deepspeed_activation_checkpointing"
    )
    local_rank: int = flag(
        0, "index of this process on its node; launchers give it", names=("--local-rank", "--local_rank"), least=0
    )
    zero_stage_asked: int = 1  # before 0 and 2 became 1
    world_size: int = 1  # WORLD_SIZE
    rank: int = 0  # RANK

    def __post_init__(self) -> None:
        self.check_values()
        if not 0.01 <= self.distributed_timeout_minutes <= 525600:
            why = "must be from 0.01, which is 0.6 s, to 525600, which is a year"
            self.refuse("distributed_timeout_minutes", why)
        require_at_least("WORLD_SIZE", self.world_size, 1)
        if not 0 <= self.rank < self.world_size:
            refuse("RANK", self.rank, f"must be in [0, WORLD_SIZE {self.world_size})")
        self._check_layout()
        self._resolve_zero_stage()
        if self.partition_activations and self.tensor_model_parallel_size == 1:
            raise ConfigError(
                "--partition-activations splits over the TP ranks, and --tensor-model-parallel-size is 1: "
                "drop it or raise TP"
            )
        if self.partition_activations and self.sequence_parallel:
            raise ConfigError(
                "--partition-activations splits activations that all TP ranks have, and --sequence-parallel leaves "
                "none: drop --partition-activations"
            )

    @property
    def splits_sequence(self) -> bool:
        """Whether --sequence-parallel has an effect."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    @property
    def data_parallel_size(self) -> int:
        """Groups of ranks that each train on samples of their own: world size / (TP x PP x SP)."""
        return self.weight_copies // self.ds_sequence_parallel_size

    @property
    def weight_copies(self) -> int:
        """Ranks that hold the same part of the model, over which ZeRO-1 divides the optimizer: world size / (TP x PP).

        The data-parallel ranks of a layout (megatron/parallel/topology.py), and DeepSpeed's.
        """
        return self.world_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(TP, PP, DP x SP)."""
        return self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.weight_copies

    @property
    def layout(self) -> dict[str, int]:
        """The fields of megatron.parallel.topology.Layout."""
        sizes = dict(zip(("tp", "pp", "dp"), self.sizes, strict=True))
        return sizes | {"ep": self.moe_expert_parallel_size} | ({"zero": 3} if self.zero_stage == 3 else {})

    def _resolve_zero_stage(self) -> None:
        if self.zero_stage not in (0, 1, 2, 3):
            self.refuse("zero_stage", "is no stage of ZeRO; use 1, or 3")
        if self.zero_stage != 1:
            object.__setattr__(self, "zero_stage_asked", self.zero_stage)
        if self.zero_stage in (0, 2):
            object.__setattr__(self, "zero_stage", 1)
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "moe_expert_parallel_size"):
            if self.zero_stage == 3 and getattr(self, name) != 1:
                self.refuse(name, "--zero-stage 3 divides the weights over all ranks; use 1, or --zero-stage 1")

    def _check_layout(self) -> None:
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        if self.no_pipeline_parallel and pp != 1:
            raise ConfigError(
                f"--no-pipeline-parallel contradicts --pipeline-model-parallel-size {pp}: drop one of them"
            )
        if self.world_size % (tp * pp):
            raise ConfigError(
                f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} = {tp * pp} does "
                f"not divide the world size {self.world_size}: start a multiple of {tp * pp} processes, or "
                "change TP or PP"
            )
        copies, parts, ep = self.weight_copies, self.ds_sequence_parallel_size, self.moe_expert_parallel_size
        if copies % parts:
            self.refuse(
                "ds_sequence_parallel_size",
                f"does not divide the {copies} ranks that hold the same weights, world size {self.world_size} / "
                f"(TP {tp} x PP {pp}): start a multiple of {tp * pp * parts} processes, or give a size that divides "
                "them",
            )
        if copies % ep:
            self.refuse(
                "moe_expert_parallel_size",
                f"does not divide the {copies} replicas of the model, world size {self.world_size} / "
                f"(TP {tp} x PP {pp}): start a multiple of {tp * pp * ep} processes, or give a size that divides them",
            )
