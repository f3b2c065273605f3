"""Writes logs in the form of upstream Megatron-DeepSpeed's, whose truth is known. Every line is made here.

The defaults: 4 ranks (TP2 PP1 DP2), 6 steps with a save after each, 0.5 s of training a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

_START = datetime(2026, 3, 1, 12, 0, 0)
PARAMETERS = 1_000_000_000


@dataclass
class LogOptions:
    """What the log shows. Times of saves in ms; `waits_s`: printed after each save, one per rank."""

    engine: str = "Torch"
    save_ms: list[float] = field(default_factory=lambda: [2000.0, 1010.0, 1020.0, 1030.0, 1040.0, 1050.0])
    fastest_less_ms: float = 0.5
    waits_s: list[float] = field(default_factory=list)
    tp: int = 2
    pp: int = 1
    dp: int = 2
    world_size: int = 4
    step_s: float = 0.5
    printed: bool = True
    file_calls: bool = True
    layers: int = 3
    deepspeed_iterations: bool = True
    loads_step: int | None = None
    listing: list[str] = field(default_factory=list)
    finish: bool = True  # False: killed within the last save


def files_of(step: int, options: LogOptions) -> list[str]:
    """The files of a save: of each layer one per tensor rank, and two kinds per rank."""
    root = f"/scratch/run/global_step{step}"
    layers = [
        f"layer_{n:02d}-model_{t:02d}-model_states.pt" for n in range(1, options.layers + 1) for t in range(options.tp)
    ]
    shards = [
        f"bf16_zero_pp_rank_{d}_mp_rank_{m:02d}_optim_states.pt"
        for d in range(options.dp)
        for m in range(options.tp * options.pp)
    ]
    return [f"{root}/{name}" for name in [*layers, *shards]]


def upstream_log(options: LogOptions | None = None) -> str:
    """The whole log as text."""
    options = options or LogOptions()
    clock = _Clock(_START)
    lines = _launch(options, clock)
    for step, took_ms in enumerate(options.save_ms, start=1):
        lines += _iteration(step, options, clock)
        last = step == len(options.save_ms)
        lines += _save(step, took_ms, options, clock, finish=options.finish or not last)
    lines.append(f"[after training is done] datetime: {clock.now:%Y-%m-%d %H:%M:%S} ")
    if options.waits_s:
        lines += _waits(options, clock)
    return "\n".join([*lines, *options.listing]) + "\n"


@dataclass
class _Clock:
    now: datetime

    def dated(self, text: str, where: str = "logging.py:107:log_dist") -> str:
        return f"[{self.now:%Y-%m-%d %H:%M:%S},{self.now.microsecond // 1000:03d}] [INFO] [{where}] {text}"

    def pass_ms(self, ms: float) -> None:
        self.now += timedelta(milliseconds=ms)


def _launch(options: LogOptions, clock: _Clock) -> list[str]:
    lines = [
        clock.dated("process 4711 spawned with command: ['python', 'pretrain_gpt.py']", "launch.py:256:main"),
        "torch version .................... 2.9.0+cu130",
        "deepspeed info ................... 0.18.1+abc, abc, main",
        "**** Git info for Megatron: git_hash=feed123 git_branch=main ****",
        f"using world size: {options.world_size}, data-parallel-size: {options.dp}, sequence-parallel size: 1, "
        f"tensor-model-parallel size: {options.tp}, pipeline-model-parallel size: {options.pp} ",
        "------------------------ arguments ------------------------",
        "  num_layers ...................................... 16",
        "  hidden_size ..................................... 2048",
        f"  world_size ...................................... {options.world_size}",
        "-------------------- end of arguments ---------------------",
        clock.dated(f"RANK=0 STAGE=0 LAYERS=20 [0, 20) TOTAL_PARAMS={PARAMETERS} (1000M)", "engine.py:1:__init__"),
    ]
    clock.pass_ms(9_000)
    if options.loads_step is not None:
        lines.append(f"  successfully loaded checkpoint from /scratch/run at iteration {options.loads_step}")
    return [
        *lines,
        "(min, max) time across ranks (ms):",
        "    load-checkpoint ................................: (1200.50, 1250.75)",
        "(min, max) time across ranks (ms):",
        "    model-and-optimizer-setup ......................: (2000.00, 2100.00)",
        "    train/valid/test-data-iterators-setup ..........: (300.00, 400.00)",
    ]


def _iteration(step: int, options: LogOptions, clock: _Clock) -> list[str]:
    clock.pass_ms(1000 * options.step_s)
    lines = [clock.dated(f"[Rank 0] step={step}, skipped=0, lr=[0.0003], mom=[(0.9, 0.95)]")]
    if options.waits_s and step > 1:
        lines += _waits(options, clock)
    if options.deepspeed_iterations:
        lines.append(f"steps: {step} loss: 9.5000 iter time (s): {options.step_s:.3f} samples/sec: 2.000")
    return [
        *lines,
        f" iteration {step:8d}/      60 | consumed samples: {step:12d} | elapsed time per iteration (ms): "
        f"{1000 * options.step_s + 700:.1f} | learning rate: 3.000E-04 | lm loss: 9.500000E+00 | grad norm: 1.0 |",
    ]


def _waits(options: LogOptions, clock: _Clock) -> list[str]:
    return [
        clock.dated(f"[Snap] Waited for all snapshots to complete in {wait:.6f}s", "snap_engine.py:58:wait")
        for wait in options.waits_s
    ]


def _save(step: int, took_ms: float, options: LogOptions, clock: _Clock, *, finish: bool) -> list[str]:
    lines = [
        f"saving checkpoint at iteration {step:7d} to /scratch/run",
        clock.dated(f"[Rank 0] [{options.engine}] Checkpoint global_step{step} is about to be saved!"),
    ]
    clock.pass_ms(took_ms)
    fastest_ms = took_ms - options.fastest_less_ms
    files = files_of(step, options)
    if options.file_calls:
        lines += [
            clock.dated(f"[{options.engine}] CkptTime {path} {0.01 * (n + 1)}.", "torch_engine.py:26:save")
            for n, path in enumerate(files)
        ]
    if not finish:
        return lines
    lines.append(f"  successfully saved checkpoint at iteration {step:7d} to /scratch/run")
    if options.printed:
        gigabytes = 14 * PARAMETERS / 1e9
        lines.append(
            f"Checkpoint Save GB: {gigabytes}, GB/Sec: {round(gigabytes / took_ms * 1000, 2)}, "
            f"Latency(second): {took_ms / 1000:.3f}"
        )
    return [
        *lines,
        "(min, max) time across ranks (ms):",
        f"    save-checkpoint ................................: ({fastest_ms:.2f}, {took_ms:.2f})",
        f"<TIMER:interval-time,{options.step_s + took_ms / 1000}>",
    ]
