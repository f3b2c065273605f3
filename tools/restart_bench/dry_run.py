"""DRY_RUN: what is checked without ranks, and what is shown in their place: sizes, storage, the commands of nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from . import nodes
from .data import GIVEN
from .environment import for_display, for_shell_line
from .errors import LaunchEnded, SettingsError
from .free_space import free_space, resumes
from .interpreter import tool_runner
from .launchers.launch import launch_of, launcher_of
from .run import Run
from .training import Recomputation, check_flags, recomputation, training_flags

_NODE_RANK = "NODE_RANK"


@dataclass(frozen=True)
class Checked:
    """Flags of pretrain_gpt.py; `by_trainer`: whether an interpreter was there that could check them."""

    flags: list[str]
    recomputed: Recomputation
    by_trainer: bool


def checked_flags(run: Run) -> Checked:
    """Flags of pretrain_gpt.py, checked without writing anything."""
    flags = training_flags(run)
    recomputed = recomputation(run, flags)
    flags += recomputed.flags()
    return Checked(flags, recomputed, check_flags(run, flags))


def show_training(run: Run, flags: Sequence[str] | None) -> int:
    """Check what needs no ranks, and print the commands that would start them. `flags`: as for `modes.train`."""
    check_shown_nodes(run)
    if run.given.command_to:
        check_single_command(run)
    checked = checked_flags(run) if flags is None else None
    trained = list(flags or []) if checked is None else checked.flags
    lack = None if checked is None else summarize(run, checked)
    launch = launch_of(run, trained, with_id=not run.given.command_to).carrying(for_display(run.user_env))
    launcher = launcher_of(run)
    commands = [launcher.command(launch, node) for node in range(launcher.num_commands(run))]
    line = _of_every_node(commands)
    if line is not None:
        how = "the script starts on each host through ssh" if run.over_hosts else "each node runs"
        run.say(f"{how}, with {_NODE_RANK}=0..{len(commands) - 1}:")
    print("\n".join([line] if line is not None else map(for_shell_line, commands)))
    if checked is not None:
        show_needs(run, checked, lack)
    return 0


def _of_every_node(commands: Sequence[Sequence[str]]) -> str | None:
    """One line for the commands of all nodes, with NODE_RANK as a shell's variable; None if they differ in more."""
    first = commands[0]
    if len(commands) < 2 or any(len(words) != len(first) for words in commands):
        return None
    differing = {place for words in commands for place, word in enumerate(words) if word != first[place]}
    if any(words[place] != str(node) for place in differing for node, words in enumerate(commands)):
        return None
    shown = (f'"${_NODE_RANK}"' if place in differing else for_shell_line([word]) for place, word in enumerate(first))
    return " ".join(shown)


def summarize(run: Run, checked: Checked) -> str | None:
    """What was checked, how many ranks run where, what a checkpoint holds and where it goes; DRY_RUN=plan says more.

    Returns why the run would be refused for lack of space, or None.
    """
    run.say(str(checked.recomputed))
    passed = ["settings"]
    if checked.by_trainer:
        passed += ["flags", *(["dataset and tokenizer"] if run.data.kind == GIVEN else [])]
    passed += [f"slots of {run.nodes.hosts.named_by}"] if run.nodes.hosts.names else []
    run.say(f"checks passed: {', '.join(passed)}")
    found = run.nodes
    spares = f" and {found.spares} to spare" if found.spares else ""
    number = "1 node" if found.number == 1 else f"{found.number} nodes"
    run.say(
        f"{number} x {found.gpus_per_node} ranks{spares}: {nodes.ranks_of(run.layout)}, {run.device}, launcher "
        f"{run.launcher}, engine {run.engine}"
    )
    return None if run.given.dry_run == "plan" else _tell_storage(run, checked)


