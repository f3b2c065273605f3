"""The memory of activations against what autograd really keeps of a layer, and against the published formula."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config import Config
from megatron.model.alibi import alibi_bias
from megatron.model.experts import AuxiliaryLoss
from megatron.model.transformer import ParallelTransformerLayerPipe
from megatron.parallel.placement import Placement
from megatron.parallel.topology import SequenceGroup, TensorParallelGroup
from tools.ckpt_plan.activations import activation_bytes, head_bytes, in_flight, layer_bytes, loss_chunk_bytes
from tools.ckpt_plan.presets import config_for, config_from_flags

BATCH, SEQ, HIDDEN, HEADS = 2, 64, 64, 4
CPU = torch.device("cpu")
GPT = (
    f"--num-layers 4 --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {SEQ} "
    f"--max-position-embeddings {SEQ} --micro-batch-size {BATCH} --train-iters 2 --lr 1e-3 --data-path x "
    "--tokenizer-type NullTokenizer --vocab-size 99 --attention-dropout 0 --no-query-key-layer-scaling"
)
LLAMA = (
    "--use-rotary-position-embeddings --untie-embeddings-and-output-weights --swiglu --normalization rmsnorm "
    "--disable-bias-linear --ffn-hidden-size 160"
)


def config_of(flags: str, tp: int = 1, pp: int = 1) -> Config:
    layout = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
    return config_from_flags(f"{GPT} {layout} {flags}".split(), 1, 100)[0]


def kept_by_autograd(
    config: Config,
    tp: TensorParallelGroup,
    device: torch.device = CPU,
    experts: int = 1,
    sequence: SequenceGroup | None = None,
) -> int:
    """Bytes that are held for the backward pass of one layer, parameters and tables that all layers share left out."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[config.model.params_dtype]
    sequence = sequence or SequenceGroup()
    place = Placement(tp, dtype, device, sequence)
    length = SEQ // (tp.size if tp.splits_sequence else 1) // sequence.size
    auxiliary = AuxiliaryLoss(config.model.moe_loss_coeff) if experts > 1 else None
    layer = ParallelTransformerLayerPipe(config.model, place, experts, auxiliary)
    x = torch.randn(BATCH, length, HIDDEN, dtype=dtype, device=device, requires_grad=True)
    layer(x)  # makes the tables
    made = Storages()
    with made:
        y = layer(x)
    result = y.untyped_storage().data_ptr()
    gc.collect()
    return x.untyped_storage().nbytes() + sum(size for pointer, size in made.alive().items() if pointer != result)


