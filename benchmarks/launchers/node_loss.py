"""What the loss of a node costs: from the loss to the end of the next step, by who starts the ranks again.

    python -m tests.cluster run --nodes 2 --spares 1 --slurm -- python -m benchmarks.launchers.node_loss --repeat 3

It trains on the first two hosts of HOSTFILE, and the third waits. When the demonstration has trained three steps after
a checkpoint, the second host is lost, by the program NODES_COMMAND (docs/restart_drill.md). The clock runs from the
call of that program until the line of the first step after the loss is in the launch's log. Exit status: 0 measured, 2
could not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.program import printed
from benchmarks.common.ranks import MeasurementError
from benchmarks.launchers.measure import IterationLines
from benchmarks.launchers.rounds import add_options, check_options, figures, interleaved, times
from benchmarks.launchers.variants import ROOT
from megatron.net.free_port import free_port
from restart_trace.clock import now_ns
from restart_trace.command_line import CommandParser
from tools.common.machine import machine
from tools.restart_bench.presets import preset_named
from tools.restart_drill.launch import DrillError, launched, recorded_ranks
from tools.restart_drill.nodes import Nodes, nodes_of
from tools.restart_drill.preset import command_of, hosts_of_job

_PRESET = "tiny_tp2_pp2_dp2"
NODES, RANKS = 2, 2  # nodes that train, and ranks of each: TP2 x PP2
_END_S = 30.0  # for the end of a launch
_SAVE_INTERVAL, _FAULT_AT, _ITERATIONS = 20, 23, 200  # by then the spare agent of torchrun has joined, too
_TARGET_S, _TARGET_RATIO = 4.0, 0.25
SPARE, TORCHRUN, SLURM = "launch", "torchrun", "slurm"
# Name -> what it is.
VARIANTS = {
    SPARE: "megatron.launch with a hot spare, --heartbeat-timeout 2 (its default)",
    TORCHRUN: "torchrun, c10d rendezvous, --nnodes 2:2, and a third agent that waits; its defaults: a node counts as "
    "dead after 3 intervals of 5 s",
    SLURM: "Slurm: salloc --no-kill of three nodes, srun --kill-on-bad-exit on two, and a new step on those that are "
    "left; SlurmdTimeout as configured (300 s by default)",
}

# The store outlives the loss of a node: it is on the host that launches. The spare joins once the others train.
_TORCHRUN = r"""
trap 'trap - TERM; kill $(jobs -p) 2>/dev/null; wait' EXIT
trap 'exit 143' TERM
"$PYTHON" -c 'import sys, time
from torch.distributed import TCPStore
store = TCPStore("0.0.0.0", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("the store listens", flush=True)
time.sleep(100000)' "$STORE_PORT" &
until grep -q 'the store listens' "$LOG"; do sleep 0.1; done
start() { ssh -tt -o BatchMode=yes "$1" "cd $(printf %q "$PWD") && exec $AGENT" </dev/null & }
read -r first second spare <<<"$HOSTS"
start "$first"; start "$second"
until grep -q 'iteration  *1/' "$LOG"; do sleep 0.1; done
start "$spare"
wait
"""
_SLURM = r"""
unset SLURM_NO_KILL
for try in 0 1; do
    mapfile -t living < <(sinfo -h -N -n "$SLURM_JOB_NODELIST" -o '%N %t' | awk '$2 ~ /^(alloc|mix|idle)$/ {print $1}')
    echo "step $try on ${living[*]:0:2}"
    export MASTER_ADDR=${living[0]} MASTER_PORT=$((STORE_PORT + try)) RESTART_TRACE_LAUNCH_ID=$ID/$try
    srun --nodes 2 --ntasks 4 --ntasks-per-node 2 --nodelist "${living[0]},${living[1]}" --kill-on-bad-exit=1 \
        --export=ALL --unbuffered bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"' rank $RANK_COMMAND \
        </dev/null && break
done
"""

_EPILOG = """\
variants:
{variants}

Run it on a machine that does nothing else. HOSTFILE names three hosts, and NODES_COMMAND the program that loses one.

examples:
  python -m tests.cluster run --nodes 2 --spares 1 --slurm -- python -m benchmarks.launchers.node_loss
  python -m benchmarks.launchers.node_loss --repeat 5 --only launch torchrun --dir /shared/node_loss

exit status: 0 measured, 2 could not run
"""


@dataclass(frozen=True)
class Setting:
    """What all variants have in common. `flags`: of pretrain_gpt.py, but for its directories."""

    directory: Path
    hosts: tuple[str, ...]
    nodes: Nodes
    command: list[str]
    flags: list[str]
    limit_s: float


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it or the environment is wrong (argparse)."""
    shown = "\n".join(f"  {name:12} {what}" for name, what in VARIANTS.items())
    what = (__doc__ or "").splitlines()[0]
    parser = CommandParser(
        prog="python -m benchmarks.launchers.node_loss", description=what, epilog=_EPILOG.format(variants=shown)
    )
    add_options(parser, VARIANTS, repeat=3, engine="lazy", time_limit_s=300)
    arguments = parser.parse_args(argv)
    check_options(parser, arguments)
    for name in ("HOSTFILE", "NODES_COMMAND"):
        if not os.environ.get(name):
            parser.error(f"{name} is not set: run it by `python -m tests.cluster run`, or see docs/restart_drill.md")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status."""
    arguments = parse_arguments(argv)
    return printed("node_loss", lambda: _measured(arguments), DrillError)


def _measured(arguments: argparse.Namespace) -> str:
    before = machine()
    with (
        tempfile.TemporaryDirectory(prefix="node_loss_", dir=arguments.dir) as directory,
        nodes_of(shlex.split(os.environ["NODES_COMMAND"]), [-1]) as nodes,
    ):
        setting = _setting(Path(directory), nodes, arguments)
        samples = interleaved(arguments, lambda name, number: sample(name, setting, number))
    found = {"machine": before} | analyse(samples)
    return json.dumps(found) if arguments.format == "json" else render(found)


def _setting(directory: Path, nodes: Nodes, arguments: argparse.Namespace) -> Setting:
    """Prepare the preset's data and ask for its flags. Raises MeasurementError, DrillError or OSError."""
    hosts = hosts_of_job()
    if len(hosts) != NODES + 1:
        raise MeasurementError(f"HOSTFILE names {len(hosts)} hosts; give {NODES + 1}: two that train, and a spare")
    # They stay in the environment: the command is a script that reads them again.
    os.environ |= {
        "LAUNCHER": "fork", "MAX_RESTARTS": "1", "SPARES": "1", "DP": "1", "KILL_AT": "none",
        "WORK_DIR": str(directory), "ITERS": str(_ITERATIONS), "SAVE_INTERVAL": str(_SAVE_INTERVAL),
        "ENGINE": arguments.engine,
    }  # fmt: skip
    preset = preset_named(_PRESET)
    assert preset is not None
    command = command_of(preset)
    program = next(i for i, word in enumerate(command) if word.endswith("pretrain_gpt.py"))
    return Setting(directory, hosts, nodes, command[: program + 1], command[program + 1 :], arguments.time_limit)


def sample(variant: str, setting: Setting, number: int) -> float:
    """Seconds from the loss of a node to the end of the next step. Raises MeasurementError."""
    place = setting.directory / f"{variant}_{number}"
    place.mkdir()
    if variant == SLURM:
        _await_idle_nodes(len(setting.hosts), setting.limit_s)
    try:
        with _ended(setting, place):
            return _restarted(_command(variant, setting, place), setting, place)
    except (DrillError, MeasurementError) as error:
        raise MeasurementError(f"{variant}: {error}") from error


def _restarted(command: list[str], setting: Setting, place: Path) -> float:
    """Seconds from the loss of a node to the end of the next step, which must be the one after the checkpoint."""
    log = IterationLines(place / "launch.log")
    with launched(command, log.path, echo=False) as launch:
        try:
            log.wait_for(lambda iteration: iteration >= _FAULT_AT, launch, setting.limit_s)
            lost = last_host(place / "trace")
            injected_ns = now_ns()
            setting.nodes.inject("node-loss", lost, 0, 0)
            resumed = log.wait_for(lambda iteration: iteration <= _FAULT_AT, launch, setting.limit_s)
            seconds = (now_ns() - injected_ns) / 1e9
        finally:
            launch.send(signal.SIGTERM, launch.launcher())
            with contextlib.suppress(DrillError):
                launch.wait(_END_S)
    if resumed != _SAVE_INTERVAL + 1:
        raise MeasurementError(f"it went on with iteration {resumed}, not from its checkpoint of {_SAVE_INTERVAL}")
    return seconds


@contextlib.contextmanager
def _ended(setting: Setting, place: Path) -> Iterator[None]:
    """At the end the lost node is there again, and nothing of the launch is left on any."""
    try:
        yield
    finally:
        setting.nodes.repair()
        deadline = time.monotonic() + _END_S
        for host in setting.hosts:
            while left := setting.nodes.processes(host, str(place)):
                if time.monotonic() > deadline:
                    raise MeasurementError(f"{len(left)} processes are left on {host}: {left[0][:300]}")
                time.sleep(0.2)


def last_host(trace_dir: Path) -> str:
    """Where the last rank runs: a scheduler chooses the hosts itself."""
    _, ranks = recorded_ranks(trace_dir, 0)
    if len(ranks) < NODES * RANKS:
        raise MeasurementError(f"{trace_dir} has {len(ranks)} ranks; {NODES * RANKS} were expected")
    return ranks[max(ranks)].host


def _await_idle_nodes(count: int, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        states = subprocess.run(["sinfo", "-h", "-N", "-o", "%t"], capture_output=True, text=True).stdout.split()
        if states.count("idle") == count:
            return
        if time.monotonic() > deadline:
            raise MeasurementError(f"Slurm: {count} idle nodes were expected: {' '.join(states)}")
        time.sleep(0.2)


def _command(variant: str, setting: Setting, place: Path) -> list[str]:
    """The command that launches a variant, with all that it leaves in `place`."""
    checkpoints = str(place / "checkpoints")
    flags = [*setting.flags, "--save", checkpoints, "--load", checkpoints, "--restart-trace-dir", str(place / "trace")]
    if variant == SPARE:
        return [*setting.command, *flags]
    program = [str(ROOT / "pretrain_gpt.py"), *flags]
    rank = {
        "PYTHONUNBUFFERED": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", ""), "PATH": os.environ["PATH"],
        "WORLD_SIZE": str(NODES * RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
    }  # fmt: skip
    port = str(free_port())
    if variant == SLURM:
        script = {"STORE_PORT": port, "ID": place.name, "RANK_COMMAND": shlex.join([sys.executable, *program])}
        return ["env", *_assigned(rank | script), "salloc", "--no-kill", f"--nodes={len(setting.hosts)}",
                f"--ntasks-per-node={RANKS}", "bash", "-c", _SLURM]  # fmt: skip
    agent = [
        "env", *_assigned({name: value for name, value in rank.items() if not name.endswith("SIZE")}),
        # Without it torch 2.13 hangs: an agent that stays does not tell a new one where the ranks' store is.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        f"RESTART_TRACE_LAUNCH_ID={place.name}", sys.executable, "-m", "torch.distributed.run",
        "--nnodes", f"{NODES}:{NODES}", "--nproc_per_node", str(RANKS), "--rdzv_backend", "c10d", "--rdzv_id", port,
        "--rdzv_endpoint", f"{socket.gethostname()}:{port}",
        "--max_restarts", "3", *program,
    ]  # fmt: skip
    script = {
        "PYTHON": sys.executable, "STORE_PORT": port, "LOG": str(place / "launch.log"), "AGENT": shlex.join(agent),
        "HOSTS": " ".join(setting.hosts),
    }  # fmt: skip
    return ["env", *_assigned(script), "bash", "-c", _TORCHRUN]


def _assigned(variables: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in variables.items()]


def analyse(samples: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, spreads, what megatron.launch takes of each, and every sample, in seconds, by round."""
    variants = figures(VARIANTS, samples)
    ours = variants[SPARE]["median_s"] if SPARE in variants else None
    for variant in variants.values():
        variant["launch_ratio"] = None if ours is None else ours / variant["median_s"]
    return {"target_s": _TARGET_S, "target_ratio": _TARGET_RATIO, "variants": variants}


def render(found: dict[str, Any]) -> str:
    """The table."""
    before = found["machine"]
    lines = [
        f"loss of a node to the end of the next step; load of the machine before: {before['load_average_1_min']}",
        f"  {'':12} {'median':>8} {'min':>8} {'max':>8}  launch takes",
    ]
    for name, variant in found["variants"].items():
        if name == SPARE:
            met = variant["median_s"] < found["target_s"]
            verdict = f"target: below {found['target_s']:g} s: {'met' if met else 'MISSED'}"
        elif variant["launch_ratio"] is None:
            verdict = "-"
        else:
            met = variant["launch_ratio"] <= found["target_ratio"]
            target = f"target: at most {found['target_ratio']}: {'met' if met else 'MISSED'}"
            verdict = f"{variant['launch_ratio']:.2f} of it; {target}"
        samples = ", ".join(f"{value:.2f}" for value in variant["samples_s"])
        lines.append(f"  {name:12} {times(variant)}  {verdict} ({samples})")
    return "\n".join([*lines, *(f"  {name}: {variant['what']}" for name, variant in found["variants"].items())])


if __name__ == "__main__":
    sys.exit(main())
