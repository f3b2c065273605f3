"""The settings of the launch scripts: environment variables, each declared here and nowhere else.

The check of their values, `--help`, what a job gets and what a sweep refuses come from these declarations.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.fileio.objects.stores import STORES

from .errors import SettingsError
from .launcher_entries import LAUNCHERS, ON_EACH_NODE

Check = Callable[[str], str | None]  # value -> None, or what to give instead

# Where a setting has an effect
RUN, TRAINING, LAUNCH, COORDINATOR, FAULT, REPLAY, DRY_RUN, SET_UP = range(8)
# What submit.sh does with a setting: writes it into the job; refuses it, since the job decides it; or decides by itself
CARRIED, REFUSED, SETTLED = range(3)
_OF_STORES = ", ".join(f"`{name}*`" for store in STORES.values() for name in store.variables)


@dataclass(frozen=True)
class Declaration:
    """A setting. `meaning` and `default` are Markdown, with links as in docs/.

    `instead`: what sets it in a sweep, an option or a key of the file; "": a sweep refuses it; None: a sweep takes it
    from the environment.
    """

    name: str
    meaning: str
    default: str
    of: int
    check: Check
    job: int
    instead: str | None


def _anything(value: str) -> str | None:
    return None


def _matches(pattern: str, advice: str) -> Check:
    return lambda value: None if re.fullmatch(pattern, value) else advice


def _one_of(*values: str) -> Check:
    return lambda value: None if value in values else f"use {', '.join(values[:-1])} or {values[-1]}"


def _port(value: str) -> str | None:
    if re.fullmatch(r"[1-9]\d{0,4}", value) and int(value) <= 65535:
        return None
    return "give the number of a port, 1 to 65535"


def _heartbeat(value: str) -> str | None:
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value) and float(value) >= 0.1:
        return None
    return "give seconds, as 2 or 0.5, at least 0.1"


whole_number = _matches(r"[1-9][0-9]*", "give a whole number, at least 1")
_MODES = ("train", "restart", "replay", "scaled")
_LAUNCHERS = [entry.meaning for entry in LAUNCHERS.values()]


def setting(
    meaning: str,
    default: str = "",
    *,
    of: int = RUN,
    check: Check = _anything,
    job: int = CARRIED,
    instead: str | None = None,
) -> Any:
    """Declare a setting: a field of Settings, whose name in the environment is that of the field in capital letters."""
    return dataclasses.field(
        default="",
        metadata={"meaning": meaning, "default": default, "of": of, "check": check, "job": job, "instead": instead},
    )


@dataclass(frozen=True)
class Settings:
    """What the user has set, as text; "" is not set."""

    mode: str = setting(
        "`train`; `restart`: train, kill, resume and analyse; [without the GPUs of the layout](#without-the-gpus) "
        "`replay` or `scaled`",
        "`train` (tiny: `restart`)",
        check=_one_of(*_MODES),
        instead="mode",
    )
    engine: str = setting(
        "checkpoint engine, see [engines.md](engines.md)", "`torch` (replay: `all`)", instead="engines"
    )
    save_dir: str = setting(
        "directory of the checkpoints; the run resumes from the newest one in it",
        "`WORK_DIR/checkpoints`",
        instead="--dir",
    )
    save_interval: str = setting(
        "iterations between saves", "5 (scaled: 2)", of=TRAINING, check=whole_number, instead="save_interval"
    )
    trace_dir: str = setting(
        "directory of the restart trace; the demonstration keeps it beside its report instead",
        "`SAVE_DIR/restart_trace`",
        instead="--out",
    )
    dp: str = setting("data-parallel size", "1 (tiny: 2)", check=whole_number, instead="layouts")
    iters: str = setting(
        "iterations to train for, over all restarts. If you change it on resume, add "
        "`EXTRA_ARGS=--override-opt_param-scheduler`, since it changes the learning-rate schedule",
        "15 (tiny: 12, scaled: 4)",
        of=TRAINING,
        check=whole_number,
        instead="iterations",
    )
    micro_batch: str = setting(
        "samples in a micro batch", "16 (tiny: 2, scaled: 1)", of=TRAINING, check=whole_number, instead="micro_batch"
    )
    global_batch: str = setting(
        "samples in an iteration",
        "`MICRO_BATCH` x `DP` (tiny: twice that)",
        of=TRAINING,
        check=whole_number,
        instead="global_batch",
    )
    seq_length: str = setting(
        "tokens in a sample", "2048 (tiny: 128, scaled: 32)", of=TRAINING, check=whole_number, instead="seq_length"
    )
    sequence_parallel: str = setting(
        "1: `--sequence-parallel`; 0: without", "0 (70b: 1)", of=TRAINING, check=_one_of("1", "0")
    )
    dtype: str = setting(
        "dtype of the weights while training: `bf16`, `fp16` or `fp32`",
        "`bf16`",
        of=TRAINING,
        check=_one_of("bf16", "fp16", "fp32"),
        instead="",
    )
    recompute: str = setting(
        "activations that the backward pass recomputes: `none`, `selective` (`--recompute-granularity selective`), "
        "`full` (`--checkpoint-activations` through DeepSpeed), or `auto`: the first of these that fits into 80 % of a "
        "device by [ckpt_plan's estimate](ckpt_plan.md#which-activations-to-recompute); `none` on CPUs, and what "
        "`EXTRA_ARGS` says if it does. Without an interpreter to estimate with, `auto` is `full`. The script says what "
        "it chose and why. The published study trained with `full`",
        "`auto`",
        of=TRAINING,
        check=_one_of("auto", "none", "selective", "full"),
    )
    device_gb: str = setting(
        "with `RECOMPUTE=auto` on GPUs: memory of a device in GB", "80", of=TRAINING, check=whole_number
    )
    data_path: str = setting(
        "dataset prefix, or weights and prefixes", "random tokens (tiny: Python's sources)", of=TRAINING
    )
    tokenizer_type: str = setting(
        "with `DATA_PATH`: `--tokenizer-type`",
        "that of `TOKENIZER_MODEL` or `VOCAB_FILE`; without these the null tokenizer of 50257 ids",
        of=TRAINING,
    )
    tokenizer_model: str = setting("with `DATA_PATH`: the model of a SentencePiece tokenizer", of=TRAINING)
    vocab_file: str = setting("with `DATA_PATH`: the vocabulary of a GPT-2 tokenizer", of=TRAINING)
    merge_file: str = setting("with `DATA_PATH`: the merges of a GPT-2 tokenizer", of=TRAINING)
    vocab_size: str = setting("size of the vocabulary: `--vocab-size`", "that of the tokenizer", instead="vocab_size")
    extra_args: str = setting("more flags of `pretrain_gpt.py`, split at white space", of=TRAINING, instead="flags")
    work_dir: str = setting(
        "directory for data and checkpoints",
        "`runs/NAME`, as `runs/7b_tp4_pp2_dp1` (tiny: `runs/tiny`, scaled: `runs/scaled_NAME`)",
        instead="--out",
    )
    launcher: str = setting(
        ", or ".join((", ".join(_LAUNCHERS[:-1]), _LAUNCHERS[-1])),
        "`torchrun` (scaled: `fork`)",
        of=LAUNCH,
        check=_one_of(*LAUNCHERS),
        job=SETTLED,
    )
    hostfile: str = setting(
        "file with lines `HOST slots=N`; the script reaches the other nodes through ssh, and names hosts that it does "
        "not use",
        "within a PBS job the hosts of `PBS_NODEFILE`, otherwise this node",
        of=LAUNCH,
        job=REFUSED,
    )
    max_restarts: str = setting(
        "with `LAUNCHER=fork`: number of restarts in place, without imports; over `HOSTFILE` also after "
        "[the loss of a node](launch.md#several-nodes)",
        "0",
        of=LAUNCH,
        check=_matches("0|[1-9][0-9]*", "give a whole number"),
        instead="",
    )
    spares: str = setting(
        "with `MAX_RESTARTS` over `HOSTFILE`: number of hosts, beyond those that the layout needs, that wait to "
        "replace a lost one",
        "all of them",
        of=LAUNCH,
        check=_matches("0|[1-9][0-9]*", "must be a whole number"),
    )
    standby: str = setting(
        "with `MAX_RESTARTS` on one node, without CUDA: `1` [sets ranks up ahead of a "
        "failure](launch.md#standby-ranks), `load` also loads each checkpoint ahead",
        of=LAUNCH,
        check=_matches("1|load", "use 1 or load, or leave it out"),
    )
    in_process_restart: str = setting(
        "with `MAX_RESTARTS`, without CUDA: 1: [ranks that live after a failure start again in their "
        "processes](launch.md#in-process-restarts)",
        of=LAUNCH,
        check=_matches("1", "use 1, or leave it out"),
    )
    allow_shrink: str = setting(
        "with `MAX_RESTARTS` over `HOSTFILE`: 1: if a node is lost and no spare is left, continue with fewer nodes",
        of=COORDINATOR,
        check=_matches("1", "use 1, or leave it out"),
    )
    heartbeat_timeout: str = setting(
        "with `MAX_RESTARTS` over `HOSTFILE`: seconds without a heartbeat until a node counts as lost, at least 0.1",
        "2",
        of=COORDINATOR,
        check=_heartbeat,
    )
    coordinator_addr: str = setting(
        "with `MAX_RESTARTS` over `HOSTFILE`: address at which the nodes reach the host where the script runs, and "
        "[where it listens](security.md#what-it-protects)",
        "its host name",
        of=COORDINATOR,
    )
    coordinator_port: str = setting(
        "with `MAX_RESTARTS` over `HOSTFILE`: port at which the nodes reach the host where the script runs",
        "a free port",
        of=COORDINATOR,
        check=_port,
    )
    megatron_launch_secret: str = setting(
        "[the secret of the launch](security.md); the same on all nodes if the script is started on each with "
        "`NODE_RANK`",
        "over `HOSTFILE` and with srun a random one for each launch; none with DeepSpeed's launcher",
        job=SETTLED,  # carried with the variables that every rank gets
    )
    host_grace: str = setting(
        "with `LAUNCHER=deepspeed` over `HOSTFILE`: when the launch has ended on one host, end it on the others after "
        "this many seconds. pdsh does not do that",
        "30",
        of=LAUNCH,
        check=_matches("[0-9]+", "give whole seconds"),
    )
    export: str = setting(
        "names of further variables for the ranks on all nodes of `HOSTFILE`. Always exported: `NCCL_*`, `GLOO_*`, "
        "`FI_*`, `UCX_*`, `OMP_*`, `CUDA_*`, `TORCH_*`, `HF_*`, `MEGATRON_TLS_*` ([TLS](security.md#tls)), "
        f"{_OF_STORES} (except those that a cloud sets for one container or function), `LD_LIBRARY_PATH`, "
        "`PYTHONPATH`; with `LAUNCHER=deepspeed` also the content of `~/.deepspeed_env` and `./.deepspeed_env`"
    )
    nnodes: str = setting(
        "number of nodes, each with `GPUS_PER_NODE` ranks",
        "what the layout takes",
        of=LAUNCH,
        check=whole_number,
        job=REFUSED,
    )
    node_rank: str = setting(
        "without `HOSTFILE`: number of this node, from 0: start the script on every node yourself, with "
        f"{' or '.join(ON_EACH_NODE)}; "
        "[the nodes meet before ranks start](launch.md#what-is-compared-before-ranks-start)",
        of=LAUNCH,
        job=REFUSED,
    )
    master_addr: str = setting(
        "the host of rank 0, by a name or address that the other hosts can reach. Refused with `MAX_RESTARTS` over "
        "`HOSTFILE`, where rank 0 can move to another host",
        "the first host of `HOSTFILE` or of the allocation",
        of=LAUNCH,
    )
    meet_timeout: str = setting(
        "with `NODE_RANK`: seconds for which each node waits for the others",
        "600",
        of=LAUNCH,
        check=_matches("[1-9][0-9]*", "give whole seconds, at least 1"),
        job=REFUSED,
    )
    gpus_per_node: str = setting(
        "GPUs, and so ranks, per node",
        "the slots of a host of `HOSTFILE`, otherwise the visible GPUs",
        of=LAUNCH,
        check=whole_number,
        job=SETTLED,
    )
    master_port: str = setting(
        "port of the rendezvous",
        "29500, which must be free where rank 0 runs; on one node a free port",
        of=LAUNCH,
        check=_port,
    )
    device: str = setting(
        "`cuda`, or `cpu`: only with the tiny preset, `MODE=scaled` and `MODE=replay`",
        "`cuda` (tiny: `cpu` if there are too few GPUs, scaled: `cpu`)",
        check=_one_of("cuda", "cpu"),
        job=SETTLED,
    )
    dry_run: str = setting(
        "1: [check](#before-ranks-are-started), say how many ranks run where and what a checkpoint takes, print the "
        "command of the nodes (`MODE=restart` and `scaled`: of the drill), and change nothing; values of variables "
        "whose names contain TOKEN, KEY, SECRET, PASSW or CREDENTIAL, and addresses with a password, appear as `***`. "
        "plan: also print on stderr what [ckpt_plan](ckpt_plan.md#what-a-run-needs) computes: files and sizes, memory "
        "of devices and hosts, free space of `SAVE_DIR` compared with the checkpoints that the run keeps, and the "
        "storage speed that it needs",
        of=DRY_RUN,
        check=_one_of("1", "plan"),
        job=SETTLED,
        instead="--dry-run",
    )
    blocked_target: str = setting(
        "with `DRY_RUN=plan`: seconds for which a save may block training", "10", of=DRY_RUN, job=SETTLED
    )
    durable_target: str = setting(
        "with `DRY_RUN=plan`: seconds after which a save must be durable", "60", of=DRY_RUN, job=SETTLED
    )
    command_to: str = setting(
        "prepare everything, write the command to this file (each word followed by a NUL), and launch nothing",
        of=DRY_RUN,
        job=REFUSED,
        instead="",
    )
    kill_at: str = setting(
        "`MODE=restart` and `scaled`: iteration at which all ranks are killed; `none` for no fault",
        "8 (scaled: `SAVE_INTERVAL` + 1)",
        of=FAULT,
        check=lambda value: None if value == "none" else whole_number(value),
        instead="faults",
    )
    time_limit: str = setting(
        "`MODE=restart` and `scaled`: time limit of each launch, in seconds",
        "300 (scaled: 1200)",
        of=FAULT,
        instead="time_limit",
    )
    ranks: str = setting(
        "`MODE=replay`: `--ranks` of [ckpt-replay](ckpt_replay.md)",
        "the first ranks, one for each core",
        of=REPLAY,
        instead="ranks",
    )
    limit_bytes: str = setting(
        "`MODE=replay`: `--limit-bytes` of ckpt-replay",
        "`fit` (object storage: `1GiB`)",
        of=REPLAY,
        instead="limit_bytes",
    )
    repeat: str = setting("`MODE=replay`: `--repeat` of ckpt-replay", "4", of=REPLAY, instead="repeats")
    steps_between: str = setting(
        "`MODE=replay`: `--steps-between` of ckpt-replay", "2", of=REPLAY, instead="steps_between"
    )
    restart_trace_label: str = setting(
        "a caveat that every report and comparison of this run shows; with `MODE=scaled` after the differences from "
        "the preset",
        "with scaled and replay the differences from the preset",
        instead="",
    )
    image: str = setting(
        "with `submit.sh`: Apptainer image whose Python runs the ranks", "`.venv`", of=SET_UP, job=SETTLED
    )
    skip_setup: str = setting("1: run with `PYTHON`, or `.venv` as it is, without set-up", of=SET_UP)
    python: str = setting(
        "with `SKIP_SETUP`: the interpreter to train with. Otherwise `.venv` is created with it",
        "that of `.venv`, if it is there, else `python3`; "
        "for `.venv` the first of `python3.11`, `python3.12`, `python3.10` and `python3`",
        of=SET_UP,
    )
    venv_dir: str = setting("directory of the virtual environment", "`.venv`", of=SET_UP)
    extras: str = setting("extras of `setup.py` to install at set-up beside `train` and `engines`, as `s3`", of=SET_UP)
    torch_variant: str = setting("`cpu` or `cuda` build of torch at set-up", "`cuda` if a GPU answers", of=SET_UP)
    torch_version: str = setting("version of torch at set-up", "that of `constraints.txt`", of=SET_UP)
    torch_index_url: str = setting(
        "package index for the CPU build of torch", "PyTorch's, or pip's own configuration", of=SET_UP
    )

    @classmethod
    def read(cls, environ: Mapping[str, str], defaults: Mapping[str, str] | None = None) -> Settings:
        """The settings of an environment. `defaults`: of the preset's script, for what is not set."""
        values = dict(defaults or {}) | {name: value for name, value in environ.items() if value}
        return cls(**{field.name: values.get(field.name.upper(), "") for field in dataclasses.fields(cls)})

    def value(self, name: str) -> str:
        """Of the setting with this name in the environment."""
        return getattr(self, name.lower())


