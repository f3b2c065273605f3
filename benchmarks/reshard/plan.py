"""What is to be measured. Imports nothing heavy: the command line needs it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

Layout = tuple[int, int, int]  # TP, PP, DP

ENGINES = ("torch", "lazy")
SOURCE = (2, 2, 2)  # TP, PP, DP of the checkpoint
TARGETS = ((1, 4, 1), (4, 1, 2))  # of those who load it

PLAIN, DIRECT = "plain", "direct"
# Name -> (way, engine that saved). "plain" is of the same state, saved on the layout that loads it.
VARIANTS: dict[str, tuple[str, str]] = {
    f"{way} {engine}": (way, engine) for engine in ENGINES for way in (PLAIN, DIRECT)
}
BYTES_PER_PARAMETER = 14  # bf16 weight in a layer file; fp32 master weight and two moments in the shard
LAYERS = 8
_HIDDEN_STEP = 128  # heads of 32 channels, over 4 ranks of TP


@dataclass(frozen=True)
class Plan:
    """What all ranks of one layout are told: with `rounds` None, to save what others load; else to load and measure."""

    hidden_size: int
    layout: Layout
    directory: str
    rounds: int | None

    @property
    def output(self) -> Path:
        return Path(self.directory, "samples_" + "_".join(map(str, self.layout)) + ".jsonl")


def hidden_size(num_bytes: int) -> int:
    """Of a LLaMA-style model whose checkpoint has about `num_bytes`.

    A layer has 12.25 hidden^2 parameters (four projections and an MLP of 2.75 hidden), the embedding and the head,
    of 4 hidden tokens each, 8 hidden^2.
    """
    parameters = num_bytes / BYTES_PER_PARAMETER
    steps = round(math.sqrt(parameters / (LAYERS * 12.25 + 8)) / _HIDDEN_STEP)
    return max(1, steps) * _HIDDEN_STEP


def model_flags(hidden: int, tp: int, pp: int) -> list[str]:
    """Flags of that model; DP follows from the number of ranks."""
    return [
        "--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp),
        "--num-layers", str(LAYERS), "--hidden-size", str(hidden), "--ffn-hidden-size", str(hidden * 11 // 4),
        "--num-attention-heads", str(hidden // 32), "--seq-length", "32", "--micro-batch-size", "1",
        "--global-batch-size", "8", "--train-iters", "1", "--lr", "1e-4", "--bf16",
        "--use-rotary-position-embeddings", "--untie-embeddings-and-output-weights", "--swiglu",
        "--normalization", "rmsnorm", "--disable-bias-linear",
        "--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size(hidden) - 1), "--data-path", "none",
    ]  # fmt: skip


def vocab_size(hidden: int) -> int:
    """A multiple of what any TP here pads to, so that no layout needs rows of its own."""
    return 4 * hidden
