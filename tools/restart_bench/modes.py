"""What is done with a preset: it is trained, or its checkpoints are replayed. drilled.py kills and resumes it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import data, hosts, nodes, slurm
from .dry_run import check_single_command, show_training
from .effects import check_given, check_launch
from .environment import for_shell_line
from .errors import LaunchEnded, SettingsError
from .interpreter import exit_status_told, tool_runner
from .launcher_entries import BY_SLURM, FREE_PORT
from .launchers.launch import Launch, launch_of, launcher_of
from .places import PACKAGE, PROGRAM
from .presets import Preset
from .run import Run, Start, settle
from .training import Recomputation, check_run, recomputation, training_flags

SCALED_RANK_MIB = 180  # of a forked rank on CPUs, measured: 10.7 GB with 64


def train(start: Start, flags: Sequence[str] | None = None) -> int:
    """Start all ranks, or print or write the command that does. Returns the exit status, or replaces this process.

    `flags`: of pretrain_gpt.py, in place of the preset's. With these a drill launches the command that command_for
    gave it: it has checked them, and measures the time of this launch.
    """
    given, run = start.given, None
    try:
        run = _settled(start)
        if given.dry_run:
            return show_training(run, flags)
        if given.command_to:
            _write_command(Path(given.command_to), _command(run))
            return 0
        launch = _ready(run, flags)
    except hosts.HostsDifferError:
        raise
    except Exception as error:  # whatever it is: the other nodes wait
        if given.node_rank and not given.dry_run and not given.command_to:
            hosts.tell_refusal(start, run, error.reason if isinstance(error, LaunchEnded) else str(error))
        raise
    return launcher_of(run).launch(launch)


def _write_command(file: Path, words: Sequence[str]) -> None:
    try:
        file.write_bytes(b"".join(os.fsencode(word) + b"\0" for word in words))
    except OSError as error:
        raise SettingsError(f"COMMAND_TO={file}: cannot be written: {error.strerror}; name another file") from None


def command_for(preset: Preset, environ: Mapping[str, str]) -> list[str]:
    """The single command that starts all ranks, for a program that runs it repeatedly: all is prepared for it.

    `environ` has the settings. Raises SettingsError, or LaunchEnded if a program that has printed why failed.
    """
    start = for_program(preset, environ)
    check_given(start.environ, start.given)
    return _command(_settled(start))


def for_program(preset: Preset, environ: Mapping[str, str]) -> Start:
    """A start whose command another program gets, as with COMMAND_TO."""
    return Start(preset, {**environ, "COMMAND_TO": os.devnull})


def _settled(start: Start) -> Run:
    run = settle(start)
    check_launch(run.given, run.launcher, run.engine, run.device, run.nodes)
    return run


def _command(run: Run) -> list[str]:
    flags, _ = make_ready(run)
    check_single_command(run)
    if run.coordinates:
        # Each launch asks its hosts anew: see `flags` of train.
        return [sys.executable, "-ES", str(PACKAGE), "run", run.start.preset.name, PROGRAM, *flags]
    launch = launch_of(run, flags, with_id=False, master_port=free_port_of(run))
    return launcher_of(run).command(launch, 0)


def _ready(run: Run, flags: Sequence[str] | None) -> Launch:
    """Everything that comes before the launch."""
    given = run.given
    if flags is None:
        trained, recomputed = make_ready(run)
        check_run(run, trained)
        _tell(run, recomputed)
    else:
        trained = list(flags)
        check_devices(run)
        hosts.check_reach(run)
        check_work_dir(run)
        run.interpreter.set_up()
        run.interpreter.check_torch_build(run.device)
        make_data(run)
    chooses_port = run.launcher in FREE_PORT
    launch = launch_of(run, trained, with_id=True, master_port=free_port_of(run) if chooses_port else "")
    if given.node_rank and run.nodes.number > 1:
        hosts.meet(run)
    return launch


def make_ready(run: Run) -> tuple[list[str], Recomputation]:
    """Check devices and hosts, set up environment and data. Returns the flags of pretrain_gpt.py."""
    check_devices(run)
    if not run.interpreter.exists():  # later check_hosts reaches them, too
        hosts.check_reach(run)
    check_work_dir(run)
    run.interpreter.set_up()
    run.interpreter.check_torch_build(run.device)
    flags = training_flags(run)
    recomputed = recomputation(run, flags)  # by the environment that is there now
    hosts.check_hosts(run)
    make_data(run)
    return [*flags, *recomputed.flags()], recomputed


def make_data(run: Run) -> None:
    tool = tool_runner(run.interpreter)
    data.prepare(run.data, run.work_dir, run.iters * run.global_batch, run.seq_length, tool, run.say)


def _tell(run: Run, recomputed: Recomputation) -> None:
    if not run.saves_to_store:
        try:
            Path(run.save_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"SAVE_DIR={run.save_dir}: cannot be created: {error.strerror}; set another") from None
        latest = Path(run.save_dir) / "latest"
        if latest.exists():
            run.say(f"resuming from {latest.read_text().strip()} in {run.save_dir}")
    run.say(str(recomputed))
    run.say(f"training {run.iters} iterations on {nodes.ranks_of(run.layout)}, saving to {run.save_dir}")
    unused = nodes.unused_hosts(run.nodes)
    if unused:
        run.say(unused)
    run.say(f"afterwards: {run.interpreter.path} -m megatron_restart_tools.ckpt_analysis {run.trace_dir}")


def check_devices(run: Run) -> None:
    """Refuse too few devices, nodes or memory, before anything expensive is done."""
    given, launcher, allocated = run.given, run.launcher, bool(run.environ.get("SLURM_JOB_ID"))
    if launcher in BY_SLURM and not allocated and not given.command_to:
        raise slurm.no_allocation()
    if run.device != "cpu" and launcher not in BY_SLURM:
        nodes.check_gpus(run.environ, run.nodes, run.layout, run.start.command)
    nodes.check_nodes(given, run.nodes, run.layout)
    nodes.check_node_rank(given, run.nodes, launcher)
    if launcher in BY_SLURM and allocated:
        slurm.check_allocation(
            run.environ, nodes.ranks_of(run.layout), run.nodes.number, run.nodes.gpus_per_node, run.device
        )
    elif run.nodes.hosts.names:
        nodes.check_slots(run.nodes, run.layout)
    if run.mode == "scaled":
        _check_memory(run)


def _check_memory(run: Run) -> None:
    """Refuse more scaled ranks than fit into free memory. If the kernel does not report that, none are refused."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return
    available = [int(line.split()[1]) // 1024 for line in lines if line.startswith("MemAvailable:")]
    needed = run.layout.world_size * SCALED_RANK_MIB
    if available and needed > available[0]:
        raise SettingsError(
            f"MODE=scaled: {nodes.ranks_of(run.layout)} take about {needed} MiB, and {available[0]} MiB of memory are "
            f"free.{nodes.advise_largest(available[0] // SCALED_RANK_MIB)}"
        )


def check_work_dir(run: Run) -> None:
    if not _writable(run.work_dir):
        raise SettingsError(f"WORK_DIR={run.work_dir}: cannot be written to; set another")


def _writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK)


