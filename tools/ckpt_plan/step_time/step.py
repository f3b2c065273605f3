"""The time of one iteration: layers of the stages, the pipeline's schedule, gradients and optimizer.

DeepSpeed's schedule is 1F1B (PipeDream-Flush, arXiv:2006.09503). The slowest stage computes all m micro batches, and
waits for each other stage to compute one while the pipeline fills and drains. With times t of a micro batch, forward
and backward, this takes m max(t) + sum(t) - max(t), for p equal stages (m + p - 1) t.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.config import Config, ConfigError
from megatron.config.deepspeed_config import immediate_grad_update
from megatron.model.flops import flops_of_batch
from megatron.parallel.topology import Layout

from ...common.extrapolation import Extrapolation, extrapolation
from ..presets import Planned
from ..recomputation import MODES, USABLE, fullest_device_bytes, mode_of, with_mode
from ..tensors import plan_tensors, stage_bounds
from .devices import DeviceFacts
from .fusion import fused
from .layers import EMBEDDING, HEAD, NORM, LayerPasses, block_of, count_layers
from .optimizer import each_micro_batch_bytes, each_step_bytes
from .passes import Pass
from .timing import NO_EXCHANGE, Exchange, collective_seconds, seconds_of

PARTS: tuple[str, ...] = (
    "matrix_products", "attention", "memory_passes", "tensor_parallel", "expert_parallel", "recomputation",
    "launches", "gradient_accumulation", "pipeline_sends", "pipeline_bubble", "optimizer", "data_parallel",
)  # fmt: skip
_GRADIENT_BYTES = 4  # bf16: they are accumulated and reduced in fp32
_WEIGHT_BYTES = 2


@dataclass(frozen=True)
class TimedPasses:
    """Equal passes of the slowest stage in one micro batch: their number, and seconds of all of them."""

    layer: str
    backward: bool
    name: str
    shape: tuple[int, ...]
    count: int
    flops: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class StepTime:
    """The prediction for one configuration. `parts`: seconds by PARTS, which add up to `seconds`."""

    device: DeviceFacts
    recomputation: str
    compiled: bool
    layout: Layout
    parameters: int  # of the model
    micro_batches: int
    tokens: int
    flops: float
    parts: dict[str, float]
    passes: tuple[TimedPasses, ...]
    device_bytes: int

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tflops(self) -> float:
        """As the training log prints it: TFLOP/s of a device."""
        return self.flops / self.seconds / self.layout.world_size / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: a share of the device's peak."""
        return self.tflops / self.device.peak_tflops

    @property
    def tokens_per_second(self) -> float:
        """Of one device."""
        return self.tokens / self.seconds / self.layout.world_size

    @property
    def extrapolated(self) -> list[Extrapolation] | None:
        """Beyond the measured steps that the device's facts were compared with; None if these are none."""
        device = self.device
        amounts = (
            ("ranks", device.compared_ranks, self.layout.world_size, 1.0),
            ("billion parameters", device.compared_parameters, self.parameters, 1e9),
        )
        known = [
            extrapolation(unit, _rounded(ran / scale), _rounded(asked / scale))
            for unit, ran, asked, scale in amounts
            if ran is not None
        ]
        return [reach for reach in known if reach is not None] if known else None

    @property
    def fits(self) -> bool:
        return self.device_bytes <= USABLE * self.device.memory_bytes


def settings_of(config: Config) -> Iterator[tuple[str, bool]]:
    """(recomputation, compiled) of all settings that are compared; experts are not compiled."""
    return ((mode, compiled) for compiled in (False, True)[: 1 if config.model.has_experts else 2] for mode in MODES)


