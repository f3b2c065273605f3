"""A preset with its settings: what is trained where, and with which flags."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megatron.checkpointing.engines.entries import ENGINES
from megatron.fileio.objects.stores import URI_FORM

from . import data, effects, environment, nodes
from .data import Data
from .environment import for_shell_line
from .errors import SettingsError
from .interpreter import Interpreter
from .nodes import Layout, Nodes
from .places import runs
from .presets import Model, Preset, start_of
from .settings import Settings, check_values

# what a replay takes beside engines
_REPLAYED = (
    "lazy-shared", "lazy-zstd", "memory-peer", "raw-rank", "raw-host", "raw-all", "s3torchconnector",
    "torch_checkpointing", "dcp-collective", "dcp-safetensors", "all",
)  # fmt: skip
DEFAULTS = {"SEQ_LENGTH": "2048", "MICRO_BATCH": "16", "ITERS": "15", "SAVE_INTERVAL": "5"}
# MODE=scaled: small enough for CPUs
SCALED = {
    "DEVICE": "cpu", "LAUNCHER": "fork", "TIME_LIMIT": "1200", "SEQ_LENGTH": "32", "MICRO_BATCH": "1", "ITERS": "4",
    "SAVE_INTERVAL": "2",
}  # fmt: skip


@dataclass(frozen=True)
class Start:
    """A preset, and the environment that it is started in."""

    preset: Preset
    environ: Mapping[str, str]

    @property
    def command(self) -> str:
        """What the user can type to start it again."""
        return for_shell_line(start_of(self.preset))

    @cached_property
    def given(self) -> Settings:
        """The user's settings, and those in which the preset's script differs from others."""
        return Settings.read(self.environ, {"MODE": "train", **self.preset.defaults})

    @cached_property
    def gpus(self) -> int:
        return nodes.gpus_of(self.environ)


@dataclass(frozen=True)
class Run:
    """`given`: as the user has set it; the other fields are settled. Sizes are those of the model that is trained."""

    start: Start
    given: Settings
    model: Model
    layout: Layout
    device: str
    engine: str
    launcher: str
    dtype: str
    recompute: str
    sequence_parallel: bool
    seq_length: int
    micro_batch: int
    global_batch: int
    iters: int
    save_interval: int
    device_gb: str
    kill_at: int | None
    time_limit: str
    label: str
    work_dir: Path
    save_dir: str
    trace_dir: str
    nodes: Nodes
    data: Data
    interpreter: Interpreter
    user_env: tuple[str, ...]

    @property
    def environ(self) -> Mapping[str, str]:
        return self.start.environ

    @property
    def mode(self) -> str:
        return self.given.mode

    @property
    def name(self) -> str:
        preset, layout = self.start.preset, self.layout
        return f"{preset.model}_tp{layout.tp}_pp{layout.pp}_dp{layout.dp}"

    @property
    def saves_to_store(self) -> bool:
        """Whether SAVE_DIR is a place in object storage."""
        return "://" in self.save_dir

    @property
    def over_hosts(self) -> bool:
        return self.nodes.over_hosts(self.given)

    @property
    def coordinates(self) -> bool:
        return effects.coordinates(self.given, self.launcher, self.nodes)

    def say(self, text: str) -> None:
        print(f"[{self.name}] {text}", file=sys.stderr, flush=True)

    def run_directory(self, date: str) -> Path:
        """Where a drill or a replay that starts at `date` leaves its results."""
        name = "demo" if self.start.preset.model == "tiny" and self.mode != "replay" else self.mode
        return self.work_dir / f"{name}-{date}"


def settle(start: Start, given: Settings | None = None) -> Run:
    """Everything that preset and environment decide. `given`: in place of the user's settings.

    Raises SettingsError.
    """
    given = given or start.given
    preset, mode = start.preset, given.mode
    user_env = tuple(environment.variables_of_user(start.environ, given.export))
    check_values(given)
    layout = Layout(preset.tp, preset.pp, int(given.dp or 1))
    defaults = {**DEFAULTS, **(SCALED if mode == "scaled" else {}), **preset.sizes.defaults}
    model, label = preset.sizes, given.restart_trace_label
    if mode == "scaled":
        model, label = scaled_model(preset, label)

    def value(name: str) -> str:
        return given.value(name) or defaults.get(name, "")

    micro_batch = int(value("MICRO_BATCH"))
    micro_batches = 2 if preset.model == "tiny" else 1  # of tiny two, so that the pipeline overlaps
    launcher = value("LAUNCHER") or "torchrun"
    effects.check_launcher(given, launcher)
    runs_on_cpu = preset.sizes.runs_on_cpu or mode in ("scaled", "replay")
    with_device = replace(given, device=value("DEVICE"))
    gpus = 0 if with_device.device == "cpu" else start.gpus
    device = nodes.device_of(with_device, layout, runs_on_cpu, preset.model, gpus)
    found = nodes.nodes_of(given, start.environ, launcher, device, layout, gpus)
    _check_together(given, device)
    work_dir = Path(given.work_dir or _work_dir(preset, layout, mode))
    save_dir = given.save_dir or str(work_dir / "checkpoints")
    _check_uri(save_dir)
    # Trace files cannot be written to object storage.
    traces = str(work_dir) if "://" in save_dir else save_dir
    save_interval = int(value("SAVE_INTERVAL"))
    kill_at = given.kill_at or (str(save_interval + 1) if mode == "scaled" else "")
    interpreter = Interpreter.of(given, start.environ)
    engine = given.engine or "torch"
    _check_engine(engine, mode, given, interpreter)
    return Run(
        start=start, given=given, model=model, layout=layout, device=device, engine=engine, launcher=launcher,
        dtype=given.dtype or "bf16", recompute=given.recompute or "auto",
        sequence_parallel=value("SEQUENCE_PARALLEL") == "1", seq_length=int(value("SEQ_LENGTH")),
        micro_batch=micro_batch, global_batch=int(given.global_batch or micro_batch * layout.dp * micro_batches),
        iters=int(value("ITERS")), save_interval=save_interval, device_gb=given.device_gb or "80",
        kill_at=int(kill_at) if kill_at not in ("", "none") else None, time_limit=value("TIME_LIMIT"), label=label,
        work_dir=work_dir, save_dir=save_dir, trace_dir=given.trace_dir or f"{traces}/restart_trace", nodes=found,
        data=data.data_of(given, preset.model, work_dir, 1023 if mode == "scaled" else 50256),
        interpreter=interpreter, user_env=user_env,
    )  # fmt: skip


def scaled_model(preset: Preset, label: str) -> tuple[Model, str]:
    """The preset's layers with narrow tensors, and the label of its figures; `label`: the user's own."""
    whole, tp = preset.sizes, preset.tp
    heads = max(tp, 4)  # must be divisible by TP
    hidden = 16 * heads
    model = replace(
        whole,
        hidden_size=hidden,
        ffn_hidden_size=whole.ffn_hidden_size * hidden // whole.hidden_size // tp * tp,
        num_attention_heads=heads,
        num_key_value_heads=tp if whole.num_key_value_heads < whole.num_attention_heads else heads,
        runs_on_cpu=True,
    )
    said = (
        f"Scaled: layers and layout of {preset.model}, on CPUs, with hidden size {hidden} in place of "
        f"{whole.hidden_size}. Times and sizes are not those of {preset.model}."
    )
    return model, f"{said} {label}" if label else said


def _work_dir(preset: Preset, layout: Layout, mode: str) -> Path:
    if preset.model == "tiny":
        return runs() / "tiny"
    name = f"{preset.model}_tp{layout.tp}_pp{layout.pp}_dp{layout.dp}"
    return runs() / (f"scaled_{name}" if mode == "scaled" else name)


def _check_together(given: Settings, device: str) -> None:
    if given.device_gb and not (given.recompute in ("", "auto") and device != "cpu"):
        raise SettingsError(
            f"DEVICE_GB={given.device_gb}: has an effect only with RECOMPUTE=auto on GPUs; leave it out"
        )
    if given.dry_run != "plan" and (given.blocked_target or given.durable_target):
        raise SettingsError(
            f"BLOCKED_TARGET={given.blocked_target} DURABLE_TARGET={given.durable_target}: are used only by "
            "DRY_RUN=plan; set it, or leave them out"
        )


def _check_uri(save_dir: str) -> None:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/([^/]|$)", save_dir):
        raise SettingsError(
            f"SAVE_DIR={save_dir}: a URI has two slashes: give {URI_FORM}, or ./{save_dir} for a directory of that name"
        )


def _check_engine(engine: str, mode: str, given: Settings, interpreter: Interpreter) -> None:
    """Refuse an unknown engine; a replay takes several, separated by commas.

    Only the interpreter with the packages of plugin engines knows these; if it is in an image, only the job can ask it.
    """
    known = list(ENGINES)
    if mode == "replay":
        known += _REPLAYED
    unknown = [name for name in (engine.split(",") if mode == "replay" else [engine]) if name not in known]
    if not unknown or given.image:
        return
    known += interpreter.plugin_engines()
    for name in unknown:
        if name not in known:
            raise SettingsError(f"ENGINE={engine}: there is no engine {name}; give one of {' '.join(known)}")