def free_port_of(run: Run) -> str:
    """Several trainings may run on this node: each gets its own port. "" where the ranks are on other hosts."""
    if run.given.master_port or run.nodes.number > 1 or run.over_hosts:
        return ""
    import socket  # a launch that needs no port does not wait for it

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


def replay(start: Start) -> int:
    """The real engines save and load this layout's checkpoints, with as many ranks and bytes as this machine holds."""
    given, run = start.given, settle(start)
    directory = run.run_directory(time.strftime("%Y%m%d-%H%M%S"))
    ranks = given.ranks or f"0-{min(len(os.sched_getaffinity(0)), run.layout.world_size) - 1}"
    layout, model = run.layout, start.preset.model
    words = [
        "--model", model, "--tp", str(layout.tp), "--pp", str(layout.pp), "--dp", str(layout.dp), "--ranks", ranks,
        "--engine", given.engine or "all",
        # The capacity of a bucket is unknown.
        "--limit-bytes", given.limit_bytes or ("1GiB" if run.saves_to_store else "fit"),
        "--repeat", given.repeat or "4",
        *(["--steps-between", given.steps_between] if given.steps_between else []),
        *(["--vocab-size", given.vocab_size] if given.vocab_size else []),
        "--dir", run.save_dir, "--trace-dir", str(directory / "trace"), "--output", str(directory / "replay.json"),
    ]  # fmt: skip
    if given.dry_run:
        print(for_shell_line([*run.interpreter.module("ckpt_replay"), *words]))
        return 0
    check_work_dir(run)
    run.interpreter.set_up()
    directory.mkdir(parents=True, exist_ok=True)
    if not run.saves_to_store and not _writable(Path(run.save_dir)):  # ckpt_replay checks object storage itself
        raise SettingsError(f"SAVE_DIR={run.save_dir}: cannot be written to; set another")
    where = f"TP{layout.tp} x PP{layout.pp} x DP{layout.dp}"
    run.say(f"replaying --ranks {ranks} of {where} into {run.save_dir}")
    own = f"Replay: ranks {ranks} of {model} on {where}, synthetic state; no training."
    label = {"RESTART_TRACE_LABEL": run.label or own}
    status = shown_and_kept(run, directory / "replay.txt", "ckpt_replay", words, label)
    if status > 1:
        raise LaunchEnded(2)  # it has printed the reason
    with open(directory / "report.txt", "w") as report:
        words = [str(directory / "trace"), "--output", str(directory)]
        if run.interpreter.run("ckpt_analysis", *words, stdout=report).returncode != 0:
            raise SettingsError(f"the analysis of {directory}/trace could not run")
    run.say(f"left in {directory}: replay.txt and .json, ckpt_report.html and report.txt, trace")
    return status


def shown_and_kept(
    run: Run, file: Path, module: str, words: Sequence[str], environ: Mapping[str, str] | None = None
) -> int:
    """Run a tool whose output is shown and also written to a file; returns its exit status."""
    sys.stdout.flush()
    env = run.interpreter.environment() | dict(environ or {})
    command = [*run.interpreter.module(module), *words]
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "wb") as kept, subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as tool:
        assert tool.stdout is not None
        for line in tool.stdout:
            kept.write(line)
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
    return exit_status_told(tool.returncode, module)