def step_time(
    planned: Planned,
    device: DeviceFacts,
    ranks_per_host: int,
    *,
    recomputation: str | None = None,
    compiled: bool = False,
) -> StepTime:
    """The time of an iteration of `planned`, with another recomputation if that is given.

    Raises ConfigError for what is not modelled.
    """
    config, layout, (_, padded) = planned
    if not config.model.bf16:
        raise ConfigError("--step-time: predicts bf16 only, since the peaks of devices are those of bf16; add --bf16")
    if config.model.uses_alibi:
        raise ConfigError(
            "--position-embedding-type alibi: --step-time predicts attention without a matrix of biases; give another "
            "type, or drop --step-time"
        )
    if config.model.has_experts and not config.model.moe_token_dropping:
        raise ConfigError(
            "--disable-moe-token-dropping: how many tokens an expert gets is known in a training alone; drop the flag, "
            "or --step-time"
        )
    if config.parallel.ds_sequence_parallel_size > 1:
        config.parallel.refuse(
            "ds_sequence_parallel_size",
            "--step-time predicts no exchange of heads for parts of a sequence; give 1, or drop --step-time",
        )
    if recomputation is not None:
        config = with_mode(config, recomputation)
        planned = (config, layout, planned[2])
    mode = mode_of(config.model)
    training = config.training
    micro_batches = training.global_batch_size // (training.micro_batch_size * layout.dp)
    layers = count_layers(
        config.model, padded, layout.tp, config.parallel.splits_sequence, training.micro_batch_size, layout.ep
    )
    if compiled:
        layers = layers | {kind: fused(layers[kind]) for kind in map(block_of, set(config.model.experts_per_layer))}
    stages = [_stage(planned, stage, layers, mode, device, ranks_per_host) for stage in range(layout.pp)]
    times = [sum(parts.values()) for parts, _ in stages]
    slowest = max(range(layout.pp), key=times.__getitem__)
    parts = dict.fromkeys(PARTS, 0.0)
    parts |= {name: micro_batches * seconds for name, seconds in stages[slowest][0].items()}
    parts["pipeline_bubble"] = sum(times) - times[slowest]
    parts |= _after_the_backward_pass(planned, device, ranks_per_host)
    return StepTime(
        device, mode, compiled, layout, plan_tensors(planned).parameters, micro_batches,
        training.global_batch_size * config.model.seq_length,
        flops_of_batch(config, padded, training.global_batch_size), parts, stages[slowest][1],
        fullest_device_bytes(planned),
    )  # fmt: skip


def _layers_of(config: Config, layout: Layout, stage: int) -> dict[str, int]:
    """How many layers of each kind a stage has, in the order in which data passes them."""
    bounds = stage_bounds(config.model.num_layers, layout.pp)
    blocks = map(block_of, config.model.experts_per_layer)
    kinds = ["", EMBEDDING, *blocks, NORM, HEAD][bounds[stage] : bounds[stage + 1]]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds) if kind}


def _stage(
    planned: Planned, stage: int, layers: dict[str, LayerPasses], mode: str, device: DeviceFacts, ranks_per_host: int
) -> tuple[dict[str, float], tuple[TimedPasses, ...]]:
    """Seconds of one micro batch on a stage by part, and its passes."""
    config, layout, _ = planned
    found = dict.fromkeys(PARTS, 0.0)
    launches = 0.0
    timed: dict[tuple[str, bool, str, tuple[int, ...]], TimedPasses] = {}
    exchanges = _exchanges(planned, stage, device, ranks_per_host)
    for kind, count in _layers_of(config, layout, stage).items():
        for passes in (layers[kind].forward, layers[kind].backward):
            seconds = seconds_of(passes, device, layout.tp, exchanges.get(kind, NO_EXCHANGE))
            found["matrix_products"] += count * seconds.products
            found["attention"] += count * seconds.attention
            found["memory_passes"] += count * seconds.memory
            found["tensor_parallel"] += count * seconds.collectives
            found["expert_parallel"] += count * seconds.exchanges
            launches += count * seconds.launches
            _add_passes(timed, kind, count, passes, seconds.by_pass)
        if kind in exchanges and mode == "full":
            again = seconds_of(layers[kind].forward, device, layout.tp, exchanges[kind])
            found["recomputation"] += count * again.device
            launches += count * again.launches
    parameters = _parameters(planned, stage)
    each_batch = parameters * each_micro_batch_bytes(immediate_grad_update(config))
    found["gradient_accumulation"] = _over_memory(each_batch, device)
    found["launches"] = max(launches - sum(found.values()), 0.0)
    found["pipeline_sends"] = _sends(planned, stage, device, ranks_per_host)
    return found, tuple(sorted(timed.values(), key=lambda each: -each.seconds))


