"""What engine `memory` asks of a host before it trains, and what the flags say of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron.checkpointing.engines.options import engine_options
from megatron.config import CheckpointConfig, ConfigError
from megatron.config.arguments import config_from_args, parse_args
from megatron.peers.pacing import MEASURED, Pacing
from megatron.training.slot_memory import Need, lack_of_memory, moments_in_host_memory, state_bytes

GIB = 1 << 30


def need(host: str, growth: float, state: float = 0, available: float = 10) -> Need:
    return Need(host, int(4 * GIB), int(growth * GIB), int(state * GIB), int(available * GIB))


def test_ranks_of_one_host_together_must_fit() -> None:
    assert lack_of_memory([need("a", 5), need("a", 5), need("b", 10)]) is None
    lack = lack_of_memory([need("a", 5), need("b", 5.1), need("b", 5)])
    assert lack is not None and lack.startswith("--checkpoint-engine memory: b keeps 2 ranks' saves in 8.00 GiB")
    assert "10.10 GiB must still be allocated and 10.00 GiB are free" in lack and lack.endswith(
        "--checkpoint-engine lazy"
    )


def test_what_training_is_yet_to_take_counts_on_the_cpu() -> None:
    lack = lack_of_memory([need("a", 6, state=5)])
    assert lack is not None and "in addition to 5.00 GiB for training itself" in lack


@pytest.mark.parametrize(
    ("flags", "first", "resumed"),
    [
        ("", (8000, 0), (4000, 0)),
        ("--save X --save-interval 1 --no-save-optim", (8000, 0), (4000, 0)),
        ("--cpu-optimizer", (6000, 4000), (2000, 0)),
        ("--optimizer sgd --sgd-momentum 0", (4000, 0), (4000, 0)),
    ],
)
def test_what_the_first_step_is_yet_to_put_into_host_memory_counts_and_nothing_that_is_there(
    flags: str, first: tuple[int, int], resumed: tuple[int, int]
) -> None:
    """1000 parameters in fp16 of two replicas: gradients of 2 B; of half of them 4 B in fp32, and moments of 8 B."""
    words = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --train-iters 1 "
        f"--lr 1 --fp16 --data-path X --tokenizer-type NullTokenizer --vocab-size 9 {flags}"
    )
    config = config_from_args(parse_args(words.split(), {}), {})
    for moments, state in ((0, first), (4000, resumed)):
        assert tuple(state_bytes(config, device, 1000, 2, moments) for device in ("cpu", "cuda")) == state


def test_moments_are_there_once_the_optimizer_has_stepped() -> None:
    shard = torch.zeros(500, requires_grad=True)
    adam, plain = torch.optim.Adam([shard]), torch.optim.SGD([shard])
    assert moments_in_host_memory(adam) == 0
    shard.grad = torch.ones(500)
    adam.step()
    plain.step()
    assert moments_in_host_memory(adam) == 2 * shard.nbytes + 4, "and the number of its step"
    assert moments_in_host_memory(plain) == 0


def test_a_restart_in_place_asks_for_no_more() -> None:
    assert lack_of_memory([need("a", 0, available=0.1)]) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"persist_interval": 5}, "--persist-interval 5: --checkpoint-engine torch keeps no saves in host"),
        (
            {"checkpoint_engine": "memory", "checksum": "none"},
            "--checksum none: --checkpoint-engine memory loads nothing",
        ),
        ({"checkpoint_engine": "memory", "persist_interval": 0}, "--persist-interval 0"),
        ({"replication_traffic": "interleave"}, "--replication-traffic interleave: --checkpoint-engine torch keeps no"),
        (
            {"checkpoint_engine": "memory", "replication_traffic": "interleave", "replicas": 1},
            "--replication-traffic interleave: --replicas 1 keeps no copy on another host",
        ),
        ({"replica_compression": "zstd"}, "--replica-compression zstd: --checkpoint-engine torch keeps no saves"),
        (
            {"checkpoint_engine": "memory", "replica_compression": "zstd", "replicas": 1},
            "--replica-compression zstd: --replicas 1 keeps no copy on another host",
        ),
        ({"checkpoint_engine": "memory", "replica_compression": "on"}, "--replica-compression on"),
        ({"checkpoint_engine": "memory", "replication_traffic": "idle"}, "--replication-traffic idle"),
        (
            {"checkpoint_engine": "memory", "span_alpha": 0.6},
            "--span-alpha 0.6: --replication-traffic naive sends copies at once; use interleave",
        ),
        (
            {"checkpoint_engine": "memory", "replication_traffic": "interleave", "span_alpha": 1.1},
            "--span-alpha 1.1: is a share; give at most 1",
        ),
    ],
)
def test_flags_that_do_not_fit(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        CheckpointConfig(save="x", save_interval=1, **flags)  # pyright: ignore[reportArgumentType]


def test_flags_of_geminis_artifact_pace_copies() -> None:
    flags = CheckpointConfig(
        save="x", save_interval=1, checkpoint_engine="memory", replication_traffic="interleave", comm_profile_steps=20,
        span_threshold=10, span_alpha=0.6, max_blocks_in_span=2, snapshot_buffer_size=4,
    )  # fmt: skip
    assert engine_options(flags, 0, 10.0).copy_pacing == Pacing(20, 10, 0.6, 2, 16 << 20)
    assert engine_options(CheckpointConfig(), 0, 10.0).copy_pacing == MEASURED


def test_copies_are_compressed_only_if_that_is_asked() -> None:
    flags = CheckpointConfig(save="x", save_interval=1, checkpoint_engine="memory", replica_compression="zstd")
    assert engine_options(flags, 0, 10.0).compress_copies
    assert not engine_options(CheckpointConfig(), 0, 10.0).compress_copies


def test_copies_of_other_hosts_must_fit_beside_a_hosts_own() -> None:
    needs = [need("a", 4), need("b", 4)]
    assert lack_of_memory(needs, [6 * GIB, 6 * GIB]) is None
    lack = lack_of_memory(needs, [0, 7 * GIB])
    assert lack is not None and "b keeps 1 ranks' saves in 4.00 GiB of host memory (two slots each), and copies" in lack
    assert "11.00 GiB must still be allocated" in lack and "or lower --replicas," in lack
    assert lack_of_memory([needs[0], needs[1]._replace(held=7 * GIB)], [0, 7 * GIB]) is None, "it has that already"


class Counted(list[Need]):
    """How often all needs are gone through."""

    passes = 0

    def __iter__(self) -> Iterator[Need]:
        self.passes += 1
        return super().__iter__()


def test_needs_of_more_hosts_are_not_gone_through_more_often() -> None:
    """On rank 0, while all others wait: with a pass for each host, 7 s of 16,384 ranks."""
    few, many = (Counted(need(f"host{host}", 4) for host in range(hosts)) for hosts in (3, 300))
    assert lack_of_memory(few) is lack_of_memory(many) is None
    assert few.passes == many.passes