DECLARATIONS = {
    field.name.upper(): Declaration(field.name.upper(), **field.metadata) for field in dataclasses.fields(Settings)
}
# What a preset fixes: no settings, and refused where they are set.
FIXED = (
    "MODEL", "TP", "PP", "NUM_LAYERS", "HIDDEN_SIZE", "FFN_HIDDEN_SIZE", "NUM_ATTENTION_HEADS", "NUM_KEY_VALUE_HEADS",
)  # fmt: skip


def names(*, of: Iterable[int] = (), job: int | None = None) -> list[str]:
    """Names of the settings that have an effect there, and with which submit.sh does that; all without these."""
    where = tuple(of)
    return [
        name
        for name, declared in DECLARATIONS.items()
        if (not where or declared.of in where) and job in (None, declared.job)
    ]


def check_values(given: Settings) -> None:
    """Raise SettingsError for a value of wrong form."""
    for name, declared in DECLARATIONS.items():
        value = given.value(name)
        advice = declared.check(value) if value else None
        if advice is not None:
            raise SettingsError(f"{name}={value}: {advice}")


def check_names(environ: Mapping[str, str]) -> None:
    """Raise SettingsError for a variable that is fixed by the preset, or that can only be a misspelt setting.

    Where the setting is given, too, the other name is another program's. The value of a misspelt one may be a secret.
    """
    for name in FIXED:
        if environ.get(name):
            raise SettingsError(
                f"{name}={environ[name]}: the preset fixes it; choose another preset (run_*.sh), or leave it out"
            )
    for name in sorted(environ):
        meant = misspelt(name)
        if meant is not None and not environ.get(meant):
            raise SettingsError(f"{name}: there is no such setting; did you mean {meant}?")


