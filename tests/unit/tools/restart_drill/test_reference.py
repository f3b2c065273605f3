"""Whose reference run a drill may take instead of one of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.restart_drill.launch import DrillError
from tools.restart_drill.reference import stored_reference

TRAINING = [
    "torchrun", "--nproc-per-node", "2", "dir/pretrain_gpt.py", "--num-layers", "2", "--hidden-size", "64",
    "--num-attention-heads", "4", "--seq-length", "32", "--max-position-embeddings", "32", "--bf16",
    "--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "9", "--lr", "1e-3", "--data-path", "data",
    "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--distributed-backend", "gloo",
    "--save-interval", "5",
]  # fmt: skip
HIDDEN = ["bash", "train.sh", "--seed", "1"]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return drilled(tmp_path / "drill", TRAINING)


def drilled(out: Path, training: list[str]) -> Path:
    """What a drill leaves of its reference run over `training`."""
    trace = out / "reference" / "trace"
    trace.mkdir(parents=True)
    layout = {"tp": 1, "pp": 1, "dp": 2}
    records = [
        {"type": "process", "cycle": 0, "rank": 0, "world_size": 2, "host": "node0", "layout": layout},
        {"type": "iteration", "cycle": 0, "rank": 0, "step": 1, "loss": 1.5},
    ]
    lines = [json.dumps(record, separators=(",", ":")) + "\n" for record in records]
    (trace / "rank_00000_cycle_000.jsonl").write_text("".join(lines))
    (out / "reference" / "training.json").write_text(json.dumps({"command": training}))
    return out


@pytest.mark.parametrize(
    "change",
    [
        [],
        ["--checkpoint-engine", "lazy", "--save-interval", "3", "--keep-last", "2", "--save", "/elsewhere"],
        ["--exit-signal-handler", "--save", "/elsewhere"],
        ["--seed=1234"],  # by default
        ["--train-iters", "7", "--lr-decay-iters", "9"],
    ],
)
def test_of_a_training_with_the_same_losses(out: Path, change: list[str]) -> None:
    found = stored_reference(out, [*TRAINING, *change])
    assert found.facts.losses == {1: 1.5} and found.directory == out / "reference"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (["--seed", "1"], "--seed 1234 there, and 1 here"),
        (["--hidden-size", "32"], "--hidden-size 64 there, and 32 here"),
        (["--lr", "0.002"], "--lr 0.001 there, and 0.002 here"),
        (["--tensor-model-parallel-size", "2"], "--tensor-model-parallel-size 1 there, and 2 here"),
        (["--data-path", "other"], "--data-path ('data',) there, and ('other',) here"),
        (["--train-iters", "12", "--lr-decay-iters", "9"], "--train-iters 9 there, and 12 here"),
        (["--train-iters", "7"], "--lr-decay-iters 9 there, and 7 here"),
    ],
)
def test_of_another_training(out: Path, change: list[str], expected: str) -> None:
    with pytest.raises(DrillError) as refused:
        stored_reference(out, [*TRAINING, *change])
    assert str(refused.value).startswith(f"--reference {out}: is of another training: ")
    assert expected in str(refused.value) and "remove --reference to run one" in str(refused.value)


def test_on_another_number_of_ranks(out: Path) -> None:
    more = ["torchrun", "--nproc-per-node", "4", *TRAINING[3:]]
    with pytest.raises(DrillError, match="world_size 2 there, and 4 here"):
        stored_reference(out, more)


def test_all_words_count_where_the_flags_are_not_seen(tmp_path: Path, out: Path) -> None:
    hidden = drilled(tmp_path / "hidden", HIDDEN)
    assert stored_reference(hidden, HIDDEN).facts.losses == {1: 1.5}
    with pytest.raises(DrillError, match="bash train.sh --seed 1 there, and bash train.sh --seed 2 here"):
        stored_reference(hidden, [*HIDDEN[:-1], "2"])
    with pytest.raises(DrillError, match="is of another training"):
        stored_reference(out, HIDDEN)


@pytest.mark.parametrize("missing", ["training.json", "trace/rank_00000_cycle_000.jsonl"])
def test_without_a_finished_run(out: Path, missing: str) -> None:
    (out / "reference" / missing).unlink()
    with pytest.raises(DrillError, match="holds no finished reference run .* give the --out of a drill or a matrix"):
        stored_reference(out, TRAINING)


@pytest.mark.parametrize("text", ["", "[]", "{}", "\x00", '{"command": 1}', "[" * 100_000])
def test_a_damaged_record_of_the_command(out: Path, text: str) -> None:
    (out / "reference" / "training.json").write_text(text)
    with pytest.raises(DrillError, match=r"training.json cannot be read .* give the --out of another drill"):
        stored_reference(out, TRAINING)
