"""Trainings that are saved on one layout and loaded onto another, and what their checkpoints hold."""

from __future__ import annotations

import itertools
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import safetensors
import torch

from megatron.fileio.compressed_files import CompressedFile
from megatron.fileio.open_files import OpenFile
from megatron.parallel.topology import Layout
from tests.dist.harness import BLOOM_STYLE, EXPERTS, LLAMA_STYLE, Run
from tests.dist.tiny_runs import NO_DROPOUT, Launcher, buffered_saving
from tests.placement_reader import Reader, bits

# Sizes with few factors of two, so that flat groups need padding and partitions end within parameters.
SIZES = [
    "--num-layers", "4", "--hidden-size", "18", "--num-attention-heads", "8", "--seq-length", "16", *NO_DROPOUT,
    "--make-vocab-size-divisible-by", "8",
]  # fmt: skip
CLASSIC = [*SIZES, "--kv-channels", "5", "--ffn-hidden-size", "20"]
LLAMA = [
    *SIZES, *LLAMA_STYLE, "--num-key-value-heads", "4", "--kv-channels", "6", "--ffn-hidden-size", "12", "--bf16",
]  # fmt: skip
# Both styles of the model, and each precision: bf16 has a ZeRO optimizer of its own, the others share one.
STYLES = {
    "llama": LLAMA,
    "classic": CLASSIC,
    # A number of heads that is no power of two, which ALiBi's slopes depend on.
    "bloom": [*CLASSIC, *BLOOM_STYLE, "--num-attention-heads", "12"],
    "moe": [*LLAMA, *EXPERTS, "--mlp-type", "residual", "--disable-moe-token-dropping"],
    "classic_fp16": [*CLASSIC, "--fp16", "--initial-loss-scale", "1024"],
    # 501 tokens, padded to what TP divides and no further: another TP needs other rows.
    "llama_odd": [
        *LLAMA, "--make-vocab-size-divisible-by", "1", "--tokenizer-type", "NullTokenizer", "--vocab-size", "500",
    ],
}  # fmt: skip
TRAINING = [
    "--micro-batch-size", "1", "--global-batch-size", "4", "--lr", "1e-3", "--lr-warmup-iters", "1",
    "--lr-decay-iters", "9", "--lr-decay-style", "cosine", "--log-interval", "1",
]  # fmt: skip
SAVED = 2
LAYOUTS = [Layout(tp, pp, dp) for tp, pp, dp in itertools.product((1, 2, 4), repeat=3) if tp * pp * dp <= 8]
KINDS = ("weight", "master", "exp_avg", "exp_avg_sq")
TIED = "tied_modules.embed.word_embeddings.weight"
# The copies on the first and the last stage are summed and rounded apart: see test_checkpoint_placements.
TIED_ROUNDING = {TIED: 1e-6}

State = dict[tuple[str, str], torch.Tensor]  # (kind, parameter) -> the full tensor


def shown(layout: Layout) -> str:
    return "_".join(f"{axis}{size}" for axis, size in layout.as_dict().items())


class Model:
    """Trainings of one style of the model."""

    def __init__(self, launcher: Launcher, style: str) -> None:
        self.launcher = launcher
        self.style = style
        self.run: Run | None = None  # the last one
        self.flags = [*STYLES[style], *TRAINING]
        self._saved: dict[tuple[Layout, str], str] = {}

    def train(
        self, layout: Layout, name: str, iterations: int, load: str | None = None, *flags: str, engine: str = "lazy"
    ) -> Path:
        """Train until `iterations` are done, from the checkpoint in `load`; the directory that it saved to."""
        save = self.launcher.directory / name
        resume = ["--load", str(self.launcher.directory / load), "--exit-on-missing-checkpoint"] if load else []
        saves = [*buffered_saving(save, SAVED)[:-1], "--checkpoint-engine", engine]  # no hashes: they are of one layout
        iters = ["--train-iters", str(iterations)]
        self.run = self.launcher.train(layout, *self.flags, *saves, *iters, *resume, *flags)
        return save

    def resume(self, layout: Layout, load: Path, *flags: str) -> Run:
        """Load `load`, which need not succeed, and save nothing; the trace is in the directory `trace`."""
        trace = ["--restart-trace-dir", str(self.launcher.directory / "trace")]
        return self.launcher.run(layout, *self.flags, *trace, "--load", str(load), *flags)

    def saved(self, layout: Layout, engine: str = "lazy") -> str:
        """Name of a checkpoint after SAVED iterations on `layout`, trained once."""
        key = layout, engine
        if key not in self._saved:
            self._saved[key] = f"{engine}_{shown(layout)}"
            self.train(layout, self._saved[key], SAVED, engine=engine)
        return self._saved[key]

    def moved(self, old: Layout, new: Layout, engine: str = "lazy", *flags: str) -> Path:
        """Where a checkpoint of `engine` lies that was loaded onto `new`, and saved again at once."""
        name = "_".join([engine, shown(old), "to", shown(new), *flags])
        return self.train(new, name, SAVED, self.saved(old, engine), *flags)


def original(path: Path, save: Path) -> Path:
    """The file, or what it was before it was compressed."""
    if path.suffix == ".safetensors":
        return path
    restored = save / "restored.safetensors"
    with closing(CompressedFile(OpenFile(path, path.stat().st_size, "off"), path.name)) as file:
        content = bytearray(file.num_bytes)
        file.read(memoryview(content), 0)
    restored.write_bytes(content)
    return restored


def read(save: Path, step: int = SAVED) -> Reader:
    """All that a checkpoint of engine lazy holds, by code that knows the placements alone."""
    reader = Reader(rounding=TIED_ROUNDING)
    for path in sorted((save / f"global_step{step}").glob("*.safetensors*")):
        with safetensors.safe_open(original(path, save), "pt") as file:
            described = described_in(file.metadata())
            for name in file.keys():  # noqa: SIM118  it is no dict
                if "placement" in described.get(name, {}):
                    reader.add(file.get_tensor(name), described[name]["placement"])
    return reader


def described_in(metadata: dict[str, str]) -> dict[str, Any]:
    """What is told of the tensors of a file, of one rank or of several that share it."""
    if "tensors" in metadata:
        return json.loads(metadata["tensors"])
    ranks = [json.loads(text) for key, text in metadata.items() if key.startswith("rank_")]
    return {name: told for rank in ranks for name, told in rank["tensors"].items()}


def assembled(save: Path, kinds: tuple[str, ...] = KINDS) -> State:
    """(kind, parameter) -> the full tensor, of the true vocabulary."""
    reader = read(save)
    found = {}
    for kind in kinds:
        for name, values in reader.whole(kind).items():
            found[kind, name] = values[: reader.parameters[kind, name].unpadded]
    assert {kind for kind, _ in found} == set(kinds) == {kind for kind, _ in reader.parameters}
    return found


def rows_from(save: Path, first: int = 0) -> State:
    """(kind, parameter) -> the rows of no token, from row `first` on."""
    reader = read(save)
    return {
        (kind, name): reader.whole(kind)[name][max(found.unpadded, first) :]
        for (kind, name), found in reader.parameters.items()
        if found.unpadded is not None
    }


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert torch.equal(bits(found[key].reshape(-1)), bits(values.reshape(-1))), key
