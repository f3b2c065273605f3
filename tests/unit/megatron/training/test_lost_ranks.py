"""What is told of an operation that failed for want of another rank, and of which errors nothing is told."""

from __future__ import annotations

import ast
import datetime
from pathlib import Path

import pytest
from torch.distributed import DistBackendError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megatron.config import Config
from megatron.config.arguments import config_from_args, parse_args
from megatron.parallel.lost_peers import has_timed_out
from megatron.parallel.tree import AgreementLostError, AgreementTimeoutError
from megatron.startup.watch import Watch
from megatron.training.lost_ranks import ACTIVITIES, explain
from megatron.training.trainer import is_its_own  # pyright: ignore[reportPrivateUsage]

ROOT = Path(__file__).resolve().parents[4]
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --train-iters 2 "
    "--lr 1e-3 --data-path /d --tokenizer-type NullTokenizer --vocab-size 8 --distributed-timeout-minutes 0.5"
)
GLOO = "[/b/gloo/transport/tcp/pair.cc:534] "


@pytest.fixture(scope="module")
def config() -> Config:
    return config_from_args(parse_args(FLAGS.split()), {})


@pytest.fixture
def watch(config: Config) -> Watch:
    """Of a rank that is alone: it asks nobody."""
    return Watch(config)


def test_every_activity_is_a_function_that_is_there() -> None:
    for place in ACTIVITIES:
        module, _, name = place.partition(":")
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, place


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (GLOO + "Timed out waiting 30000ms for recv operation to complete", "waited longer than"),
        (GLOO + "Connection closed by peer [127.0.0.1]:2190", "lost the connection to another rank"),
        (GLOO + "Read error [127.0.0.1]:2190: Connection reset by peer", "lost the connection to another rank"),
        (GLOO + "writev [127.0.0.1]:2190: Broken pipe", "lost the connection to another rank"),
    ],
)
def test_gloo(config: Config, watch: Watch, text: str, part: str) -> None:
    error = RuntimeError(text)
    found = explain(error, config, watch)
    assert found is not None and "\n" not in found
    assert part in found and "--distributed-timeout-minutes 0.5" in found
    assert has_timed_out(error) == (part == "waited longer than")


# As torch (NCCLUtils.cpp, ProcessGroupNCCL.cpp) says it where a node was lost: the names of NCCL's results.
@pytest.mark.parametrize(
    "text",
    [
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2353, remote process exited or there "
        "was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or a "
        "remote process exiting prematurely.",
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled system error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclSystemError: System call (e.g. socket, malloc) or "
        "external library call failed or device error.",
        "NCCL communicator was aborted on rank 1.",
    ],
)
def test_nccl(config: Config, watch: Watch, text: str) -> None:
    error = DistBackendError(text)
    assert not is_its_own(error)
    found = explain(error, config, watch)
    assert found is not None and "\n" not in found and "lost the connection to another rank" in found


@pytest.mark.parametrize(
    "text",
    [
        "DataLoader worker (pid 4711) is killed by signal: Killed. ",
        "DataLoader worker (pid(s) 4711, 4712) exited unexpectedly",
        "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: uncorrectable NVLink error detected during the execution",
        "CUDA error: unspecified launch failure\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    ],
)
def test_faults_of_the_host(config: Config, watch: Watch, text: str) -> None:
    error = RuntimeError(text)
    assert not is_its_own(error)
    found = explain(error, config, watch)
    assert found is not None and "\n" not in found and "this host or its device failed" in found


def test_errors_of_the_program_on_the_device_are_its_own(config: Config, watch: Watch) -> None:
    for text in ("CUDA error: device-side assert triggered", "CUDA error: an illegal memory access was encountered"):
        assert is_its_own(RuntimeError(text)) and explain(RuntimeError(text), config, watch) is None


def test_store(config: Config, watch: Watch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True)
    store.set_timeout(datetime.timedelta(milliseconds=10))
    with pytest.raises(RuntimeError) as caught:
        store.get("never set")
    assert "waited longer than --distributed-timeout-minutes 0.5" in (explain(caught.value, config, watch) or "")


def test_agreement_that_was_lost_tells_itself(config: Config, watch: Watch) -> None:
    assert explain(AgreementLostError("the ranks cannot agree"), config, watch) == "the ranks cannot agree"


def test_an_agreement_that_passed_its_deadline(config: Config, watch: Watch) -> None:
    error = AgreementTimeoutError("rank 1 on a has waited 30 s for rank 2 on b, or for ranks behind it")
    found = explain(error, config, watch)
    assert found is not None and "the agreement of all ranks between the ranks waited longer than --distrib" in found
    assert has_timed_out(error) and not has_timed_out(AgreementLostError("timed out"))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Error(s) in loading state_dict for Linear"),
        RuntimeError("the upload timed out"),  # not of torch.distributed
        ValueError(GLOO + "Connection closed by peer"),
    ],
)
def test_other_errors_keep_their_traceback(config: Config, watch: Watch, error: Exception) -> None:
    assert explain(error, config, watch) is None and not has_timed_out(error)
