"""Each bad input ends the run with one error that names flag or file, value and fix, before torch is imported."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.checkpointing.engines.registry import builtin_engines, redistributable_engines
from megatron.parallel.topology import Layout
from tests.dist.conftest import data_flags
from tests.dist.harness import HANGS_S, LLAMA_STYLE, ROOT, Zygote
from tests.dist.storage import drop_root_rights, fill, small_disk
from tests.dist.tiny_runs import Launcher, saving

GOLDEN = ROOT / "tests" / "golden" / "upstream_run" / "data"
MODEL = [
    *LLAMA_STYLE, "--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "64", "--num-attention-heads", "4",
    "--seq-length", "16", "--bf16",
]  # fmt: skip
TRAINING = [
    "--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "2", "--lr", "1e-3",
    "--log-interval", "1",
]  # fmt: skip
USAGE_ERROR = 2


@dataclass
class Inputs:
    """Files of a run that are a test's own, to be damaged."""

    directory: Path

    @property
    def prefix(self) -> Path:
        return self.directory / "corpus_text_document"

    @property
    def tokenizer(self) -> Path:
        return self.directory / "tokenizer.model"

    @property
    def flags(self) -> list[str]:
        return [*MODEL, *TRAINING, *data_flags(self.prefix, self.tokenizer)]

    def path(self, ending: str) -> Path:
        return self.tokenizer if ending == ".model" else Path(f"{self.prefix}{ending}")


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    directory = tmp_path / "inputs"
    directory.mkdir()
    for name in ("corpus_text_document.bin", "corpus_text_document.idx", "tokenizer.model"):
        shutil.copy(GOLDEN / name, directory / name)
    return Inputs(directory)


@pytest.fixture
def launcher(zygote: Zygote, tmp_path: Path, dataset: list[str]) -> Launcher:
    return Launcher(zygote, [*dataset, *MODEL, *TRAINING], tmp_path)


