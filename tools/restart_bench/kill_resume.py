"""kill_resume.sh: the restart drill with other defaults; and drill_slurm.sh, which is that in a Slurm allocation."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence

from . import slurm
from .effects import check_given
from .environment import for_shell_line
from .errors import LaunchEnded, SettingsError
from .interpreter import Interpreter, replace_process, tool_runner
from .modes import for_program, train
from .places import SCRIPTS, runs
from .presets import preset_of_word
from .settings import Settings, check_names

_DEFAULT_PRESET = "tiny_tp2_pp2_dp2"


def kill_resume(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Replaces this process by the drill, or prints its command."""
    check_names(environ)
    given = Settings.read(environ)
    interpreter = Interpreter.of(given, environ)
    options = list(arguments)
    command = ["--", _DEFAULT_PRESET]
    if "--" in options:
        command = options[options.index("--") :]
        options = options[: options.index("--")]
    for word in options:
        if preset_of_word(word) is not None:
            raise SettingsError(f"{word}: give a preset after --, as in: {SCRIPTS / 'kill_resume.sh'} -- {word}")
    out = environ.get("OUT_DIR") or str(runs() / f"kill_resume-{time.strftime('%Y%m%d-%H%M%S')}")
    words = ["--fault", "sigkill-all", "--at", "mid-save-write", "--cycles", "2", "--out", out, *options, *command]
    if given.dry_run:
        return _show(words, environ, interpreter)
    interpreter.set_up()
    replace_process([*interpreter.module("restart_drill"), *words], interpreter.environment())


def _show(words: list[str], environ: Mapping[str, str], interpreter: Interpreter) -> int:
    """Check the drill's arguments, and print its command and that of the preset."""
    if interpreter.exists():
        status = tool_runner(interpreter)("restart_drill", "--dry-run", *words)
        if status != 0:
            raise LaunchEnded(status)
    else:
        path = interpreter.path
        print(
            f"[restart_bench] the arguments of the drill are not checked: there is no {path} to check them with",
            file=sys.stderr,
        )
    print(for_shell_line([*interpreter.module("restart_drill"), *words]), flush=True)
    preset = preset_of_word(words[-1])
    if preset is None:
        return 0
    start = for_program(preset, environ)
    check_given(start.environ, start.given)
    return train(start)


def drill_slurm(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """kill_resume with the nodes of the allocation."""
    job, nodes = environ.get("SLURM_JOB_ID"), slurm.number_of_nodes(environ)
    if not job:
        raise SettingsError("SLURM_JOB_ID is not set: start within an allocation, by sbatch or salloc")
    if not re.fullmatch("[1-9][0-9]*", nodes):
        raise SettingsError(f"SLURM_JOB_NUM_NODES={nodes}: the allocation must say how many nodes it has")
    settings = {"LAUNCHER": "srun", "NNODES": nodes}
    master = environ.get("MASTER_ADDR") or ("127.0.0.1" if nodes == "1" else slurm.first_host(environ))
    settings["MASTER_ADDR"] = master
    # Slurm's form is 8(x4) or 8; presets have the same number of tasks on every node.
    tasks = environ.get("SLURM_NTASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    per_node = environ.get("GPUS_PER_NODE") or re.split(r"[(,]", tasks)[0]
    if per_node:
        settings["GPUS_PER_NODE"] = per_node
    if environ.get("DRY_RUN"):
        shown = per_node or "as many as fit"
        print(f"# job {job}: {nodes} nodes, rank 0 on {master}, {shown} tasks per node", flush=True)
    return kill_resume(arguments, {**environ, **settings})
