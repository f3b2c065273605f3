"""Command line: `python -m benchmarks.replication_traffic`, on the login node of four nodes of two ranks.

    python -m tests.cluster run --nodes 4 -- python -m benchmarks.replication_traffic

One training, whose iterations are saved to memory of two hosts each: not at all, at once and interleaved with the
training's traffic, in blocks that take turns. The nodes' links are limited to --kbit (by NODES_COMMAND, see
docs/restart_drill.md). With --zero-stage 3 DeepSpeed gathers weights and reduce-scatters gradients over all ranks; with
1 this project's trainer runs, and its ranks gather --gather-mb in each pass, as ZeRO-3 would. In either ranks wait as
for an accelerator, so that network and processors are idle part of each step.
Exit status: 0 measured, 2 could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.program import printed
from benchmarks.common.ranks import ROOT, MeasurementError
from benchmarks.replication_traffic.figures import Figures, figures_of, render
from benchmarks.replication_traffic.plan import VARIABLE, Plan
from benchmarks.replication_traffic.results import write_results
from tools.common.cli import make_parser, require_at_least
from tools.common.machine import machine
from tools.restart_drill.launch import DrillError
from tools.restart_drill.nodes import Program

_NODES, _RANKS = 4, 2
_VOCAB = {1: 8191, 3: 2047}  # by --zero-stage
_COMPUTE_MS = {1: 80.0, 3: 1000.0}
_GATHERED_MB = 6.0
_EPILOG = """\
examples:
  python -m tests.cluster run --nodes 4 -- %(prog)s --rounds 5
  python -m tests.cluster run --nodes 4 -- %(prog)s --zero-stage 3 --results gemini -- --comm-profile-steps 20
      flags of the training come after --

exit status: 0 measured, 2 could not run
"""
_FLAGS = """
    --tensor-model-parallel-size 1 --distributed-backend gloo --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 1 --lr 1e-4 --bf16 --zero-stage 1
    --tokenizer-type NullTokenizer --split 100,0,0 --num-workers 0 --eval-interval 100000 --eval-iters 0
    --log-interval 10 --save-interval 1 --persist-interval 1000000 --checkpoint-engine memory
    --checkpoint-durability none --replication-traffic interleave
