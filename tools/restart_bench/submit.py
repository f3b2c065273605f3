"""submit.sh: a preset as a job of a scheduler."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import nodes
from .drilled import check_drill
from .dry_run import Checked, checked_flags, show_needs, summarize
from .effects import check_given, check_launch, check_launcher, injects_fault, restarts_in_place
from .environment import for_assignment, for_display, for_shell_line, write_private
from .errors import SettingsError
from .interpreter import exit_status_told
from .launcher_entries import BY_SLURM, IN_PLACE
from .launchers.launch import launcher_of
from .modes import check_work_dir
from .nodes import Hosts
from .places import ROOT, working_directory
from .presets import Preset, preset_named, scripted_names, start_of
from .run import Run, Start, settle
from .schedulers import COMMANDS, SCHEDULERS, SHUTDOWN_TIMEOUT_VARIABLE, SIGNALLED_BEFORE_END_S, Resources, Scheduler
from .settings import CARRIED, REFUSED, names, whole_number

_SAVE_AT_END = "--exit-signal-handler"
_ALONE = ("replay", "scaled")  # modes that start their processes themselves, on one node
_UNKNOWN_HOST = "of_the_job"


@dataclass(frozen=True)
class CommandLine:
    """`scheduler`: None: run the preset now. `options`: of its command."""

    preset: Preset
    scheduler: Scheduler | None
    nodes: int | None
    time: str
    options: Sequence[str]


@dataclass(frozen=True)
class Job:
    """`settings`: NAME=VALUE that the job's script exports. `nodes` of the job, with `tasks` on each."""

    run: Run
    asked: CommandLine
    scheduler: Scheduler
    nodes: int
    tasks: int
    settings: Sequence[str]
    drills: bool

    @property
    def file(self) -> Path:
        return self.run.work_dir / f"job.{self.scheduler.name}"


def submit(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    run_now: Callable[[Preset, Sequence[str], Mapping[str, str]], int],
) -> int:
    """Write the job and hand it over, or print both; returns the exit status. `run_now`: runs the preset here."""
    asked = parse(arguments, environ)
    if asked.scheduler is None:
        return run_now(asked.preset, (), environ)
    job = job_of(asked, asked.scheduler, environ)
    run = job.run
    checked = None if run.mode == "replay" else _checked(job)
    command = [*job.scheduler.command, *asked.options, str(job.file)]
    if run.given.dry_run:
        print("\n".join(script_of(job, for_display([*run.user_env, *job.settings]))))
        print(for_shell_line(command))
        if checked is not None:
            show_needs(*checked)
        return 0
    check_work_dir(run)
    if run.given.image:
        _write_image_python(run)
    write_private(job.file, "\n".join(script_of(job, [*run.user_env, *job.settings])) + "\n")
    return _hand_over(command, job, environ)


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """The command line. Raises SettingsError."""
    words, given = list(arguments), {"--scheduler": "", "--nodes": "", "--time": "4:00:00"}
    name, options = "", []
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if word == "--":
            options, words = words, []
        elif option in given:
            if not equals and not words:
                raise SettingsError(f"{option}: give its value; see --help")
            given[option] = value if equals else words.pop(0)
        elif word.startswith("-"):
            raise SettingsError(f"{word}: unknown option; options of {COMMANDS} come after --")
        elif name:
            word, name = word.partition("=")[0], name.partition("=")[0]  # a value may be a secret
            raise SettingsError(f"{word}: a job runs one preset, and {name} is already given")
        else:
            name = word
    known = " ".join(scripted_names())
    if not name:
        raise SettingsError(f"PRESET is missing; give one of {known}")
    preset = preset_named(name)
    if preset is None:
        name = name.partition("=")[0]  # a value may be a secret
        raise SettingsError(f"PRESET {name}: there is no such preset; give one of {known}, or MODEL_tpT_ppP")
    if given["--nodes"] and whole_number(given["--nodes"]) is not None:
        raise SettingsError(f"--nodes {given['--nodes']}: give a whole number, at least 1")
    if not re.fullmatch("[0-9]+:[0-5][0-9]:[0-5][0-9]", given["--time"]):
        raise SettingsError(f"--time {given['--time']}: give hours, minutes and seconds, as 4:00:00")
    scheduler = _scheduler(given["--scheduler"], environ)
    if scheduler is None and options:
        raise SettingsError(f"{' '.join(options)}: --scheduler none submits nothing; leave out -- and what follows it")
    if scheduler is None and given["--nodes"]:
        raise SettingsError(
            f"--nodes {given['--nodes']}: --scheduler none has no job; name the nodes in HOSTFILE, or leave it out"
        )
    for name in names(job=REFUSED):
        if scheduler is not None and environ.get(name):
            raise SettingsError(f"{name}={environ[name]}: {scheduler.name} assigns the job's nodes; leave it out")
    return CommandLine(preset, scheduler, int(given["--nodes"]) if given["--nodes"] else None, given["--time"], options)