def cpu_seconds_of_children() -> float:
    """CPU time, which a busy machine does not lengthen, of the children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def refused(
    flags: list[str], world_size: int = 1, before: Callable[[], None] | None = None, code: int = USAGE_ERROR
) -> str:
    """The error of a process that ends with it, and with nothing else said and nothing heavy imported."""
    places = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    cpu_before = cpu_seconds_of_children()
    result = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "pretrain_gpt.py"), *flags],
        env=os.environ | places, capture_output=True, text=True, timeout=HANGS_S, preexec_fn=before,
    )  # fmt: skip
    seconds = cpu_seconds_of_children() - cpu_before
    lines = result.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    said = [line for line in lines if not line.startswith("import time:")]
    assert result.returncode == code, result.stdout + "\n".join(said)
    assert result.stdout == ""
    assert len(said) == 1 and said[0].startswith("error: "), said
    assert "megatron.config.arguments" in imported and not imported & {"torch", "deepspeed", "numpy"}
    assert seconds < 5.0  # 0.2 s
    return said[0].removeprefix("error: ")


@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
    [
        (
            ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"], 6,
            "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2 = 4 does not divide the world size 6: "
            "start a multiple of 4 processes, or change TP or PP",
        ),
        (
            ["--tensor-model-parallel-size", "8"], 8,
            "--num-attention-heads 4: not divisible by --tensor-model-parallel-size 8; use a multiple of it, "
            "or a TP that divides it",
        ),
        (
            ["--tensor-model-parallel-size", "4", "--num-key-value-heads", "2"], 4,
            "--num-key-value-heads 2: not divisible by --tensor-model-parallel-size 4; use a multiple of it, "
            "or a TP that divides it",
        ),
        (
            ["--tensor-model-parallel-size", "4", "--ffn-hidden-size", "66"], 4,
            "--ffn-hidden-size 66: not divisible by --tensor-model-parallel-size 4; use a multiple of it, "
            "or a TP that divides it",
        ),
        (
            ["--pipeline-model-parallel-size", "4"], 4,
            "--num-layers 2: is less than --pipeline-model-parallel-size 4, so a stage would have no layer; "
            "use at most 2 stages",
        ),
        (
            ["--micro-batch-size", "3"], 2,
            "--global-batch-size 4: not divisible by --micro-batch-size 3 x data-parallel size 2 = 6; "
            "use a multiple of 6",
        ),
        (
            ["--checkpoint-engine", "fast"], 1,
            "--checkpoint-engine fast: no such engine; there are: "
            + ", ".join(f"{name} ({entry.summary})" for name, entry in builtin_engines().items()),
        ),
        (["--num-layer", "2"], 1, "unknown flag --num-layer: did you mean --num-layers?"),
    ],
)  # fmt: skip
def test_flags_that_do_not_fit(inputs: Inputs, flags: list[str], world_size: int, message: str) -> None:
    assert refused([*inputs.flags, *flags], world_size) == message


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 9 // 10)


def corrupt(path: Path) -> None:
    path.write_bytes(b"\x00" * 8 + path.read_bytes()[8:])


def replace_by_text(path: Path) -> None:
    path.write_text('{"version": "1.0"}\n')


@pytest.mark.parametrize(
    ("ending", "damage", "message"),
    [
        (".idx", remove, "--data-path: {path}: No such file or directory; correct"),
        (".bin", remove, "--data-path: {path}: No such file or directory; correct"),
        (".idx", truncate, r"--data-path: {path} is truncated: \d+ bytes, and its header says \d+: make"),
        (".bin", truncate, r"--data-path {prefix}: {path} is truncated: it has \d+ bytes and its index needs"),
        (".idx", corrupt, r"--data-path: {path} is no index of the mmap format \(it starts with"),
        (".model", remove, "--tokenizer-model {path}: no such file; correct"),
        (".model", truncate, r"--tokenizer-model {path}: not a complete SentencePiece model \(.*\); give a"),
        (".model", replace_by_text, r"--tokenizer-model {path}: not a complete SentencePiece model \(.*\); give a"),
    ],
)  # fmt: skip
def test_damaged_files(inputs: Inputs, ending: str, damage: Callable[[Path], None], message: str) -> None:
    path = inputs.path(ending)
    damage(path)
    pattern = message.format(path=re.escape(str(path)), prefix=re.escape(str(inputs.prefix)))
    found = refused([*inputs.flags, *saving(inputs.directory / "save", 1)])
    assert re.match(pattern, found), found
    assert not (inputs.directory / "save").exists()  # nothing is made for a run that cannot start


def test_missing_gpt2_vocabulary(inputs: Inputs) -> None:
    absent = inputs.directory / "vocab.json"
    flags = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(absent), "--merge-file", str(absent)]
    found = refused([*inputs.flags, *flags])
    assert found == f"--vocab-file {absent}: no such file; correct the path: GPT2BPETokenizer needs this file"


def test_load_without_a_checkpoint(inputs: Inputs, launcher: Launcher) -> None:
    """It starts afresh and says so; with --exit-on-missing-checkpoint it does not start."""
    absent = inputs.directory / "absent"
    found = refused([*inputs.flags, "--load", str(absent), "--exit-on-missing-checkpoint"])
    assert found == (
        f"--load {absent}: no checkpoint there; correct the path, or drop --exit-on-missing-checkpoint "
        "to start from iteration 0"
    )
    run = launcher.train(Layout(tp=1, pp=1, dp=1), "--load", absent)
    assert f"--load {absent}: no checkpoint there (correct the path): training starts from iteration 0" in run.output
    assert "iteration        1/" in run.output


def test_save_directory_that_may_not_be_written(inputs: Inputs) -> None:
    locked = inputs.directory / "locked"
    locked.mkdir(mode=0o500)
    found = refused([*inputs.flags, *saving(locked / "save", 1)], before=drop_root_rights)
    assert found == (
        f"--save {locked / 'save'}: cannot be written to: Permission denied; "
        "give another directory, free space, or change its permissions"
    )


def test_save_directory_on_a_full_disk(inputs: Inputs) -> None:
    with small_disk(inputs.directory / "disk", 1 << 20) as mounted:
        if not mounted:
            pytest.skip("no disk of our own can be mounted here: run as root, with CAP_SYS_ADMIN")
        save = inputs.directory / "disk" / "save"
        fill(inputs.directory / "disk" / "ballast")
        found = refused([*inputs.flags, *saving(save, 1)])
    assert found == (
        f"--save {save}: cannot be written to: No space left on device; "
        "give another directory, free space, or change its permissions"
    )


def test_checkpoint_of_another_shape_or_layout(inputs: Inputs, launcher: Launcher) -> None:
    """It is said what differs, and what can be loaded onto another layout; by one rank of four."""
    save = launcher.directory / "run"
    saved = Layout(tp=2, pp=1, dp=1)
    launcher.train(saved, *saving(save, 2), "--checkpoint-engine", "dcp")
    tag = save / "global_step2"

    flags = [*inputs.flags, "--load", str(save), "--tensor-model-parallel-size", "2"]
    assert refused([*flags, "--hidden-size", "64", "--num-layers", "3"], world_size=2) == (
        f"{tag}: another model: num_layers is 2 in the checkpoint and 3 here; hidden_size is 32 in the checkpoint and "
        "64 here; kv_channels is 8 in the checkpoint and 16 here; give the flags of the run that saved it, or another "
        "--load"
    )
    *others, last = redistributable_engines()
    message = (
        f"{tag}: saved on TP2 PP1 DP1, but this run is TP2 PP1 DP2, and only a checkpoint of --checkpoint-engine "
        f"{', '.join(others)} or {last} can be loaded onto another layout: start with "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 on 2 ranks"
    )
    assert refused([*flags, "--load-tag", "global_step2"], world_size=4) == message
    run = launcher.run(Layout(tp=2, pp=1, dp=2), "--load", save, launcher=True)
    assert one_error(run.output, run.exit_codes) == message

    # Upstream's checkpoints say what they are in a pickle, which is read once torch is there.
    upstream = GOLDEN.parent
    run = launcher.run(Layout(tp=2, pp=1, dp=2), "--load", upstream, launcher=True)
    found = one_error(run.output, run.exit_codes)
    assert found.startswith(f"{upstream / 'global_step5'}: another model: num_layers is 4 in the checkpoint and 2 here")


def one_error(output: str, exit_codes: list[int]) -> str:
    """The one error of a run that rank 0 ended with code 2 and no other rank with 0."""
    errors = re.findall(r"^error.*", output, re.MULTILINE)
    assert exit_codes[0] == USAGE_ERROR and 0 not in exit_codes, (exit_codes, output)
    assert len(errors) == 1 and "Traceback" not in output, output
    return errors[0].removeprefix("error: ")


def test_no_rank_is_left_waiting(launcher: Launcher) -> None:
    """Even without a launcher that ends the others, which would wait in the rendezvous and fail otherwise."""
    run = launcher.run(Layout(tp=2, pp=1, dp=2), "--data-path", launcher.directory / "absent")
    assert run.exit_codes == [USAGE_ERROR] * 4
    assert run.log(0).startswith("error: --data-path: ")


def test_error_that_one_rank_alone_can_see(launcher: Launcher) -> None:
    """A file that only another node lacks: the rank there says so, since rank 0 does not know."""
    script = ROOT / "tests" / "dist" / "scripts" / "other_node.py"
    environment = {"ABSENT_ON_RANK_1": str(launcher.directory / "absent")}
    run = launcher.run(Layout(tp=2, pp=1, dp=1), script=str(script), env=environment, launcher=True)
    assert run.exit_codes[1] == USAGE_ERROR and run.exit_codes[0] != 0
    assert re.match(r"error on rank 1, \S+: --data-path: .*absent\.idx: No such file or directory", run.log(1))
    assert "error" not in run.log(0)


@pytest.mark.parametrize(
    ("kind", "exit_code", "message"),
    [("OSError", USAGE_ERROR, "error: of rank 1 alone"), ("KeyError", 1, "error: rank 1: KeyError: 'of rank 1 alone'")],
)
def test_only_an_error_of_the_data_ends_their_build_with_2(
    launcher: Launcher, kind: str, exit_code: int, message: str
) -> None:
    script = ROOT / "tests" / "dist" / "scripts" / "failing_rank.py"
    env = {"FAILS_AT": "megatron.data.gpt_dataset:_Planner", "FAILS_ON": "1", "FAILS_WITH": kind}
    run = launcher.run(Layout(tp=2, pp=1, dp=1), script=str(script), env=env)
    assert run.exit_codes == [exit_code] * 2, run.output[-6000:]
    assert message in run.log(0).splitlines() and ("Traceback" in run.log(1)) == (exit_code == 1)


def torchrun(flags: list[str], nproc: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [*command, str(ROOT / "pretrain_gpt.py"), *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )


def test_one_message_under_torchrun(inputs: Inputs) -> None:
    """All ranks meet the error, one tells; the launcher fails at once. What is wrong makes no difference to that."""
    truncate(inputs.path(".idx"))
    result = torchrun(inputs.flags, nproc=4)
    assert result.returncode != 0
    said = result.stdout + result.stderr
    errors = [line for line in said.splitlines() if line.startswith("error")]
    message = f"error: --data-path: {inputs.path('.idx')} is truncated"
    assert len(errors) == 1 and errors[0].startswith(message), said
