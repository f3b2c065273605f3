"""The same error at the same iteration in three starts in a row: the next start names what is suspected, and ends."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.config.errors import REPEATED
from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder
from tests.dist.harness import ROOT, Run, Zygote, losses, records
from tests.dist.light_starts import IMPORTS, light_starts
from tests.dist.test_launch import environment
from tests.dist.tiny_runs import SINGLE, Launcher
from tests.object_storage import BUCKET, serving

SEQ_LENGTH = 16
RUN = (
    f"--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length {SEQ_LENGTH} --micro-batch-size 1 --lr 1e-4 "
    "--train-iters 40 --log-interval 1 --eval-iters 0 --num-workers 0 --split 100,0,0 --tokenizer-type NullTokenizer "
    "--vocab-size 100 --save-interval 1 --checkpoint-durability none"
).split()
NO_TOKEN = 60000  # a token that the vocabulary does not have: what a damaged file holds


def write_corpus(prefix: Path, *, damaged: bool) -> list[str]:
    """Forty samples, one of which has a token that there is none of; the flags of the dataset."""
    builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    for number in range(40):
        tokens = np.full(SEQ_LENGTH, NO_TOKEN if damaged and number == 20 else number, dtype=np.uint16)
        builder.add_doc(tokens, [SEQ_LENGTH])
    builder.finalize(f"{prefix}.idx")
    return ["--data-path", str(prefix)]


@pytest.fixture(scope="module")
def failed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> tuple[Launcher, Path, list[Run]]:
    """A run that the damaged sample has ended three times; --save of it."""
    tmp = tmp_path_factory.mktemp("failed")
    launcher = Launcher(zygote, write_corpus(tmp / "corpus", damaged=True), tmp)
    return launcher, tmp / "save", [start(launcher, tmp / "save") for _ in range(3)]


def start(launcher: Launcher, save: Path, *flags: str) -> Run:
    return launcher.run(SINGLE, *RUN, "--save", save, "--load", save, *flags)


def reached(save: Path, cycle: int | None = None) -> int:
    return max(losses(save / "restart_trace", cycle))


def test_the_start_after_three_names_the_checkpoint_and_the_iteration(failed: tuple[Launcher, Path, list[Run]]) -> None:
    """Before torch is imported; then once from the checkpoint before, and over the step once the cause is mended."""
    launcher, save, runs = failed
    assert [run.exit_codes for run in runs] == [[1]] * 3
    last = reached(save)
    events = [record for record in records(save / "restart_trace") if record["type"] == "event"]
    errors = [event for event in events if event["phase"] == "training_error"]
    assert [event["step"] for event in errors] == [last + 1] * 3, errors
    assert all(event["operation"] == "failure" and event["detail"].startswith("IndexError: ") for event in errors)
    flags = [*launcher.dataset, *RUN, "--save", str(save), "--load", str(save)]
    (refused, back) = light_starts([flags, [*flags, "--on-repeated-error", "back"]])
    assert refused.exit_code == REPEATED and back.exit_code == IMPORTS
    told = rf"error: iteration {last + 1} has ended 3 starts in a row with the same error \(rank 0: IndexError: .*\), "
    assert re.search(told, refused.output) and f" and {save}/global_step{last}. " in refused.output, refused.output
    assert f"That checkpoint, or the data of iteration {last + 1} or the program, is suspected" in refused.output

    older = start(launcher, save, "--on-repeated-error", "back")
    assert older.exit_codes == [1] and f"going back to global_step{last - 1}" in older.output
    assert f"resumed from iteration {last - 1} " in older.output
    no_help = start(launcher, save, "--on-repeated-error", "back")
    assert no_help.exit_codes == [REPEATED] and "As going back has not helped, the data of iteration" in no_help.output

    write_corpus(Path(launcher.dataset[1]), damaged=False)
    mended = start(launcher, save, "--on-repeated-error", "retry", "--exit-interval", str(last + 2))
    assert mended.exit_codes == [0] and "going on all the same" in mended.output
    assert start(launcher, save, "--exit-interval", str(last + 3)).exit_codes == [0]


def test_the_launcher_does_not_start_again_what_would_end_so_again(failed: tuple[Launcher, Path, list[Run]]) -> None:
    """Whatever --max-restarts allows: exit status 65, after three starts and the one that tells of them.

    Here of a run that ends before its first checkpoint, so that each start is a first one.
    """
    tmp = failed[0].directory / "launched"
    tmp.mkdir()
    command = [sys.executable, str(ROOT / "megatron" / "launch"), "--max-restarts", "9", str(ROOT / "pretrain_gpt.py")]
    save = ["--save", str(tmp / "save"), "--save-interval", "100"]
    command += [*write_corpus(tmp / "corpus", damaged=True), *RUN, *save]
    ended = subprocess.run(command, env=environment(tmp), capture_output=True, text=True, check=False)
    assert ended.returncode == REPEATED, ended.stderr[-3000:]
    assert ended.stderr.count("starting all ranks again") == 3 and "a repeated error is not retried" in ended.stderr


# pretrain_gpt.py with a fault in the forward pass of iteration 3, on rank 1.
CRASHES = """
import ctypes, os, signal, sys
sys.path.insert(0, {root!r})
from megatron.training import pretrain, trainer
from pretrain_gpt import ENTERED_NS, get_batch_pipe, model_provider, train_valid_test_datasets_provider
begin = trainer._begin_iteration
def fails_in_the_third(running):
    if running.progress.iteration == 2 and os.environ["RANK"] == "1":
        {fault}
    return begin(running)