def _scheduler(name: str, environ: Mapping[str, str]) -> Scheduler | None:
    """The scheduler of this name; "": the one whose command is on PATH. None: none."""
    path = environ.get("PATH")
    there = [each for each in SCHEDULERS.values() if shutil.which(each.command[0], path=path)]
    if not name and not there:
        raise SettingsError(
            f"no scheduler's command is on PATH ({COMMANDS}); give --scheduler {' or '.join(SCHEDULERS)} with "
            "DRY_RUN=1 to see the job, or --scheduler none to run the preset here"
        )
    if name == "none":
        return None
    if name not in ("", *SCHEDULERS):
        raise SettingsError(f"--scheduler {name}: use {', '.join(SCHEDULERS)} or none")
    found = SCHEDULERS[name] if name else there[0]
    if not environ.get("DRY_RUN") and found not in there:
        raise SettingsError(
            f"--scheduler {name}: {found.command[0]} is not on PATH; submit where it is, such as on a login node"
        )
    return found


def job_of(asked: CommandLine, scheduler: Scheduler, environ: Mapping[str, str]) -> Job:
    """The job of a preset. Raises SettingsError for settings that no job can have."""
    of_a_job = {each.job_id for each in SCHEDULERS.values()}
    inherited = {name: value for name, value in environ.items() if name not in of_a_job}
    start = Start(asked.preset, inherited)
    check_given(environ, start.given, as_job=True)
    given, mode, drills = start.given, start.given.mode, injects_fault(start.given)
    defaults = {"MODE": mode, **asked.preset.defaults}
    carried = {
        name: environ.get(name) or defaults.get(name, "")
        for name in names(job=CARRIED)
        if name in environ or name in defaults
    }
    signalled = scheduler.signals and mode in ("train", "restart") and not drills
    if signalled and _SAVE_AT_END not in given.extra_args.split():
        # The ranks are signalled before the time limit, and without this flag they would end without a save.
        given = replace(given, extra_args=f"{given.extra_args} {_SAVE_AT_END}".strip())
        carried["EXTRA_ARGS"] = given.extra_args
    launcher = _launcher(scheduler, given.launcher, mode)
    # The address of rank 0, and hosts that a file lists, among which SPARES are, are known only in the job.
    known = replace(
        given,
        launcher=launcher,
        master_addr=given.master_addr or _UNKNOWN_HOST,
        spares="" if scheduler.host_file else given.spares,
    )
    run = replace(settle(start, known), given=replace(given, launcher=launcher))
    run, count, tasks = _placed(run, asked)
    run = replace(run, work_dir=run.work_dir.absolute())
    if re.search(r"\s", str(run.work_dir)):
        raise SettingsError(
            f"WORK_DIR={run.work_dir}: {scheduler.name} does not accept a path with white space; use another"
        )
    settings = [f"{name}={value}" for name, value in carried.items()]
    settings += [f"LAUNCHER={run.launcher}"] if launcher else []
    settings.append(f"DEVICE={run.device}")
    own_signal = any(option.startswith("--signal") for option in asked.options)
    if signalled and not own_signal and not environ.get(SHUTDOWN_TIMEOUT_VARIABLE):
        settings.append(f"{SHUTDOWN_TIMEOUT_VARIABLE}={SIGNALLED_BEFORE_END_S}")  # srun's ranks are killed at the limit
    settings += [f"GPUS_PER_NODE={run.nodes.gpus_per_node}"] if mode != "replay" else []
    image = given.image
    if image:
        if "://" not in image and not Path(image).is_file():
            raise SettingsError(f"IMAGE={image}: there is no such file")
        # The presets take a single word as interpreter.
        settings += [f"PYTHON={_image_python(run)}", "SKIP_SETUP=1"]
    return Job(run, asked, scheduler, count, tasks, settings, drills)


def _launcher(scheduler: Scheduler, given: str, mode: str) -> str:
    """LAUNCHER in the job; "": its default."""
    if mode == "scaled" and given in BY_SLURM:
        raise SettingsError(f"LAUNCHER={given}: MODE=scaled starts its ranks itself, on one node; leave it out")
    if mode in _ALONE:
        return given
    if scheduler.host_file:
        if given in BY_SLURM:
            raise SettingsError(f"LAUNCHER={given}: is Slurm's, and this is a {scheduler.title} job; leave it out")
        return given
    if given not in ("", *BY_SLURM):
        raise SettingsError(
            f"LAUNCHER={given}: in a Slurm job srun starts the ranks; leave it out, or start the preset's script "
            "within an allocation: docs/cluster.md, 'megatron.launch in an allocation'"
        )
    return given or BY_SLURM[0]


