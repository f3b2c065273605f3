"""The restart trace: whether and where the phases of saves, loads and start-ups are recorded."""

from __future__ import annotations

import dataclasses

from megatron.config.errors import refuse
from megatron.config.flags import FlagGroup, flag, on_off


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceConfig(FlagGroup):
    """Restart trace: recording where saves and restarts spend their time."""

    restart_trace: bool = flag(True, "record the phases of every save, load and start-up: on or off", parse=on_off)
    restart_trace_dir: str | None = flag(
        None, "directory of the trace files (default: restart_trace in --save; without either, none are written)"
    )
    trace_probes: bool = flag(
        True,
        "sample memory, I/O and device counters at the ends of operations: on or off",
        names=("--restart-trace-probes",),
        parse=on_off,
    )
    trace_probes_interval: float | None = flag(
        None,
        "sample them every so many seconds, too, and the throughput of PCIe and NVLink, from a thread of its own; 0.1 "
        "shows a save of seconds (default: not at all)",
        names=("--restart-trace-probes-interval", "--trace-probes-interval"),
        least=0.01,
        below=3600,
    )
    trace_nvtx: bool | None = flag(
        None,
        "mark the phases as NVTX ranges: on or off (default: on where CUDA is there)",
        names=("--restart-trace-nvtx",),
        parse=on_off,
    )
    otlp: str | None = flag(
        None,
        "send the spans to this OpenTelemetry collector while the training runs: OTLP over HTTP, such as "
        "http://collector:4318 (default: to none)",
    )

    def __post_init__(self) -> None:
        self.check_values()
        if self.restart_trace_dir == "":
            refuse("--restart-trace-dir", "''", "is empty; give a directory")
        if not self.restart_trace and self.restart_trace_dir is not None:
            self.refuse("restart_trace_dir", "does nothing with --restart-trace off; drop one of them")
        if self.trace_probes_interval is not None and not (self.restart_trace and self.trace_probes):
            off = "--restart-trace-probes" if self.restart_trace else "--restart-trace"
            self.refuse("trace_probes_interval", f"does nothing with {off} off; drop one of them")
        if self.otlp is not None and not self.restart_trace:
            self.refuse("otlp", "does nothing with --restart-trace off; drop one of them")
