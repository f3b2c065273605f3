"""The parts of the GPU tier: which commands each consists of, on the GPU and in the rehearsal on CPUs; the ladders.

A part measures nothing itself: its commands are the drill, the replay and the benchmarks of this project. What the
rehearsal changes is in `Sizes` and in the environment; the commands are the same.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron.checkpointing.engines.registry import builtin_engines

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 540.0  # of a part; then what it runs is ended
ENGINES_HERE = "ENGINES"
TIMED_ITERATIONS = 12  # of a part that measures the time of an iteration
_FOUR_RANKS = ROOT / "tests" / "gpu" / "four_ranks.hosts"
FIRST_ENGINES = ("lazy", "torch", "fastpersist-decoupled", "dcp-async")
OTHER_ENGINES = tuple(name for name in builtin_engines() if name not in (*FIRST_ENGINES, "memory", "none"))
ENGINES = (*FIRST_ENGINES, *OTHER_ENGINES)


@dataclass(frozen=True)
class Sizes:
    """What differs between GPU and rehearsal. `model` is a preset."""

    model: str
    vocab_size: int
    seq_length: int
    micro_batch: int
    save_interval: int
    replay_bytes: str
    replay_repeat: int
    replay_steps_s: str
    overhead_bytes: str
    overhead_repeat: int
    touched_bytes: int


# 1b: 17 GB of checkpoint, of which two are there while the second is saved. On a disk, so WORK needs 40 GB.
ON_GPU = Sizes("1b", 50_256, 2048, 4, 10, "2GiB", 3, "2", "1GiB", 12, 48 << 30)
# Also on the GPU, where the model does not matter.
SMALL = Sizes("tiny", 1_023, 64, 1, 5, "4MiB", 1, "0", "4MiB", 1, 64 << 20)


@dataclass(frozen=True)
class Setting:
    """Where and how the tier runs. `out` gets small files; `work`, removed after each part, checkpoints and data.

    `archive`: where all of `out` is packed after each part; None: nowhere. `bundle`: wheels to install from; None: the
    packages must be there.
    """

    rehearsal: bool
    out: Path
    work: Path
    archive: Path | None = None
    bundle: Path | None = None

    @property
    def sizes(self) -> Sizes:
        return SMALL if self.rehearsal else ON_GPU

    def environment(self) -> dict[str, str]:
        """Of every command."""
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        kept |= {"SKIP_SETUP": "1", "PYTHON": sys.executable, "PYTHONPATH": _with_root(kept.get("PYTHONPATH"))}
        kept |= {"TMPDIR": str(self.work / "tmp"), "DEVICE": "cpu" if self.rehearsal else "cuda"}
        if self.rehearsal:
            kept |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return kept


def _with_root(path: str | None) -> str:
    parts = [str(ROOT), *(part for part in (path or "").split(os.pathsep) if part and part != str(ROOT))]
    return os.pathsep.join(parts)


@dataclass(frozen=True)
class Step:
    """One command of a part. If `stdout` is given, what it prints goes to that file in the part's directory."""

    name: str
    argv: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    stdout: str | None = None
    engines: tuple[str, ...] = ()  # what ENGINES_HERE in argv stands for: those of them that can save here

    def shown(self) -> str:
        """As one would type it in the repository's root."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        meant = {sys.executable: "python", ENGINES_HERE: ",".join(self.engines)}
        words = [meant.get(word, word.replace(f"{ROOT}/", "")) for word in self.argv]
        return " ".join([*settings, shlex.join(words)] + ([f"> {self.stdout}"] if self.stdout else []))


@dataclass(frozen=True)
class Part:
    """A part: its directory below OUT has its `name`. `expected_s` is an estimate for one H100.

    `needs_device`: it cannot run where torch sees no CUDA device, or where there is no torch.
    """

    name: str
    expected_s: int
    shows: str
    steps: Callable[[Setting], list[Step]]
    limit_s: float = LIMIT_S
    needs_device: bool = True


def part_named(name: str) -> Part:
    """Raises StopIteration if there is none."""
    return next(part for part in PARTS if part.name == name)


def _python(module: str, *words: str) -> list[str]:
    return [sys.executable, "-m", module, *words]


def _training(setting: Setting, sizes: Sizes, *extra: str, iterations: int = 1000) -> dict[str, str]:
    """Settings of a preset. A drill ends the training itself, so it may be long."""
    return {
        "DATA_PATH": str(setting.work / "data" / f"random_{sizes.vocab_size}"),
        "VOCAB_SIZE": str(sizes.vocab_size), "SEQ_LENGTH": str(sizes.seq_length),
        "MICRO_BATCH": str(sizes.micro_batch), "ITERS": str(iterations), "SAVE_INTERVAL": str(sizes.save_interval),
        "EXTRA_ARGS": " ".join(["--keep-last 1", *extra]), "WORK_DIR": str(setting.work),
    }  # fmt: skip


def _preset(sizes: Sizes, tp: int = 1) -> str:
    return f"{sizes.model}_tp{tp}_pp1"


def _train(sizes: Sizes, environment: dict[str, str], tp: int = 1) -> Step:
    return Step("training", _python("tools.restart_bench", "run", _preset(sizes, tp)), environment)


def _data(setting: Setting, sizes: Sizes) -> Step:
    """Random tokens. Each part makes its own, so that it can be run alone."""
    words = ["--output-prefix", str(setting.work / "data" / f"random_{sizes.vocab_size}")]
    words += ["--tokens", "2000000", "--vocab-size", str(sizes.vocab_size)]
    return Step("data", _python("tools.make_synthetic_dataset", *words))


def _drill(
    setting: Setting, part: str, preset: str, environment: dict[str, str], engine: str, fault: str = "sigkill-all"
) -> Step:
    """A fault, SIGKILL by default, after the first checkpoint; resume, compare losses and every restored tensor."""
    words = ["--fault", fault, "--at", "mid-step", "--no-reference", "--no-analysis", "--until-caught-up"]
    words += ["--quiet", "--time-limit", "240", "--checkpoint-engine", ENGINES_HERE]
    words += [] if setting.rehearsal else ["--cold-cache"]  # the cache of a machine that others use
    words += ["--out", str(setting.out / part / "drill"), "--checkpoints", str(setting.work / "checkpoints")]
    argv = _python("tools.restart_drill", *words, "--", preset)
    return Step("drill", argv, environment, engines=(engine,))


def _facts(setting: Setting) -> list[Step]:
    words = [str(setting.out / "facts" / "facts.json"), str(ROOT), str(setting.work), "/dev/shm"]
    return [Step("facts", _python("tests.gpu.facts", *words))]


def _install(setting: Setting) -> list[Step]:
    """Without a bundle, and in a rehearsal, pip only says whether something is missing."""
    words = ["install", "--disable-pip-version-check", "--no-index", "-r", "tests/gpu/requirements.txt"]
    words += ["--find-links", str(setting.bundle)] if setting.bundle else []
    words += ["--dry-run"] if setting.rehearsal or not setting.bundle else []
    return [Step("pip", _python("pip", *words))]


def _grow(setting: Setting) -> list[Step]:
    """A virtual machine may get its memory as it touches it: it should not do so within a part that is timed."""
    words = [
        "--bytes",
        str(setting.sizes.touched_bytes),
        "--seconds",
        "20",
        "--output",
        str(setting.out / "grow" / "grow.json"),
    ]
    return [Step("grow", _python("tests.gpu.grow", *words))]


def _launch(setting: Setting) -> list[Step]:
    training = _training(setting, SMALL, iterations=4)
    training |= {"SAVE_INTERVAL": "2", "TRACE_DIR": str(setting.out / "launch" / "trace"), "LAUNCHER": "fork"}
    return [_data(setting, SMALL), _train(SMALL, training)]


def _machine(setting: Setting) -> list[Step]:
    directory = setting.out / "machine"
    extra = "--restart-trace-nvtx on --restart-trace-probes-interval 0.05 --profile-backward --warmup-kernels"
    training = _training(setting, SMALL, extra, iterations=4)
    training |= {
        "SAVE_INTERVAL": "2",
        "TRACE_DIR": str(directory / "trace"),
        "RECOMPUTE": "full",
    }  # for --profile-backward
    return [
        Step("machine", _python("tests.gpu.machine", str(directory / "machine.json"))),
        _data(setting, SMALL),
        _train(SMALL, training),
    ]


def _step_time(part: str, micro_batches: int, *flags: str) -> Callable[[Setting], list[Step]]:
    """Iterations of the preset without saves; torch.profiler records the last three, which the figures leave out."""

    def steps(setting: Setting) -> list[Step]:
        sizes, trace = setting.sizes, str(setting.out / part / "trace")
        first = TIMED_ITERATIONS + 1
        extra = f"--profile pt --profile_steps {first},{first + 2} --restart-trace-probes-interval 0.5"
        training = _training(setting, sizes, extra, *flags, iterations=first + 2)
        training |= {
            "RECOMPUTE": "none",
            "ENGINE": "none",
            "TRACE_DIR": trace,
            "GLOBAL_BATCH": str(micro_batches * sizes.micro_batch),
        }
        return [_data(setting, sizes), _train(sizes, training)]

    return steps


def _resume(engine: str) -> Callable[[Setting], list[Step]]:
    def steps(setting: Setting) -> list[Step]:
        sizes = setting.sizes
        return [
            _data(setting, sizes),
            _drill(setting, f"resume-{engine}", _preset(sizes), _training(setting, sizes), engine),
        ]

    return steps


def _replay(part: str, engines: tuple[str, ...]) -> Callable[[Setting], list[Step]]:
    def steps(setting: Setting) -> list[Step]:
        sizes, directory = setting.sizes, setting.out / part
        words = ["--model", sizes.model, "--tp", "1", "--pp", "1", "--ranks", "0", "--engine", ENGINES_HERE]
        words += ["--limit-bytes", sizes.replay_bytes, "--repeat", str(sizes.replay_repeat)]
        words += ["--steps-between", sizes.replay_steps_s, "--step-seconds", "0.5", "--dir", str(setting.work)]
        words += ["--no-cold"] if setting.rehearsal else []
        words += ["--trace-dir", str(directory / "trace"), "--output", str(directory / "replay.json")]
        argv = _python("tools.ckpt_replay", *words, "--format", "json", "--no-verdict")
        return [Step("replay", argv, engines=engines)]

    return steps


def _pytest(part: str, *chosen: str) -> Callable[[Setting], list[Step]]:
    def steps(setting: Setting) -> list[Step]:
        words = ["-q", "-rs", "-m", "gpu", "-p", "no:cacheprovider"]
        words += ["--junitxml", str(setting.out / part / "junit.xml")]
        return [Step("pytest", _python("pytest", *words, *chosen))]

    return steps


def _fork(setting: Setting) -> list[Step]:
    environment = _training(setting, SMALL) | {"LAUNCHER": "fork"}
    return [_data(setting, SMALL), _drill(setting, "fork", _preset(SMALL), environment, "lazy")]


def _shared_gpu(setting: Setting) -> list[Step]:
    return [_data(setting, SMALL), _drill(setting, "shared-gpu", _preset(SMALL, 2), _four_ranks(setting), "lazy")]


def _four_ranks(setting: Setting, iterations: int = 1000) -> dict[str, str]:
    """NCCL refuses two ranks on one device; gloo does not, and has no point-to-point operations for CUDA tensors."""
    training = _training(setting, SMALL, "--distributed-backend gloo --deterministic on", iterations=iterations)
    return training | {"DP": "2", "HOSTFILE": str(_FOUR_RANKS), "LAUNCHER": "fork"}


def _sequence_parallel(setting: Setting) -> list[Step]:
    """A training alone: what a resume adds is the same as in `shared-gpu`."""
    training = _four_ranks(setting, iterations=4) | {"SEQUENCE_PARALLEL": "1", "ENGINE": "none"}
    training |= {"TRACE_DIR": str(setting.out / "sequence-parallel" / "trace")}
    return [_data(setting, SMALL), _train(SMALL, training, 2)]


def _reshard(setting: Setting) -> list[Step]:
    """Onto TP1 DP4: parts of a row are read into rows of a parameter on the device."""
    data, drill = _shared_gpu(setting)
    out = str(setting.out / "shared-gpu" / "drill")
    argv = [word.replace(out, str(setting.out / "reshard" / "drill")) for word in drill.argv]
    resumed = argv.index("--")
    return [data, replace(drill, argv=[*argv[:resumed], "--resume-tp", "1", "--resume-dp", "4", *argv[resumed:]])]


def _memory(setting: Setting) -> list[Step]:
    """Asked like other engines it would refuse: only ranks of megatron.launch can save with it."""
    environment = _training(setting, SMALL) | {"LAUNCHER": "fork"}
    drill = _drill(setting, "memory", _preset(SMALL), environment, "memory")
    argv = ["memory" if word == ENGINES_HERE else word for word in drill.argv]
    return [_data(setting, SMALL), replace(drill, argv=argv, engines=())]


def _device_error(setting: Setting) -> list[Step]:
    return [
        _data(setting, SMALL),
        _drill(setting, "device-error", _preset(SMALL), _training(setting, SMALL), "lazy", "device-error"),
    ]


def _overhead(setting: Setting) -> list[Step]:
    sizes = setting.sizes
    words = ["--bytes-per-rank", sizes.overhead_bytes, "--ranks", "1", "--repeat", str(sizes.overhead_repeat)]
    words += ["--only", "save", "load", "--dir", str(setting.work), "--format", "json"]
    return [Step("overhead", _python("benchmarks.overhead", *words), stdout="overhead.json")]


def _resume_part(engine: str) -> Part:
    name = f"resume-{engine}"
    return Part(name, 120, f"trained with NCCL, saved, killed, resumed: engine {engine}", _resume(engine))


def _replay_part(name: str, expected_s: int, engines: tuple[str, ...]) -> Part:
    shows = f"blocked, durable and load times, interleaved: {', '.join(engines)}"
    return Part(name, expected_s, shows, _replay(name, engines))


_COPIES = "tests/gpu/test_device_copies.py"

PARTS: tuple[Part, ...] = (
    Part("facts", 5, "device, driver, disk, memory, limits, compilers, packages", _facts, needs_device=False),
    Part("install", 20, "the wheels of --bundle, or what is missing without it", _install, needs_device=False),
    Part("grow", 22, "up to 48 GiB of memory touched, the first time and the second", _grow, needs_device=False),
    Part("launch", 25, "megatron.launch forks a rank, which uses CUDA", _launch),
    Part("machine", 40, "libraries, engines; a tiny training to its end, with NCCL and NVTX ranges", _machine),
    Part("step-time", 50, "1b: time of an iteration, MFU, memory, a profile", _step_time("step-time", 1)),
    Part("step-time-4", 55, "the same with four micro-batches", _step_time("step-time-4", 4)),
    Part(
        "step-time-compiled",
        110,
        "step-time with --torch-compile",
        _step_time("step-time-compiled", 1, "--torch-compile"),
    ),
    Part("copies", 35, "pinning, copies to the host: GB/s, beside computing", _pytest("copies", _COPIES)),
    Part("tests", 100, "the other tests marked gpu", _pytest("tests", "tests/gpu", "--ignore", _COPIES)),
    _resume_part("lazy"),
    Part("fork", 45, "the drill: ranks that megatron.launch forks are killed and resumed", _fork),
    Part("memory", 45, "engine memory: from the device to host memory that the launcher holds", _memory),
    Part("shared-gpu", 50, "four ranks on one GPU over gloo: TP2 DP2, killed and resumed", _shared_gpu),
    Part("sequence-parallel", 30, "the same ranks with --sequence-parallel: a training", _sequence_parallel),
    Part("device-error", 45, "a kernel fails, which makes a rank's CUDA context unusable: trained on", _device_error),
    _replay_part("engines", 330, FIRST_ENGINES),
    Part("reshard", 70, "the ranks of shared-gpu, resumed on TP1 DP4", _reshard),
    Part("overhead", 120, "what the trace costs a save and a load", _overhead),
    *(_resume_part(engine) for engine in FIRST_ENGINES[1:]),
    _replay_part("engines-others", 400, ("lazy", *OTHER_ENGINES)),
    *(_resume_part(engine) for engine in OTHER_ENGINES),
)
# Of each ladder, the parts in their order: the most important first.
LADDERS: dict[int, tuple[str, ...]] = {
    1: ("facts", "install", "grow", "launch", "machine", "step-time", "step-time-4", "copies", "tests"),
    2: ("facts", "install", "grow", "resume-lazy", "fork", "memory", "shared-gpu", "sequence-parallel", "device-error"),
}
# No part can show these; --dry-run lists them.
NEEDS_TWO_DEVICES = (
    "process groups of several ranks on NCCL, and its watchdog",
    "pipeline stages: gloo sends no CUDA tensor from rank to rank",
    "reduce-scatter and all-gather of --sequence-parallel on NCCL",
    "--warmup-communicators with several devices",
    "NVLink and its counters",
    "several devices that copy to one host at a time",
    "threads of a rank whose device is not the first",
)
