"""Record types, fields and phase names of the restart trace; docs/log_format.md says what records are for.

This module, `reading` and `regular` are the only parts of the project that the offline tools import; they import
nothing but the standard library. A change to a name, a type or a meaning here raises SCHEMA_VERSION.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 16
# Older ones whose records this version has, too: they lack a field that is not required, or phases.
READABLE_VERSIONS = (15, SCHEMA_VERSION)

SPAN = "span"  # the type of a record that names none: most are spans
MAIN_THREAD = "MainThread"  # of a span that names no thread

RANK_FILE_PATTERN = "rank_{rank:05d}_cycle_{cycle:03d}.jsonl"
RANK_FILE_REGEX = r"^rank_(\d{5,})_cycle_(\d{3,})\.jsonl$"
SUPERVISOR_FILE_PATTERN = "supervisor_{index:03d}.jsonl"
SUPERVISOR_FILE_REGEX = r"^supervisor_(\d{3,})\.jsonl$"
CYCLE_FILE_PATTERN = "cycle_{cycle:03d}.json"
CYCLE_FILE_REGEX = r"^cycle_(\d{3,})\.json$"

# What a process group connects: ranks that differ in one coordinate alone, those of one replica (model), all (world),
# all for agreements on the host (control), or others, among them groups of one rank.
GROUPS = ("world", "control", "tensor", "pipeline", "data", "model", "other")

# operation -> phase -> details. A phase without details has the empty tuple; a span of a phase that has
# details always names one, so that the phases of an operation can be summed from its spans alone.
PHASES: dict[str, dict[str, tuple[str, ...]]] = {
    "save": {
        "wait_previous": (),
        "make_directory": (),
        "collect": (),
        "tag_validation": (),
        "device_to_host": (),
        "serialize": (),
        "verify": (),
        "replicate": (),
        "flush": ("write", "fsync", "upload"),
        "library_call": (),
        "barrier": (),
        "commit": ("manifest", "publish", "prune"),
        "remove": (),
    },
    "load": {
        "discover": (),
        "load": ("download", "read", "verify", "deserialize", "host_to_device"),
        "redistribute": ("reshard", "broadcast", "all_gather"),
        "library_call": (),
        "barrier": (),
    },
    "startup": {
        "abort": (),
        "return": ("undo", "barrier"),
        "process_start": (),
        "imports": (),
        "cuda_context": (),
        "name_lookup": (),
        "rendezvous": (),
        "communicators": GROUPS,
        "host_memory": ("allocate", "pin", "bus", "wait"),
        "model_build": (),
        "data_build": (),
        "engine_init": (),
        "compile": (),
        "warmup": (*GROUPS, "point_to_point", "kernels"),
        "data_skip": (),
        "first_step": (),
        "caught_up": (),
    },
    "failure": {"injected": (), "detected": (), "stopped": (), "relaunched": ()},
    "process": {"ended": ()},
}


@dataclass(frozen=True)
class Field:
    """One field of a record: JSON type, whether every record of the type has it, and what it means."""

    json_type: str  # "int" | "float" | "str" | "bool" | "object" | "list"
    required: bool
    meaning: str


_TYPE = {"type": Field("str", True, "record type")}
_TAG = Field("str", False, "checkpoint tag, such as global_step5")
_STEP = Field("int", False, "training iteration the operation belongs to")
_ENGINE = Field("str", False, "class name of its engine; of a load's label, of the one that wrote the checkpoint")

# Axes of a layout. Every rank has a place on the first three; on the others only where the job has them.
AXES = ("tp", "pp", "dp", "cp", "ep", "fsdp")
_LAYOUT = Field("object", True, "sizes of the parallel dimensions: tp, pp, dp, and cp, ep, fsdp if there are any")
_COORDINATES = {
    "tp": Field("int", True, "tensor-parallel coordinate; -1 for a supervisor"),
    "pp": Field("int", True, "pipeline-parallel coordinate; -1 for a supervisor"),
    "dp": Field("int", True, "data-parallel coordinate; -1 for a supervisor"),
    "cp": Field("int", False, "context- or sequence-parallel coordinate"),
    "ep": Field("int", False, "expert-parallel coordinate, of ranks that are data-parallel otherwise"),
    "fsdp": Field("int", False, "coordinate among the ranks that share one set of weights"),
}

# Only the first record of a file says which process it is of, and only operation_begin and operation_label say what
# an operation is; the others name it by its op. restart_trace.reading puts them together again.
RECORD_FIELDS: dict[str, dict[str, Field]] = {
    # The first line of a file, and no other.
    "process": _TYPE
    | {
        "v": Field("int", True, "schema version of the file"),
        "run_id": Field("str", True, "the same for all ranks and all cycles (restarts) of one run"),
        "cycle": Field("int", True, "0 for the first start, then one more per restart; of a supervisor its first"),
        "rank": Field("int", True, "global rank; -1 for a supervisor"),
        **_COORDINATES,
        "role": Field("str", True, "rank or supervisor"),
        "instrument": Field("str", True, "trainer: this project's own code; hooks: restart_trace.hooks in another's"),
        "host": Field("str", True, "host name"),
        "boot_id": Field("str", True, "kernel boot id, with /time:[N] in a time namespace of its own; empty: unknown"),
        "pid": Field("int", True, "process id"),
        "cores": Field("str", False, "cores that the process may run on, as the kernel lists them: 0-3,8"),
        "cpu_limit": Field("float", False, "quota of its control group, in cores (docker run --cpus); absent: none"),
        "world_size": Field("int", True, "number of ranks; 0 for a supervisor"),
        "layout": _LAYOUT,
        "process_start_ns": Field("int", True, "start of the process on the monotonic clock, ns"),
        "process_start_source": Field("str", True, "os (10 ms resolution) or python (first line run; no /proc)"),
        "returns": Field("int", False, "in-process restarts of this process before; 0: it is new; absent: not known"),
        "wall_ns": Field("int", True, "clock anchor: Unix time, ns at monotonic_ns"),
        "monotonic_ns": Field("int", True, "clock anchor: time of the monotonic clock, ns"),
        "anchor_error_ns": Field("int", True, "upper bound on the error of the anchor, ns"),
        "engine_asked": Field("str", False, "value of --checkpoint-engine"),
        "durability": Field("str", False, "value of --checkpoint-durability"),
        "versions": Field("object", True, "name -> version of Python, the kernel and the packages that matter"),
        "environment": Field("object", True, "variables of a fixed list of names; *** replaces passwords in URLs"),
        "argv": Field("list", True, "command line; *** replaces passwords in URLs and values of flags for secrets"),
    },
    # Where a rank stands, if that was not known when its process record was written.
    "coordinates": _TYPE | _COORDINATES | {"layout": _LAYOUT},
    # Written once the heavy imports and the engine are there: what really runs.
    "runtime": _TYPE
    | {
        "engine_used": Field("str", False, "class name of the checkpoint engine, or function that saves"),
        "step_source": Field("str", False, "who numbers the steps: see STEP_SOURCES; absent: no step was seen"),
        "engine_asked": Field("str", False, "value of --checkpoint-engine"),
        "optimizer": Field("str", False, "class name of the inner optimizer that runs"),
        "accelerator": Field("str", False, "device name, such as cpu or cuda"),
        "backend": Field("str", False, "torch.distributed backend"),
        "parameters": Field("int", False, "number of parameters held by this rank, or with ZeRO-3 shared by several"),
        "compiled_graphs": Field("int", False, "graphs of --torch-compile that this start has compiled"),
        "cached_graphs": Field("int", False, "graphs of --torch-compile that torch's cache had"),
        "save_dir": Field("str", False, "checkpoint directory"),
        "save_mount": Field("str", False, "file system of the checkpoint directory, as mount(8) lists it"),
        "load_dir": Field("str", False, "directory that checkpoints are loaded from"),
        "load_mount": Field("str", False, "file system of that directory"),
    },
    "operation_begin": _TYPE
    | {
        "operation": Field("str", True, "save, load or startup"),
        "op": Field("int", True, "number of the operation within this process, from 0"),
        "tag": _TAG,
        "step": _STEP,
        "engine": _ENGINE,
        "inferred": Field("bool", False, "true: single calls, as torch.save, that no library said to be one operation"),
        "weights_only": Field("bool", False, "true: a save of weights, which is no checkpoint that a training resumes"),
        "ranks": Field("int", False, "number of ranks that take part in it, where the library says so"),
        "start_ns": Field("int", True, "monotonic, ns"),
    },
    # What becomes known of an operation while it runs.
    "operation_label": _TYPE
    | {
        "op": Field("int", True, "number of the operation"),
        "tag": _TAG,
        "step": _STEP,
        "engine": _ENGINE,
        "tier": Field("str", False, "where a load reads from now on, if saves are kept in memory, too: see TIERS"),
    },
    SPAN: {
        "op": Field("int", True, "number of the operation"),
        "phase": Field("str", True, "see PHASES"),
        "detail": Field("str", False, "there if and only if the phase has details: see PHASES"),
        "file": Field("str", False, "file name relative to the directory of the checkpoint's tag"),
        "bytes": Field("int", False, "bytes that this span moved, counted where they were moved"),
        "start_ns": Field("int", True, "monotonic, ns"),
        "end_ns": Field("int", True, "not before start_ns"),
        "duration_ns": Field("int", False, "time spent in this phase, ns, if less than end_ns - start_ns"),
        "thread": Field("str", False, "thread name, if not MAIN_THREAD"),
        "blocking": Field("bool", False, "false if the training thread did not wait for it"),
        "error": Field("str", False, "exception that ended the span"),
        "batches": Field("int", False, "of data_skip: batches that were requested and not trained on"),
    },
    "operation_end": _TYPE
    | {
        "op": Field("int", True, "number of the operation"),
        "end_ns": Field("int", True, "monotonic, ns"),
        "outcome": Field("str", True, "ok or failed"),
        "bytes": Field("int", False, "state that this rank wrote or read; spans of a load may have moved more"),
        "num_files": Field("int", False, "files this rank wrote or read"),
        "durable": Field("bool", False, "whether every file was fsynced before the end"),
        "error": Field("str", False, "why it failed"),
    },
    # One per training iteration.
    "iteration": _TYPE
    | {
        "step": Field("int", True, "iteration number, from 1"),
        "start_ns": Field("int", True, "monotonic, ns"),
        "end_ns": Field("int", True, "monotonic, ns"),
        "loss": Field("float", False, "training loss, mean over the global batch; absent if not finite"),
    },
    # A moment: what a supervisor saw, a notice of the trainer, or the end of a process.
    "event": _TYPE
    | {
        "operation": Field("str", True, "failure, process, save, load or startup"),
        "phase": Field("str", True, "see PHASES, or the name of a notice"),
        "detail": Field("str", False, "kind of fault, text of a notice, or error that ended a process"),
        "step": Field("int", False, "training iteration"),
        "cycle": Field("int", False, "launch that failed; only of a supervisor, which may report on several"),
        "time_ns": Field("int", True, "when it happened, monotonic, ns, also if it was learnt later"),
        "wall_ns": Field("int", True, "Unix time, ns"),
    },
    # Samples at the boundaries of operations.
    "probe": _TYPE
    | {
        "op": Field("int", True, "number of the operation sampled"),
        "at": Field("str", True, "start or end"),
        "time_ns": Field("int", True, "monotonic, ns"),
        "values": Field("object", True, "name -> number; the unit ends the name; absent: not available"),
    },
    # Samples every so many seconds, on request.
    "sample": _TYPE
    | {
        "time_ns": Field("int", True, "monotonic, ns"),
        "values": Field("object", True, "name -> number; the unit ends the name; absent: not available"),
    },
}

_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "object": (dict,),
    "list": (list,),
}
# Where a load takes its bytes from: the directory of --load, memory of the same host that outlives the ranks, or memory
# of another host.
TIERS = (STORAGE, LOCAL_MEMORY, PEER) = ("storage", "local_memory", "peer")
# Who numbers the steps of a job that hooks trace: an engine, a trainer, the program itself, the optimizer's state; or
# they are counted from 1 in each process, which says nothing of the steps of earlier cycles.
STEP_SOURCES = (ENGINE, TRAINER, PROGRAM, OPTIMIZER, COUNT) = ("engine", "trainer", "program", "optimizer", "count")
# Fields whose text is one of a few words, whatever the record.
WORDS: dict[str, tuple[str, ...]] = {
    "operation": tuple(PHASES),
    "role": ("rank", "supervisor"),
    "instrument": ("trainer", "hooks"),
    "outcome": ("ok", "failed"),
    "at": ("start", "end"),
    "tier": TIERS,
    "step_source": STEP_SOURCES,
}
# JSON type of what an object or a list holds.
_ELEMENTS = {"layout": "int", "versions": "str", "environment": "str", "argv": "str", "values": "float"}
# Names of fields without the bound -> what they are at most; -1 where a supervisor has no number.
_MOST = {"cycle": 100_000} | dict.fromkeys(("rank", *AXES), 10_000_000)
_NEGATIVE = {"rank", "tp", "pp", "dp"}


@functools.cache
def int_range(name: str) -> tuple[int, int]:
    """What an int field may be, both ends included.

    Times are at most 2^61 ns (73 years of uptime) and Unix times 2^62 ns (the year 2116), so that sums of both stay
    within 64 bits; amounts are what a JSON number holds exactly.
    """
    low = -1 if name in _NEGATIVE else 0
    if name.endswith("_ns"):
        return low, 1 << (62 if name == "wall_ns" else 61)
    return low, _MOST.get(name, 1 << 53)


def type_of(record: dict[str, Any]) -> Any:
    """The type of a decoded record: what its `type` says, which may be none of RECORD_FIELDS."""
    return record.get("type", SPAN)


def check_record(record: dict[str, Any]) -> list[str]:
    """Return what is wrong with one decoded record by itself: an empty list if nothing is."""
    record_type = type_of(record)
    fields = RECORD_FIELDS.get(record_type) if isinstance(record_type, str) else None
    if fields is None:
        return [f"unknown record type {record_type!r}"]
    problems = []
    if not _required(record_type) <= record.keys():
        problems = [f"missing field {name}" for name, f in fields.items() if f.required and name not in record]
    for name, value in record.items():
        field = fields.get(name)
        fault = f"unknown field {name}" if field is None else _check_value(name, field.json_type, value)
        if fault is not None:
            problems.append(fault)
    if problems:
        return problems
    if "start_ns" in record and "end_ns" in record:
        problems += _check_times(record)
    return problems


@functools.cache
def _required(record_type: str) -> frozenset[str]:
    """Names of the fields that every record of the type has."""
    return frozenset(name for name, field in RECORD_FIELDS[record_type].items() if field.required)


def _check_value(name: str, json_type: str, value: Any) -> str | None:
    """What is wrong with the value of a field; None if nothing is."""
    if type(value) is str and json_type == "str" and name not in WORDS:  # most are, and need no second look
        return None
    if type(value) is int and json_type == "int":
        low, high = int_range(name)
        return None if low <= value <= high else f"field {name} is out of range: {value}"
    fault = _fault(json_type, value, name)
    if fault is None and isinstance(value, (dict, list)):
        inside = value.values() if isinstance(value, dict) else value
        element_type = _ELEMENTS[name]
        if element_type != "str" or set(map(type, inside)) - {str}:  # most are texts
            faults = [_fault(element_type, element, "") for element in inside]
            fault = next((f"holds what {found}" for found in faults if found), None)
    if fault is None and name in WORDS and value not in WORDS[name]:
        return f"unknown {name} {value!r}"
    return None if fault is None else f"field {name} {fault}"


def _fault(json_type: str, value: Any, name: str) -> str | None:
    """What is wrong with one value; None if nothing is. `name`: whose range an int must be in."""
    if not isinstance(value, _PYTHON_TYPES[json_type]) or (isinstance(value, bool) and json_type in ("int", "float")):
        return f"is not {json_type}: {value!r}"
    if json_type == "int" and not int_range(name)[0] <= value <= int_range(name)[1]:
        return f"is out of range: {value}"
    if json_type == "float" and not abs(value) < 1e300:  # nor is NaN
        return f"is not finite: {value!r}" if isinstance(value, float) else "is out of range"
    return None


def _check_times(record: dict[str, Any]) -> list[str]:
    window = record["end_ns"] - record["start_ns"]
    if window < 0:
        return [f"ends {-window} ns before it starts"]
    if not 0 <= record.get("duration_ns", 0) <= window:
        return [f"duration_ns {record['duration_ns']} is not from 0 to end_ns - start_ns, {window}"]
    return []


def check_phase(operation: str | None, phase: str | None, detail: str | None) -> list[str]:
    """Return what is wrong with an (operation, phase, detail) triple: an empty list if nothing is."""
    phases = PHASES.get(operation or "")
    if phases is None:
        return [f"unknown operation {operation!r}"]
    if phase not in phases:
        return [f"unknown phase {phase!r} of {operation}"]
    details = phases[phase]
    if details and detail not in details:
        return [f"phase {phase} of {operation} needs one of the details {details}, got {detail!r}"]
    if not details and detail is not None:
        return [f"phase {phase} of {operation} has no details, got {detail!r}"]
    return []