def _tell_storage(run: Run, checked: Checked) -> str | None:
    """The bytes of a checkpoint, and how many of it the storage has room for, as far as both are known here.

    Returns why the run would be refused for lack of space. A default directory is no mistake of the user's: who asks
    for the size of a run has not chosen its storage yet.
    """
    if run.engine == "none":
        run.say("storage: none, since engine none saves nothing")
        return None
    tensors = _tensor_bytes(run, checked)
    if tensors is not None:
        run.say(f"a checkpoint: {tensors[0] / 1e9:.4g} GB of tensors, at most {tensors[1] / 1e9:.3g} GB of a rank")
    if run.saves_to_store:
        run.say(f"storage: {run.save_dir}, which only the launch asks")
        return None
    try:
        directory, free, there = free_space(run.save_dir)
    except NotADirectoryError as exc:
        raise SettingsError(f"SAVE_DIR={run.save_dir}: {exc.filename} is no directory; give another SAVE_DIR") from None
    one = tensors[0] if tensors else 0
    room = f", room for {free // one} checkpoints" if one else ""
    run.say(f"storage: {run.save_dir}; {free / 1e9:.4g} GB are free in {directory} on this host{room}")
    weights_alone = "--finetune" in checked.flags
    if one <= free or resumes(run.save_dir, _last_value(checked.flags, "--load"), weights_alone=weights_alone):
        return None
    if not run.given.save_dir:
        run.say(f"no room in the default directory: give the run a SAVE_DIR with {one / 1e9:.4g} GB or more")
        return None
    if not there:
        run.say(f"SAVE_DIR={run.save_dir}: is not there on this host; the hosts of the run need {one / 1e9:.4g} GB")
        return None
    return (
        f"SAVE_DIR={run.save_dir}: {free / 1e9:.4g} GB are free, and a checkpoint is {one / 1e9:.4g} GB: no save could "
        "succeed; free space, or give another SAVE_DIR"
    )


def _last_value(flags: Sequence[str], name: str) -> str | None:
    """The value that the trainer takes, where EXTRA_ARGS gives a flag again."""
    values = [
        following if flag == name else flag.partition("=")[2]
        for flag, following in zip(flags, [*flags[1:], ""], strict=True)
        if flag == name or flag.startswith(f"{name}=")
    ]
    return values[-1] if values else None


def _tensor_bytes(run: Run, checked: Checked) -> tuple[int, int] | None:
    """Bytes of the tensors of a checkpoint, and of the rank that holds most; None if they cannot be asked for."""
    words = ["--dp", str(run.layout.dp), "--tensors", "--format", "json", "--", *checked.flags]
    asked = run.interpreter.run("ckpt_plan", *words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if asked.returncode != 0:
        return None
    found = json.loads(asked.stdout)
    return found["tensor_bytes"], max(rank["tensor_bytes"] for rank in found["per_rank"])


def check_shown_nodes(run: Run) -> None:
    """The checks of a dry run, which need none of the nodes."""
    nodes.check_nodes(run.given, run.nodes, run.layout)
    if run.nodes.hosts.names:
        nodes.check_slots(run.nodes, run.layout)


def check_single_command(run: Run) -> None:
    """Refuse a launch that no single command starts."""
    if launcher_of(run).starts_all(run) or run.coordinates:
        return
    number = run.nodes.number
    which = f"{number} nodes take a command each"
    if number == 1:
        which = "a host of HOSTFILE that is not this one takes a command of its own"
    raise SettingsError(
        f"COMMAND_TO: {which} with LAUNCHER={run.launcher}; use LAUNCHER=srun within an allocation, or LAUNCHER=fork "
        "with MAX_RESTARTS"
    )


def show_needs(run: Run, checked: Checked, lack: str | None) -> None:
    """Print, on stderr, what DRY_RUN shows besides commands: the plan, or the host memory that saves take.

    Raises LaunchEnded if the run would be refused for lack of space: `lack`, as `summarize` returned it.
    """
    _show_plan(run, checked)
    if lack is not None:
        run.say(f"error: {lack}")
        raise LaunchEnded(1)


def _show_plan(run: Run, checked: Checked) -> None:
    given = run.given
    plan = given.dry_run == "plan"
    if not plan and run.engine != "memory":
        return
    if not run.interpreter.exists():
        what = "the plan" if plan else "the host memory that saves take"
        run.say(f"cannot print {what}: there is no {run.interpreter.path} yet; give SKIP_SETUP=1 PYTHON=...")
        return
    words = ["--model", run.start.preset.model, "--tp", str(run.layout.tp), "--pp", str(run.layout.pp)]
    words += ["--dp", str(run.layout.dp), "--engine", run.engine, "--recompute", checked.recomputed.mode]
    words += ["--ranks-per-host", str(run.nodes.gpus_per_node), *([] if run.coordinates else ["--no-coordinator"])]
    words += ["--run"] if plan else ["--host-memory"]
    for name in ("blocked_target", "durable_target"):
        if getattr(given, name):
            words += [f"--{name.replace('_', '-')}", getattr(given, name)]
    sys.stdout.flush()
    status = tool_runner(run.interpreter)("ckpt_plan", *words, "--", *checked.flags)
    if status != 0:
        raise LaunchEnded(status)