def _placed(run: Run, asked: CommandLine) -> tuple[Run, int, int]:
    """(the run with the ranks per node that --nodes gives, nodes of the job, tasks of a node)."""
    if run.mode in _ALONE:
        if asked.nodes not in (None, 1):
            raise SettingsError(f"--nodes {asked.nodes}: MODE={run.mode} runs on one node; leave it out")
        return run, 1, 1
    found, layout = run.nodes, run.layout
    take = f"{nodes.ranks_of(layout)} with {found.gpus_per_node} per node take {found.number} nodes"
    count = asked.nodes or found.number
    if count < found.number:
        raise SettingsError(
            f"--nodes {count}: {take}; give --nodes {found.number}, or GPUS_PER_NODE={-(-layout.world_size // count)} "
            "if a node has that many"
        )
    spares = run.launcher in IN_PLACE and restarts_in_place(run.given)
    if count > found.number and not spares:
        if run.given.gpus_per_node or layout.world_size % count:
            raise SettingsError(
                f"--nodes {count}: {take}, and the others would idle; give --nodes {found.number}, or GPUS_PER_NODE"
            )
        found = replace(found, number=count, gpus_per_node=layout.world_size // count)
        run = replace(run, nodes=found)
    nodes.check_nodes(run.given, found, layout)
    if run.mode != "train" and run.given.kill_at != "none" and not launcher_of(run).starts_all(run):
        raise SettingsError(
            f"MODE={run.mode}: {found.number} nodes take a command each with LAUNCHER={run.launcher}; use MODE=train, "
            "or one node"
        )
    return run, count, found.gpus_per_node


def _checked(job: Job) -> tuple[Run, Checked, str | None]:
    """What the preset's script will check in the job, as far as that needs no node of it, and what DRY_RUN lacks."""
    run = job.run
    if job.scheduler.host_file:  # the script will run on the first of the job's hosts
        names_ = [os.uname().nodename, *(f"host_{node}_of_the_job" for node in range(1, job.nodes))]
        slots = (run.nodes.gpus_per_node,) * job.nodes
        hosts = Hosts(tuple(names_), slots, f"--nodes {job.nodes}")
        check_launcher(run.given, run.launcher)
        spares = nodes.spares_of(run.given, hosts, run.launcher, run.nodes.number)
        run = replace(run, nodes=replace(run.nodes, hosts=hosts, spares=spares))
    check_launch(run.given, run.launcher, run.engine, run.device, run.nodes)
    if job.drills:
        check_drill(run)
    checked = checked_flags(run)
    return run, checked, summarize(run, checked) if run.given.dry_run else None


def _image_python(run: Run) -> Path:
    return run.work_dir / "python_in_image"


def _write_image_python(run: Run) -> None:
    """A script that runs the image's Python."""
    bound = [str(ROOT), str(run.work_dir)]
    if not run.saves_to_store:
        Path(run.save_dir).mkdir(parents=True, exist_ok=True)  # bind mounts need existing directories
        bound.append(run.save_dir)
    binds = " ".join(f"--bind {shlex.quote(place)}" for place in bound)
    file = _image_python(run)
    file.write_text(
        f'#!/usr/bin/env bash\nexec apptainer exec --nv {binds} {shlex.quote(run.given.image)} python "$@"\n'
    )
    file.chmod(file.stat().st_mode | 0o111)


def script_of(job: Job, variables: Sequence[str]) -> list[str]:
    """Lines of the job script, which exports these variables."""
    run, asked = job.run, job.asked
    gpus = run.device != "cpu"
    resources = Resources(asked.preset.name, job.nodes, job.tasks, gpus, asked.time, run.work_dir)
    lines = ["#!/usr/bin/env bash", *job.scheduler.directives(resources)]
    lines.append(f"# MODE={run.mode} of {asked.preset.name}: {nodes.ranks_of(run.layout)}. Written by submit.sh.")
    lines.append(f"cd {shlex.quote(working_directory())}")
    lines += [f"export {for_assignment(variable)}" for variable in variables]
    if run.given.image:
        lines.append("unset IMAGE")  # PYTHON already names it, and sbatch passes this environment on
    # The script finds a Python there: that of this machine may be missing on the nodes.
    return [*lines, f"exec {for_shell_line(start_of(asked.preset))}"]


def _hand_over(command: list[str], job: Job, environ: Mapping[str, str]) -> int:
    """Print the job's number. With --wait the exit status of sbatch is that of the job."""
    number = job.file.with_name(f"{job.file.name}.id")  # there as soon as the scheduler tells it, also with --wait
    with open(number, "w") as told:
        done = subprocess.run(command, env=dict(environ), stdout=told, stderr=subprocess.PIPE, text=True)
    if not number.stat().st_size:
        number.unlink()
        last = done.stderr.strip().rpartition("\n")[2]
        raise SettingsError(f"{command[0]} refused {job.file}: {last}")
    sys.stderr.write(done.stderr)
    print(number.read_text(), end="", flush=True)
    job.run.say(f"submitted {job.file}; its output goes to {job.run.work_dir}. {_results(job)}")
    return exit_status_told(done.returncode, command[0])


def _results(job: Job) -> str:
    """Where the results will be."""
    run = job.run
    if job.drills or run.mode == "replay":
        directory = run.run_directory("DATE")
        return (
            f"Afterwards {directory} has the report (ckpt_report.html, report.txt) and the trace; DATE: when the job "
            "started"
        )
    return f"Afterwards: {run.interpreter.path} -m megatron_restart_tools.ckpt_analysis {run.trace_dir}"
