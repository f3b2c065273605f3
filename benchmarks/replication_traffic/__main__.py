"""Command line: `python -m benchmarks.replication_traffic`, on the login node of four nodes of two ranks.

    python -m tests.cluster run --nodes 4 -- python -m benchmarks.replication_traffic

One training, whose iterations are saved to memory of two hosts each: not at all, at once and interleaved with the
training's traffic, in blocks that take turns. The nodes' links are limited to --kbit (by NODES_COMMAND, see
docs/restart_drill.md). In each pass, ranks gather --gather-mb over the network, as ZeRO-3 gathers weights, and wait as
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
_MICRO_BATCHES = 4
_VOCAB = 8191
_EPILOG = """\
examples:
  python -m tests.cluster run --nodes 4 -- %(prog)s --rounds 5
  python -m tests.cluster run --nodes 4 -- %(prog)s --warm-up 30 --results gemini -- --comm-profile-steps 20
      flags of the training come after --

exit status: 0 measured, 2 could not run
"""
_FLAGS = f"""
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --distributed-backend gloo
    --num-layers 2 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --use-rotary-position-embeddings --untie-embeddings-and-output-weights --swiglu
    --normalization rmsnorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1
    --global-batch-size {_MICRO_BATCHES * _NODES * _RANKS // 2} --lr 1e-4 --bf16 --zero-stage 1
    --tokenizer-type NullTokenizer --vocab-size {_VOCAB} --split 100,0,0 --num-workers 0 --eval-interval 100000
    --eval-iters 0 --log-interval 10 --save-interval 1 --persist-interval 1000000 --checkpoint-engine memory
    --checkpoint-durability none --replication-traffic interleave
""".split()


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; exits with status 2 and a message if it is wrong (argparse)."""
    parser = make_parser("python -m benchmarks.replication_traffic", __doc__ or "", _EPILOG)
    add = parser.add_argument
    add("--rounds", type=int, default=5, metavar="N", help="blocks of each variant (default: 5)")
    add("--warm-up", type=int, default=10, metavar="N", help="iterations before the first block, in which steps are "
        "profiled (default: 10)")  # fmt: skip
    add("--block", type=int, default=10, metavar="N", help="iterations of a block (default: 10)")
    add("--settle", type=int, default=3, metavar="N", help="of these, the first that do not count (default: 3)")
    add("--compute-ms", type=float, default=80.0, metavar="MS", help="wait in a forward pass, twice that in a backward "
        "pass, of each of the 4 micro-batches (default: 80)")  # fmt: skip
    add("--gather-mb", type=float, default=6.0, metavar="MB", help="MB that the four ranks of a stage gather in each "
        "pass (default: 6)")  # fmt: skip
    add("--kbit", type=int, default=1_000_000, metavar="N", help="kbit/s of each link (default: 1000000)")
    add("--dir", type=Path, metavar="DIR", help="on a file system that all nodes share (default: temporary files)")
    add("--results", type=Path, metavar="DIR", help="write results.json, Figure_7.svg and Figure_8.svg there, as the "
        "artifact of GEMINI does")  # fmt: skip
    add("--format", choices=("text", "json"), default="text", help="json has every sample (default: text)")
    end = argv.index("--") if "--" in argv else len(argv)
    arguments = parser.parse_args(argv[:end])
    arguments.of_training = list(argv[end + 1 :])
    require_at_least(parser, arguments, 1, "rounds", "kbit", "warm_up")
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
    gathered = int(arguments.gather_mb * 1e6) * 2 // (_NODES * _RANKS)
    lengths = arguments.warm_up, arguments.rounds, arguments.block, arguments.settle
    plan = Plan(str(directory), *lengths, arguments.compute_ms / 1e3, gathered)
    plan.write(directory / "plan.json")
    _make_data(directory)
    program = Program(shlex.split(os.environ["NODES_COMMAND"]))
    try:
        for host in hosts:
            program.call("slow-link", host, str(arguments.kbit))
        _train(directory, hosts, plan, arguments.of_training)
    finally:
        for host in hosts:
            program.call("repair", host)
        program.close()
    return figures_of(directory, plan, arguments.kbit * 1000 / 8)


def _make_data(directory: Path) -> None:
    command = [sys.executable, "-m", "tools.make_synthetic_dataset", "--tokens", "1000000"]
    command += ["--output-prefix", str(directory / "data"), "--vocab-size", str(_VOCAB)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def _train(directory: Path, hosts: Sequence[str], plan: Plan, flags: Sequence[str]) -> None:
    """The training, to its end; none of its processes is left. Raises MeasurementError."""
    script = [str(ROOT / "benchmarks" / "replication_traffic" / "rank.py"), *_FLAGS]
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
