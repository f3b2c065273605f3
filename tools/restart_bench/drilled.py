"""MODE=restart and scaled: train, kill, resume, analyse."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from . import hosts
from .dry_run import check_shown_nodes, checked_flags, show_needs, summarize
from .effects import check_launch, restarts_in_place
from .environment import for_display, for_shell_line
from .errors import SettingsError
from .launchers.launch import Launch, launch_of, launcher_of
from .modes import check_devices, check_work_dir, free_port_of, make_data, shown_and_kept
from .places import SCRIPTS
from .run import Run, Start, settle
from .training import check_new_directory, recomputation, training_flags

_KILL_AT = 8
_TIME_LIMIT_S = "300"


def kill_and_resume(start: Start) -> int:
    """Returns 1 if the loss of an iteration that both launches trained, or a restored tensor, differs."""
    run = settle(start)
    check_launch(run.given, run.launcher, run.engine, run.device, run.nodes)
    check_drill(run)
    directory = run.run_directory(time.strftime("%Y%m%d-%H%M%S"))
    if not run.given.save_dir:
        run = replace(run, save_dir=str(directory / "checkpoints"))
    if run.given.dry_run:
        _show(run, directory)
        return 0
    check_devices(run)
    _check_one_command(run)
    check_work_dir(run)
    run.say("1/4 environment")
    run.interpreter.set_up()
    run.interpreter.check_torch_build(run.device)
    hosts.check_hosts(run)
    began = time.monotonic()
    run.say("2/4 data")
    make_data(run)
    flags = training_flags(run)
    recomputed = recomputation(run, flags)
    flags += recomputed.flags()
    check_new_directory(run, flags)
    run.say(str(recomputed))
    run.say(
        f"3/4 training {run.iters} iterations on {run.layout.world_size} ranks ({run.device}), a save every "
        f"{run.save_interval}; SIGKILL at {kill_at(run)}, then again. Their output is in {directory}/logs"
    )
    sys.stdout.flush()
    words = _drill(launch_of(run, flags, with_id=False, master_port=free_port_of(run)), directory)
    exact = run.interpreter.run("restart_drill", *words).returncode
    if exact not in (0, 1):
        raise SettingsError(f"the drill failed; its logs are in {directory}/logs")
    run.say("4/4 analysis")
    # The drill has written the report as report.json; this one is for people. Findings are part of the report; only an
    # analysis that could not run fails the demonstration.
    words = [str(directory / "trace"), "--output", str(directory)]
    if shown_and_kept(run, directory / "report.txt", "ckpt_analysis", words) > 1:
        raise SettingsError(f"the analysis of {directory}/trace could not run")
    print(_summary(run, directory, int(time.monotonic() - began)))
    return exact


def kill_at(run: Run) -> int:
    return run.kill_at or _KILL_AT


def check_drill(run: Run) -> None:
    """Refuse settings that the drill of MODE=restart and scaled cannot take."""
    given = run.given
    if restarts_in_place(given):
        raise SettingsError(
            f"MAX_RESTARTS={given.max_restarts}: MODE={run.mode} starts a new launch after the kill; leave it out, or "
            "have the drill restart ranks in place: kill_resume.sh --supervisor launch"
        )
    if kill_at(run) >= run.iters:
        raise SettingsError(f"KILL_AT={kill_at(run)}: must be less than ITERS={run.iters}")
    if kill_at(run) <= run.save_interval:
        raise SettingsError(
            f"KILL_AT={kill_at(run)}: must be more than SAVE_INTERVAL={run.save_interval}, to resume from a save"
        )


def _check_one_command(run: Run) -> None:
    if not launcher_of(run).starts_all(run):
        raise SettingsError(
            f"MODE={run.mode}: {run.nodes.number} nodes, or a host of HOSTFILE that is not this one, take a command "
            f"each with LAUNCHER={run.launcher}; use LAUNCHER=srun within an allocation"
        )


def _show(run: Run, directory: Path) -> None:
    """DRY_RUN: the same checks, without devices and hosts, and the command of the drill."""
    check_shown_nodes(run)
    _check_one_command(run)
    checked = checked_flags(run)
    lack = summarize(run, checked)
    launch = launch_of(run, checked.flags, with_id=False).carrying(for_display(run.user_env))
    print(for_shell_line([*run.interpreter.module("restart_drill"), *_drill(launch, directory)]))
    show_needs(run, checked, lack)


def _drill(launch: Launch, directory: Path) -> list[str]:
    """Arguments of the drill whose output goes to `directory`.

    Both launches train the iterations after the checkpoint, so their losses can be compared without a third run.
    """
    run = launch.run
    return [
        "--fault", "sigkill-all", "--at", f"iteration:{kill_at(run)}", "--no-reference", "--quiet",
        "--time-limit", run.time_limit or _TIME_LIMIT_S, "--out", str(directory), "--checkpoints", run.save_dir,
        "--", *launcher_of(run).command(launch, 0),
    ]  # fmt: skip


def _summary(run: Run, directory: Path, seconds: int) -> str:
    mode = "" if run.start.preset.model == "tiny" else f"MODE={run.mode} "
    return f"""
Measured: every save, the kill at iteration {kill_at(run)} and the restart of {run.layout.world_size} ranks,
phase by phase, by the ranks themselves, in {seconds} s after the set-up. A phase's duration is that of its
slowest rank.

  report    {directory}/ckpt_report.html, report.txt and report.json
  drill     {directory}/drill.json (see docs/restart_drill.md)
  trace     {directory}/trace (see docs/log_format.md)
  logs      {directory}/logs
  saves     {run.save_dir}

Next, try
  # the same on the storage that you train on
  {mode}SAVE_DIR=/mnt/your_storage/{run.mode} {run.start.command}
  # another fault at another injection point, compared with a run without a fault
  bash {SCRIPTS}/kill_resume.sh --fault bitflip --at after-commit
  # the commands of a 70B run on 64 GPUs
  DRY_RUN=1 bash {SCRIPTS}/run_70b_tp8_pp8.sh"""
