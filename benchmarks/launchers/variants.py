"""What is compared: the same training under four ways of launching it again."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.ranks import MeasurementError
from megatron.net.free_port import free_port

ROOT = Path(__file__).resolve().parents[2]
TP, PP = 2, 2  # of the demonstration
SAVE_INTERVAL = 5
ITERATIONS = 40  # more than a sample needs: nothing ends by itself before the fault
DTYPES = ("bf16", "fp32")
_VOCABULARY = 4096  # tokens of tools.build_corpus's tokenizer; a multiple of what it would be padded to

PLAIN = "benchmarks.launchers.plain_deepspeed"
BASELINE = "plain"
IN_PLACE = "fork-in-place"
IN_PROCESS = "fork-in-process"  # where one rank is lost: of a start whose ranks are all killed none returns
STANDBY = {"fork-standby": "1", "fork-standby-load": "load"}  # name -> STANDBY of the preset
# Name -> what it is.
VARIANTS = {
    "torchrun": "the demonstration, relaunched with torchrun",
    "fork": "the demonstration, relaunched with megatron.launch",
    IN_PLACE: "the demonstration, its ranks started again by megatron.launch --max-restarts",
    "fork-standby": "the same with --standby: ranks that were set up ahead of the failure take their place",
    "fork-standby-load": "the same with --standby-load: they have loaded the checkpoint ahead, too",
    BASELINE: "a plain DeepSpeed script of the same model, relaunched with torchrun",
}


@dataclass(frozen=True)
class Setting:
    """What all variants have in common."""

    directory: Path
    dp: int
    engine: str
    dtype: str  # of DTYPES
    tp: int = TP
    pp: int = PP
    iterations: int = ITERATIONS
    restarts: int = 1  # in place

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def global_batch(self) -> int:
        return 4 * self.dp  # as the preset has it: two micro-batches of 2 samples for each replica


def restarts_in_place(variant: str) -> bool:
    """Whether the launcher outlives the failure of its ranks."""
    return variant in (IN_PLACE, IN_PROCESS) or variant in STANDBY


def prepare_data(setting: Setting) -> None:
    """Make corpus, tokenizer and dataset of the demonstration. Raises MeasurementError."""
    model = setting.data / "tokenizer.model"
    build = ["tools.build_corpus", "--output-dir", str(setting.data)]
    tokenize = [
        "tools.preprocess_data", "--input", str(setting.data / "corpus.jsonl"),
        "--output-prefix", str(setting.data / "corpus"), "--tokenizer-type", "GPTSentencePieceTokenizer",
        "--tokenizer-model", str(model), "--append-eod", "--document-sizes", "exact", "--workers", "2",
    ]  # fmt: skip
    for module in (build, tokenize):
        done = subprocess.run([sys.executable, "-m", *module], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise MeasurementError(f"{module[0]} failed: {done.stderr[-2000:]}")


def command(variant: str, setting: Setting, save: Path) -> list[str]:
    """The command that launches `variant`, which saves to and resumes from `save`."""
    return _plain(setting, save) if variant == BASELINE else _demonstration(variant, setting, save)


def _demonstration(variant: str, setting: Setting, save: Path) -> list[str]:
    """What the preset's launch would run: it is asked."""
    settings = {
        "DRY_RUN": "1", "KILL_AT": "none", "DEVICE": "cpu", "SKIP_SETUP": "1", "PYTHON": sys.executable,
        "WORK_DIR": str(setting.directory), "SAVE_DIR": str(save), "DP": str(setting.dp), "ENGINE": setting.engine,
        "ITERS": str(setting.iterations), "SAVE_INTERVAL": str(SAVE_INTERVAL), "DTYPE": setting.dtype,
        "NODE_RANK": "0",  # each launch gets its identity from its environment
    }  # fmt: skip
    if variant == "torchrun":
        settings |= {"LAUNCHER": "torchrun", "MASTER_PORT": str(free_port())}
    else:
        settings |= {"LAUNCHER": "fork", "MAX_RESTARTS": str(setting.restarts if restarts_in_place(variant) else 0)}
        settings |= {"STANDBY": STANDBY[variant]} if variant in STANDBY else {}
        settings |= {"IN_PROCESS_RESTART": "1"} if variant == IN_PROCESS else {}
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    preset = f"tiny_tp{setting.tp}_pp{setting.pp}"
    launch = [sys.executable, "-m", "tools.restart_bench", "run", preset]
    done = subprocess.run(launch, cwd=ROOT, env=kept | settings, capture_output=True, text=True)
    if done.returncode:
        raise MeasurementError(f"{preset} failed: {done.stderr[-2000:]}")
    return shlex.split(done.stdout)


def environment_of_plain(setting: Setting) -> list[str]:
    """Words that run what follows as the demonstration's ranks are run on CPUs."""
    environment = {
        "PYTHONUNBUFFERED": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "", "LOCAL_SIZE": str(setting.world_size), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    return ["env", *(f"{name}={value}" for name, value in environment.items())]


def arguments_of_plain(setting: Setting, save: Path) -> list[str]:
    """The command line of a plain script, which saves to and resumes from `save`."""
    return [
        "--data", str(setting.data / "corpus_text_document"), "--save", str(save),
        "--tensor-parallel", str(setting.tp), "--pipeline-parallel", str(setting.pp), "--vocab-size", str(_VOCABULARY),
        "--global-batch", str(setting.global_batch), "--iterations", str(setting.iterations),
        "--save-interval", str(SAVE_INTERVAL), "--dtype", setting.dtype,
    ]  # fmt: skip


def _plain(setting: Setting, save: Path) -> list[str]:
    return [
        *environment_of_plain(setting),
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc_per_node", str(setting.world_size),
        "--rdzv_backend", "static", "--master_addr", "127.0.0.1", "--master_port", str(free_port()),
        "--max_restarts", "0", "-m", PLAIN, *arguments_of_plain(setting, save),
    ]  # fmt: skip