"""
_MODEL = {  # by --zero-stage: what differs
    1: """
    --pipeline-model-parallel-size 2 --num-layers 2 --hidden-size 256 --ffn-hidden-size 704 --global-batch-size 16
    --use-rotary-position-embeddings --swiglu --untie-embeddings-and-output-weights --normalization rmsnorm
    --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    """,
    3: "--num-layers 4 --hidden-size 384 --ffn-hidden-size 1536 --global-batch-size 8",
}


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    parser = make_parser("python -m benchmarks.replication_traffic", __doc__ or "", _EPILOG)
    add = parser.add_argument
    add("--rounds", type=int, default=5, metavar="N", help="blocks of each variant (default: 5)")
    add("--warm-up", type=int, default=10, metavar="N", help="iterations before the first block, in which steps are "
        "profiled (default: 10)")  # fmt: skip
    add("--block", type=int, default=10, metavar="N", help="iterations of a block (default: 10)")
    add("--settle", type=int, default=3, metavar="N", help="of these, the first that do not count (default: 3)")
    add("--zero-stage", type=int, choices=(1, 3), default=1, help="1: this project's trainer, PP2 DP4, four "
        "micro-batches; 3: a small GPT by DeepSpeed's ZeRO-3, DP8, one micro-batch (default: 1)")  # fmt: skip
    add("--compute-ms", type=float, metavar="MS", help="wait in a forward pass, twice that in a backward pass, of each "
        f"micro-batch (default: {_COMPUTE_MS[1]:g}; with --zero-stage 3 {_COMPUTE_MS[3]:g})")  # fmt: skip
    add("--gather-mb", type=float, metavar="MB", help="--zero-stage 1: MB that the four ranks of a stage gather in "
        f"each pass (default: {_GATHERED_MB:g})")  # fmt: skip
    add("--kbit", type=int, default=1_000_000, metavar="N", help="kbit/s of each link (default: 1000000)")
    add("--dir", type=Path, metavar="DIR", help="on a file system that all nodes share (default: temporary files)")
    add("--results", type=Path, metavar="DIR", help="write results.json, Figure_7.svg and Figure_8.svg there, as the "
        "artifact of GEMINI does")  # fmt: skip
    add("--format", choices=("text", "json"), default="text", help="json has every sample (default: text)")
    end = argv.index("--") if "--" in argv else len(argv)
    arguments = parser.parse_args(argv[:end])
    arguments.of_training = list(argv[end + 1 :])
    require_at_least(parser, arguments, 1, "rounds", "kbit", "warm_up")
    if arguments.compute_ms is None:
        arguments.compute_ms = _COMPUTE_MS[arguments.zero_stage]
    if arguments.gather_mb is None:
        arguments.gather_mb = _GATHERED_MB
    elif arguments.zero_stage == 3:
        parser.error(f"--gather-mb {arguments.gather_mb:g}: with --zero-stage 3 DeepSpeed gathers; drop the flag")
    require_at_least(parser, arguments, 0, "settle", "compute_ms", "gather_mb")
    if arguments.settle >= arguments.block:
        parser.error(f"--settle {arguments.settle}: leaves nothing of --block {arguments.block}")
    for name in ("HOSTFILE", "NODES_COMMAND"):
        if not os.environ.get(name):
            parser.error(f"{name} is not set: run it by `python -m tests.cluster run --nodes {_NODES}`")
    return arguments


def main(argv: Sequence[str]) -> int:
    """Measure, and print what was found; returns the exit status."""
    arguments = parse_arguments(argv)
    return printed("replication_traffic", lambda: _report(arguments), DrillError)


def _report(arguments: argparse.Namespace) -> str:
    before = machine()
    with tempfile.TemporaryDirectory(prefix="replication_", dir=arguments.dir) as directory:
        found = _measured(Path(directory), arguments)
    if arguments.results is not None:
        write_results(found, arguments.results)
    return json.dumps(found.as_json() | {"machine": before}) if arguments.format == "json" else render(found, before)


def _measured(directory: Path, arguments: argparse.Namespace) -> Figures:
    lines = Path(os.environ["HOSTFILE"]).read_text().splitlines()
    hosts = [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]
    if len(hosts) != _NODES:
        raise MeasurementError(f"HOSTFILE names {len(hosts)} hosts; give {_NODES}")
    gathered = int(arguments.gather_mb * 1e6) * 2 // (_NODES * _RANKS) if arguments.zero_stage == 1 else 0
    lengths = arguments.warm_up, arguments.rounds, arguments.block, arguments.settle
    plan = Plan(str(directory), *lengths, arguments.compute_ms / 1e3, gathered)
    plan.write(directory / "plan.json")
    if arguments.zero_stage == 1:
        _make_data(directory)
    program = Program(shlex.split(os.environ["NODES_COMMAND"]))
    try:
        for host in hosts:
            program.call("slow-link", host, str(arguments.kbit))
        _train(directory, hosts, plan, arguments.zero_stage, arguments.of_training)
    finally:
        for host in hosts:
            program.call("repair", host)
        program.close()
    return figures_of(directory, plan, arguments.kbit * 1000 / 8)


def _make_data(directory: Path) -> None:
    command = [sys.executable, "-m", "tools.make_synthetic_dataset", "--tokens", "1000000"]
    command += ["--output-prefix", str(directory / "data"), "--vocab-size", str(_VOCAB[1])]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def _train(directory: Path, hosts: Sequence[str], plan: Plan, zero_stage: int, flags: Sequence[str]) -> None:
    """The training, to its end; none of its processes is left. Raises MeasurementError."""
    trained = ROOT / "benchmarks" / "replication_traffic" / f"zero{zero_stage}.py"
    script = [str(trained), *_FLAGS.split(), *_MODEL[zero_stage].split(), "--vocab-size", str(_VOCAB[zero_stage])]
    script += ["--train-iters", str(plan.iterations), "--data-path", str(directory / "data")]
    script += ["--save", str(directory / "ckpt"), "--restart-trace-dir", str(directory / "trace"), *flags]
    environment = {
        "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "eth0"), "PATH": os.environ["PATH"],
        VARIABLE: str(directory / "plan.json"),
    }  # fmt: skip
    launcher = [sys.executable, "-m", "megatron.launch"]
    port_file, log = directory / "port", directory / "launch.log"
    started: list[subprocess.Popen[bytes]] = []
    with log.open("wb") as output:

        def start(command: Sequence[str]) -> None:
            started.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output))

        sizes = ["--nnodes", str(_NODES), "--nproc-per-node", str(_RANKS), "--heartbeat-timeout", "30"]
        secret = ["--secret-file", str(directory / "secret")]
        try:
            start([*launcher, "coordinate", *sizes, *secret, "--port-file", str(port_file), *script])
            while not port_file.exists() and started[0].poll() is None:
                time.sleep(0.02)
            coordinator = f"{socket.gethostname()}:{port_file.read_text().strip()}"
            for number, host in enumerate(hosts):
                node = ["--nproc-per-node", str(_RANKS), "--coordinator", coordinator]
                node += ["--node-rank", str(number), "--address", host, *secret]
                words = ["env", *(f"{name}={value}" for name, value in environment.items()), *launcher, *node, *script]
                remote = f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(words)}"
                start(["ssh", "-tt", "-o", "BatchMode=yes", host, remote])
            code = started[0].wait()
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait()
    if code:
        raise MeasurementError(f"the training ended with exit code {code}:\n{log.read_text(errors='replace')[-4000:]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
