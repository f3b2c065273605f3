"""Published sizes of checkpoints, and those of the tensors that ckpt-plan finds for the same model and layout."""

from __future__ import annotations

from collections.abc import Iterator

from tools.ckpt_plan.kinds import WEIGHTS
from tools.ckpt_plan.presets import config_for, config_from_flags
from tools.ckpt_plan.tensors import plan_tensors

from .figure import Figure, Source

_GIB, _TB, _TIB = float(1 << 30), 1e12, float(1 << 40)
_BLOOM = Source(
    "BLOOM-176B, bigscience-workshop/bigscience, train/tr11-176B-ml/README.md",
    "https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/README.md",
)
_NEOX = Source(
    "GPT-NeoX-20B, EleutherAI/gpt-neox, README.md and configs/20B.yml", "https://github.com/EleutherAI/gpt-neox"
)
_MEGATRON = Source(
    "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021, arXiv 2104.04473",
    "https://arxiv.org/abs/2104.04473",
    "a conversion of its text; table 1 in notes on it",
)
_MLPERF = Source(
    "MLPerf Storage, mlcommons/storage, Rules.md (commit 0366ccf)",
    "https://github.com/mlcommons/storage/blob/main/Rules.md",
)
_MODELS = {  # flags of the models that are no presets: the sources' shapes, classic GPT blocks with biases
    "bloom": "--num-layers 70 --hidden-size 14336 --num-attention-heads 112 --position-embedding-type alibi "
    "--embed-layernorm --bf16",
    "neox": "--num-layers 44 --hidden-size 6144 --num-attention-heads 64 --use-rotary-position-embeddings "
    "--untie-embeddings-and-output-weights --fp16",
    "megatron": "--num-layers 128 --hidden-size 25600 --num-attention-heads 160 --fp16",
}
_RUN = (
    "--seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --train-iters 1 --lr 1e-4 --zero-stage 1 "
    "--tokenizer-type NullTokenizer --data-path none"
)


def figures() -> list[Figure]:
    """The figures, by source."""
    return [*_bloom(), *_neox(), _trillion(), *_mlperf()]


def _bytes(model: str, vocabulary: int, tp: int, pp: int, dp: int) -> dict[str, int]:
    flags = f"{_MODELS[model]} {_RUN} --vocab-size {vocabulary - 1}"  # NullTokenizer adds the end of a document
    layout = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
    return plan_tensors(config_from_flags(f"{flags} {layout}".split(), dp, vocabulary)).by_kind


def _bloom() -> Iterator[Figure]:
    kinds = _bytes("bloom", 250680, 4, 12, 8)
    inputs = "70 layers, 14336 wide, 112 heads, vocabulary 250880, TP4 PP12 DP8, ALiBi, --embed-layernorm, tied, bf16"
    yield Figure(
        "BLOOM-176B, bf16 weights",
        _BLOOM,
        "Main info",
        329,
        "GiB",
        inputs,
        kinds[WEIGHTS] / _GIB,
        limit=-0.01,
        why="only GiB and TiB fit both numbers",
        unit_chosen=True,
    )
    yield Figure(
        "BLOOM-176B, weights and optimizer",
        _BLOOM,
        "Main info",
        2.3,
        "TiB",
        inputs,
        sum(kinds.values()) / _TIB,
        digits=1,
        unit_chosen=True,
    )


def _neox() -> Iterator[Figure]:
    kinds = _bytes("neox", 50257, 2, 4, 12)
    inputs = "44 layers, 6144 wide, 64 heads, vocabulary 50432, TP2 PP4 DP12, rotary, untied, fp16"
    yield Figure(
        "GPT-NeoX-20B, slim weights",
        _NEOX,
        "Download Links",
        39,
        "GiB",
        inputs,
        kinds[WEIGHTS] / _GIB,
        limit=-0.02,
        why="only GiB fits both numbers, the smaller one rounded up",
        unit_chosen=True,
    )
    yield Figure(
        "GPT-NeoX-20B, full weights",
        _NEOX,
        "Download Links",
        268,
        "GiB",
        inputs,
        sum(kinds.values()) / _GIB,
        unit_chosen=True,
    )


def _trillion() -> Figure:
    kinds = _bytes("megatron", 51200, 8, 64, 6)
    inputs = "128 layers, 25600 wide, 160 heads, vocabulary 51200, 2048 tokens, TP8 PP64 DP6"
    return Figure(
        "Megatron-LM's 1T model",
        _MEGATRON,
        "5.10",
        13.8,
        "TB",
        inputs,
        sum(kinds.values()) / _TB,
        digits=1,
        limit=0.03,
        why="13.8 TB are 13.7 bytes for each of its 1.008e12 parameters, and not 14",
    )


def _mlperf() -> Iterator[Figure]:
    odd = "the table's shape has 1.18e12 parameters of 14 bytes each; what the rest is, the rules do not tell"
    table = [
        # model, TP, PP, DP, size in GiB, digits, limit, the reason
        ("7b", 1, 1, 8, 105, 0, 0.0, ""),
        ("mlperf70b", 8, 1, 8, 912, 0, -0.001, "half a GiB, which the rules do not tell either"),
        ("405b", 8, 32, 2, 5290, -1, 0.0, ""),
        ("1t", 8, 64, 2, 18000, -3, -0.15, odd),
    ]
    inputs = "shape and layout of table 2; vocabulary 128256 (configs/dlio/workload)"
    names = {"7b": "8B", "mlperf70b": "70B", "405b": "405B", "1t": "1T"}
    for model, tp, pp, dp, size, digits, limit, why in table:
        kinds = plan_tensors(config_for(model, tp, pp, dp, vocab_size=128256)).by_kind
        yield Figure(
            f"MLPerf Storage, {names[model]}",
            _MLPERF,
            "table 2",
            size,
            "GiB",
            inputs,
            sum(kinds.values()) / _GIB,
            digits=digits,
            limit=limit,
            why=why,
            unit_chosen=model in ("405b", "1t"),
        )