def _add_passes(
    timed: dict[tuple[str, bool, str, tuple[int, ...]], TimedPasses],
    layer: str,
    count: int,
    passes: tuple[Pass, ...],
    seconds: list[float],
) -> None:
    for each, taken in zip(passes, seconds, strict=True):
        key = (layer, each.backward, each.name, each.shape)
        before = timed.get(key, TimedPasses(*key, 0, 0, 0, 0.0))
        timed[key] = dataclasses.replace(
            before,
            count=before.count + count,
            flops=before.flops + count * each.flops,
            num_bytes=before.num_bytes + count * (each.payload or each.num_bytes),
            seconds=before.seconds + count * taken,
        )


def _parameters(planned: Planned, stage: int) -> int:
    return next(rank.parameters for rank in plan_tensors(planned).ranks if rank.at.pp == stage)


def _rounded(amount: float) -> float:
    return float(f"{amount:.3g}") if amount < 1000 else amount


def _over_memory(num_bytes: float, device: DeviceFacts) -> float:
    return num_bytes / (device.memory_GBps * 1e9 * device.bandwidth_share)


def _link(one: int, other: int, device: DeviceFacts, ranks_per_host: int) -> float:
    """GB/s between two ranks, as NCCL reaches it."""
    if one // ranks_per_host == other // ranks_per_host:
        return device.link_GBps * device.link_share
    return device.network_GBps * device.network_share


def _slowest_link(ranks: Sequence[int], device: DeviceFacts, ranks_per_host: int) -> float:
    """GB/s between the first of some ranks and the others."""
    return min(_link(ranks[0], rank, device, ranks_per_host) for rank in ranks)


def _exchanges(planned: Planned, stage: int, device: DeviceFacts, ranks_per_host: int) -> dict[str, Exchange]:
    """By kind of block: between which ranks its tokens are exchanged."""
    config, layout, _ = planned
    found = {}
    for experts in set(config.model.experts_per_layer):
        ranks = [layout.rank(0, stage, dp) for dp in range(layout.expert_ranks(experts))]
        found[block_of(experts)] = Exchange(len(ranks), _slowest_link(ranks, device, ranks_per_host))
    return found


def _sends(planned: Planned, stage: int, device: DeviceFacts, ranks_per_host: int) -> float:
    """Seconds in which a stage sends and receives a micro batch's activations and their gradients.

    Each TP rank sends its part; without sequence parallelism the receiver's ranks gather the whole (DeepSpeed's
    pipe_partitioned).
    """
    config, layout, _ = planned
    whole = _WEIGHT_BYTES * config.training.micro_batch_size * config.model.seq_length * config.model.hidden_size
    found = 0.0
    for neighbour in (stage - 1, stage + 1):
        if not 0 <= neighbour < layout.pp:
            continue
        GBps = _link(layout.rank(0, stage, 0), layout.rank(0, neighbour, 0), device, ranks_per_host)
        found += 2 * (whole / layout.tp / (GBps * 1e9) + device.collective_us * 1e-6)
        if not config.parallel.splits_sequence:
            link = device.link_GBps * device.link_share
            found += collective_seconds("all_gather", whole, layout.tp, link, device)
    return found


def _after_the_backward_pass(planned: Planned, device: DeviceFacts, ranks_per_host: int) -> dict[str, float]:
    """Seconds of the optimizer and of the reduction over data-parallel replicas, of the stage with most parameters.

    DeepSpeed reduces all gradients with an all-reduce in fp32, and then gathers the weights that each replica updates;
    experts that are divided over data-parallel ranks have fewer replicas.
    """
    config, layout, _ = planned
    fullest = max(plan_tensors(planned).ranks, key=lambda rank: rank.parameters)
    shared = fullest.parameters - sum(fullest.divided.values())
    found = {"optimizer": 0.0, "data_parallel": 0.0}
    for step, parameters in ((1, shared), *fullest.divided.items()):
        ranks = [layout.rank(0, 0, dp) for dp in range(0, layout.dp, step)]
        GBps = _slowest_link(ranks, device, ranks_per_host)
        for name, size in (("all_reduce", _GRADIENT_BYTES), ("all_gather", _WEIGHT_BYTES)):
            found["data_parallel"] += collective_seconds(name, parameters * size, len(ranks), GBps, device)
        found["optimizer"] += _over_memory(each_step_bytes(config.optimizer, parameters, len(ranks)), device)
    return found