trainer._begin_iteration = fails_in_the_third
given = train_valid_test_datasets_provider, model_provider, get_batch_pipe
raise SystemExit(pretrain(*given, entered_ns=ENTERED_NS))
"""


@pytest.mark.parametrize(
    ("name", "fault"),
    [  # of a SIGSEGV the suite has the start that goes back in object storage, below
        pytest.param("SIGSEGV", "ctypes.string_at(0)", marks=pytest.mark.nightly(minutes=1)),
        ("SIGABRT", "os.abort()"),
    ],
)
def test_a_crash_at_the_same_iteration_counts_by_its_signal(tmp_path: Path, name: str, fault: str) -> None:
    """Two ranks in one process group: the other one ends since it has lost its peer, which is not the error."""
    script = tmp_path / "crashes.py"
    script.write_text(CRASHES.format(root=str(ROOT), fault=fault))
    command = [sys.executable, str(ROOT / "megatron" / "launch"), "--nproc-per-node", "2", "--max-restarts", "9"]
    flags = ["--save", str(tmp_path / "save"), "--save-interval", "2", "--load", str(tmp_path / "save")]
    command += [str(script), *write_corpus(tmp_path / "corpus", damaged=False), *RUN, *flags]
    ended = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert ended.returncode == REPEATED, ended.stderr[-3000:]
    assert f"iteration 3 has ended 3 starts in a row with the same error (rank 1: {name} in " in ended.stderr
    assert f"ended by {name}" in ended.stderr and "/global_step2. That checkpoint, or the data of" in ended.stderr


@pytest.mark.parametrize(
    ("name", "fault"),
    [("SIGSEGV in ", "ctypes.string_at(0)"), ("ValueError: a bad sample", "raise ValueError('a bad sample')")],
)
def test_going_back_with_save_in_object_storage(tmp_path: Path, name: str, fault: str) -> None:
    """One launch: three starts end so, the fourth goes on from the checkpoint before, to no avail."""
    script, uri, node = tmp_path / "crashes.py", f"s3://{BUCKET}/repeated", tmp_path / "node"
    script.write_text(CRASHES.format(root=str(ROOT), fault=fault))
    command = [sys.executable, str(ROOT / "megatron" / "launch"), "--nproc-per-node", "2", "--max-restarts", "9"]
    flags = ["--save", uri, "--load", uri, "--storage-cache", str(node), "--on-repeated-error", "back"]
    command += [str(script), *write_corpus(tmp_path / "corpus", damaged=False), *RUN, *flags]
    command += ["--restart-trace-dir", str(tmp_path / "trace")]
    with serving() as server:
        env = environment(tmp_path) | server.environment()
        ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    told = ended.stderr
    assert ended.returncode == REPEATED, told[-3000:]
    assert told.count("starting all ranks again") == 4 and told.count("going back to global_step1, as") == 1
    assert f"iteration 3 has ended 3 starts in a row with the same error (rank 1: {name}" in told
    assert f"going on from {uri}/global_step1 and {uri}/global_step2. As going back has not helped" in told
    left = [path for path in node.rglob("*") if path.is_file() and not path.parent.name.startswith("restart_storage_")]
    assert len(left) <= 1, left  # where a crash of the last one would be; ranks that are ended leave their directories