class Storages(TorchDispatchMode):
    """The memory of the results of all operations, as far as something still holds it."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def alive(self) -> dict[int, int]:
        """Bytes by address."""
        return {pointer: size for pointer, (storage, size) in self._made.items() if not storage.expired()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple) else (results,):
            if isinstance(result, torch.Tensor):
                storage = result.untyped_storage()
                if storage.data_ptr() not in given:
                    self._made[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return results


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        f"--bf16 {LLAMA} --num-key-value-heads 2 --hidden-dropout 0",
        f"--bf16 {LLAMA} --hidden-dropout 0.1",
        "--bf16 --hidden-dropout 0.1",
        "--hidden-dropout 0",
        f"--bf16 {LLAMA} --num-key-value-heads 2 --hidden-dropout 0 --recompute-granularity selective",
        "--bf16 --hidden-dropout 0.1 --recompute-granularity selective",
        "--bf16 --hidden-dropout 0 --position-embedding-type alibi --num-key-value-heads 2",
    ],
)
def test_a_layer_keeps_what_autograd_keeps(flags: str) -> None:
    config = config_of(flags)
    expected = BATCH * SEQ * (layer_bytes(config.model, 1) + more_on_a_cpu(config))
    assert expected == kept_by_autograd(config, TensorParallelGroup())


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        f"--bf16 {LLAMA}", "", "--topk 2 --moe-train-capacity-factor 1.5", "--bf16 --mlp-type residual",
        f"--bf16 {LLAMA} --recompute-granularity selective",
    ],
)  # fmt: skip
def test_experts_keep_their_slots(flags: str) -> None:
    """Within 3 %: not counted are numbers of slots and weights, and results of so few features as here."""
    config = config_of(f"--num-experts 4 --hidden-dropout 0 {flags}")
    found = layer_bytes(config.model, 1, experts=4, tokens=BATCH * SEQ)
    kept = kept_by_autograd(config, TensorParallelGroup(), experts=4)
    assert found == pytest.approx(kept / (BATCH * SEQ), rel=0.03)


def test_layers_with_experts_are_counted_where_they_are() -> None:
    """Every third of four, on the second of two stages; recomputed chunks have the larger of their layers."""
    flags = "--num-experts 4 --expert-interval 3 --hidden-dropout 0 --global-batch-size 2"
    config, dense = config_of(flags, pp=2), config_of("--hidden-dropout 0 --global-batch-size 2", pp=2)
    model, tokens = config.model, BATCH * SEQ
    more = tokens * (layer_bytes(model, 1, experts=4, tokens=tokens) - layer_bytes(model, 1))
    assert more > 0
    found = [activation_bytes(config, 128, 2, stage) - activation_bytes(dense, 128, 2, stage) for stage in (0, 1)]
    assert found == [0, more]
    recomputed = config_of(f"{flags} --checkpoint-activations", pp=2)
    plain = config_of("--hidden-dropout 0 --global-batch-size 2 --checkpoint-activations", pp=2)
    assert activation_bytes(recomputed, 128, 2, 1) - activation_bytes(plain, 128, 2, 1) == more


def more_on_a_cpu(config: Config) -> int:
    """Per token: on a CPU dropout masks and LayerNorm's two statistics have the training's data type."""
    masks = 2 * HIDDEN if config.model.hidden_dropout else 0
    in_bf16 = (config.model.params_dtype, config.model.normalization) == ("bf16", "layernorm")
    return masks - (2 * 2 * 2 if in_bf16 else 0)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_layer_of_the_paper_needs_what_the_paper_says(tp: int) -> None:
    """arXiv:2205.05198, equation 2 without the attention matrix; beside it the statistics of norms and softmax."""
    model = config_of("--bf16 --hidden-dropout 0.1").model
    of_norms, of_heads = 16, 4 * HEADS
    assert layer_bytes(model, tp) - of_norms - of_heads // tp == HIDDEN * (10 + 24 // tp)
    # equation 4: sequence parallelism divides all of it
    assert layer_bytes(model, tp, sequence_parallel=True) == (34 * HIDDEN + of_norms + of_heads) // tp
    # Selective recomputation: inputs of two layers, 2 each, and what GELU makes of 4 h, 8.
    selective = replace(model, recompute_granularity="selective")
    assert layer_bytes(model, tp) - layer_bytes(selective, tp) == HIDDEN * (4 + 8 // tp)


def test_a_stage_holds_what_its_schedule_has_in_flight() -> None:
    config = config_of("--bf16 --hidden-dropout 0 --global-batch-size 12", pp=4)  # 6 micro batches
    assert [in_flight(config, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(replace(config, training=replace(config.training, global_batch_size=4)), 0) == 2
    layer, boundary, tokens = layer_bytes(config.model, 1), 2 * HIDDEN, BATCH * SEQ
    found = [activation_bytes(config, 128, 1, stage) for stage in range(4)]
    head = head_bytes(config.model, 128, 1)
    kept = [4 * (layer + boundary), 3 * (layer + 2 * boundary), 2 * (layer + 2 * boundary), layer + boundary + head]
    of_stages = [tokens * each for each in kept]
    assert found == [*of_stages[:3], of_stages[3] + loss_chunk_bytes(tokens, 128, 1)]


def test_biases_are_there_once_and_the_embeddings_norm_keeps_its_input() -> None:
    """ALiBi's biases, s x s for each head of a rank; on the first stage the norm's input and its statistics."""
    config = config_of("--bf16 --hidden-dropout 0 --position-embedding-type alibi --embed-layernorm", tp=2, pp=2)
    plain = config_of("--bf16 --hidden-dropout 0", tp=2, pp=2)
    made = alibi_bias(HEADS, range(HEADS // 2), SEQ, torch.bfloat16, CPU)
    of_norm = in_flight(config, 0) * BATCH * SEQ * (2 * HIDDEN + 2 * 4)
    more = [activation_bytes(config, 128, 2, stage) - activation_bytes(plain, 128, 2, stage) for stage in (0, 1)]
    assert more == [made.nbytes + of_norm, made.nbytes]


def test_a_rank_holds_its_part_of_the_sequences() -> None:
    """Of hidden states and logits a half, of ALiBi's biases those of a half of the heads, for all tokens."""
    flags = "--bf16 --hidden-dropout 0 --position-embedding-type alibi --ds-sequence-parallel-size 2"
    config, _, _ = config_from_flags(f"{GPT} {flags}".split(), 2, 100)
    tokens = BATCH * SEQ // 2
    layer = layer_bytes(config.model, 1) + 2 * HIDDEN  # the results of attention before and after their exchange
    kept = tokens * (2 * layer + head_bytes(config.model, 128, 1)) + loss_chunk_bytes(tokens, 128, 1)
    biases = alibi_bias(HEADS, range(HEADS // 2), SEQ, torch.bfloat16, CPU).nbytes
    assert activation_bytes(config, 128, 2, 0) == kept + biases


def test_recomputation_keeps_the_inputs_of_chunks_and_one_chunk() -> None:
    flags = "--bf16 --hidden-dropout 0 --checkpoint-activations --checkpoint-num-layers 2"
    config = config_of(flags)
    expected = 2 * 2 * HIDDEN + 2 * layer_bytes(config.model, 1) + head_bytes(config.model, 128, 1)
    assert activation_bytes(config, 128, 4, 0) == BATCH * SEQ * expected + loss_chunk_bytes(BATCH * SEQ, 128, 1)
    split = config_of(f"{flags} --deepspeed-activation-checkpointing --partition-activations", tp=2)
    expected = 2 * HIDDEN + 2 * layer_bytes(split.model, 2) + head_bytes(split.model, 128, 2)
    assert activation_bytes(split, 128, 4, 0) == BATCH * SEQ * expected + loss_chunk_bytes(BATCH * SEQ, 128, 2)


def test_the_largest_preset_by_hand() -> None:
    """70b, TP 8, PP 8, bf16, recomputed layers, 8192 wide, 10 layers a stage: 2 KiB per token and layer in flight.

    That is 16 KiB over 8 ranks, among which --sequence-parallel splits it.
    """
    config, _, (_, padded) = config_for("70b", 8, 8, flags=["--checkpoint-activations"])
    tokens = config.training.micro_batch_size * config.model.seq_length
    flight = in_flight(config, 0)
    expected = tokens * (flight * 11 * 2048 + layer_bytes(config.model, 8, sequence_parallel=True))
    assert activation_bytes(config, padded, 10, 0) == expected