def misspelt(name: str) -> str | None:
    """The setting that a variable's name misspells: by one letter in eight or more, or by its underscores or case.

    Shorter names are no evidence: RANK and NODES are one letter from a setting, and belong to other programs.
    """
    if name in DECLARATIONS or len(name) < 8:
        return None
    for known in DECLARATIONS:
        if len(known) >= 8 and (
            name.replace("_", "").upper() == known.replace("_", "") or _one_edit_apart(name, known)
        ):
            return known
    return None


def _one_edit_apart(name: str, known: str) -> bool:
    """Whether a letter was added, left out or replaced, or two neighbours were exchanged."""
    if abs(len(name) - len(known)) > 1:
        return False
    start = next((i for i, (a, b) in enumerate(zip(name, known, strict=False)) if a != b), min(len(name), len(known)))
    rest, other = name[start:], known[start:]
    return (
        rest[1:] == other
        or rest == other[1:]
        or rest[1:] == other[1:]
        or (rest[:2] == other[1::-1] and rest[2:] == other[2:])
    )


def help_text() -> str:
    """The settings for --help."""
    lines = ["Settings, from the environment or, for what it does not have, lines NAME = VALUE of --config FILE:"]
    for name, declared in DECLARATIONS.items():
        text = _plain(declared.meaning) + (f" (default: {_plain(declared.default)})" if declared.default else "")
        lines += [f"  {name}", *_wrapped(text)]
    lines += [
        "A setting that would have no effect, as MAX_RESTARTS with LAUNCHER=torchrun, is refused by name: "
        "docs/cluster.md."
    ]
    return "\n".join(lines) + "\n"


def _wrapped(text: str) -> list[str]:
    indent = " " * 6
    return textwrap.wrap(text, 110, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _plain(markdown: str) -> str:
    """Without marks; a link is its text and the document that it leads to."""
    return re.sub(r"\[([^]]*)\]\(([^)#]*)[^)]*\)", _plain_link, markdown).replace("`", "")


def _plain_link(link: re.Match[str]) -> str:
    text, page = link[1], f"docs/{link[2] or 'cluster.md'}"
    return page if text == link[2] else f"{text} ({page})"
