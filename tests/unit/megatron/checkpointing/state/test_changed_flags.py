"""What a resume with other flags tells, and that every setting has a decision."""

from __future__ import annotations

import argparse
import dataclasses
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing.engines.base import EngineOptions, SavedCheckpoint
from megatron.checkpointing.engines.errors import CheckpointMismatchError
from megatron.checkpointing.engines.registry import create_engine
from megatron.checkpointing.state.changed_flags import (
    DECISIONS,
    Kind,
    changes,
    check_refused,
    check_training,
    input_contents,
)
from megatron.config import DataConfig
from megatron.config.arguments import GROUPS, config_from_args, namespace_from_config, parse_args
from megatron.config.flags import spec_of
from restart_trace.recorder import untraced_operation

ROOT = Path(__file__).resolve().parents[5]
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --train-iters 2 "
    "--lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 8"
)
DATA = " --data-path 1 /d/a 1 /d/b"
RESUME = " --load /c"
FIELDS = {field.name: field for cls in GROUPS.values() for field in dataclasses.fields(cls)}


def settings(flags: str = "", data: str = DATA, consumed: int | None = None) -> argparse.Namespace:
    args = namespace_from_config(config_from_args(parse_args((FLAGS + data + flags).split()), {}))
    if consumed is not None:  # as the checkpoint of a run has it
        args.consumed_train_samples = consumed
    return args


def told(saved: str, mine: str) -> list[str]:
    return changes(settings(saved, consumed=40), settings(RESUME + mine))


def test_every_setting_has_a_decision() -> None:
    """A new flag needs one: what does another value of it mean for a resume?"""
    assert not FIELDS.keys() - DECISIONS.keys(), "settings without a decision in checkpointing/state/changed_flags.py"
    assert not DECISIONS.keys() - FIELDS.keys(), "decisions on settings that there are none of any more"


def test_an_imported_model_has_no_progress_to_resume() -> None:
    common = {"args": argparse.Namespace()}
    for flags, refused in (("--no-load-optim --no-load-lr-state", True), ("--finetune", False)):
        config = config_from_args(parse_args(f"{FLAGS}{DATA}{RESUME} {flags}".split()), {})
        with pytest.raises(CheckpointMismatchError, match="/c: .* give --finetune") if refused else nullcontext():
            check_training(common, config, "/c")


def test_the_documentation_has_every_decision() -> None:
    """docs/resuming.md names each flag once, in a row of its decision; those in no row are allowed."""
    rows = [line for line in (ROOT / "docs" / "resuming.md").read_text().splitlines() if line.startswith("| `--")]
    documented: dict[str, str] = {}
    for row in rows:
        flags, kind, *_ = (cell.strip() for cell in row.strip("|").split(" | "))
        if not re.fullmatch(r"(`--[\w-]+` ?)+", flags):
            continue  # of what a directory holds
        for name in re.findall(r"`(--[\w-]+)`", flags):
            assert name not in documented, f"{name} stands twice"
            documented[name] = kind
    expected = {}
    for name, decision in DECISIONS.items():
        spec = spec_of(FIELDS[name])
        if spec is not None:
            expected[spec.names[0]] = decision.kind.value
    expected |= dict.fromkeys(("--bf16", "--fp16"), DECISIONS["params_dtype"].kind.value)
    assert documented.keys() <= expected.keys()
    assert {expected[name] for name in expected.keys() - documented.keys()} == {Kind.FREE.value}
    assert documented == {name: expected[name] for name in documented}


@pytest.mark.parametrize(
    ("saved", "mine", "line"),
    [
        (" --seed 7", " --seed 8", "--seed 7 -> 8: samples are shuffled anew, so training continues at sample 40 of"),
        ("", " --split 9,1", "--split 969, 30, 1 -> 9,1: other documents are in the training set, so training"),
        ("", " --seq-length 16 --max-position-embeddings 32", "--seq-length 32 -> 16: samples are cut anew at this"),
        ("", " --global-batch-size 2", "--global-batch-size 1 -> 2: training continues at sample 40, none is repeated"),
        ("", " --hidden-dropout 0", "--hidden-dropout 0.1 -> 0.0: the new probability applies from here"),
        ("", " --eod-mask-loss", "--eod-mask-loss is given, and was not: losses before and after"),
        (" --eod-mask-loss", "", "--eod-mask-loss is not given, and was: losses before and after"),
        ("", " --no-bias-gelu-fusion", "--no-bias-gelu-fusion is given, and was not: the new value applies, and the"),
        ("", " --init-method-std 0.1", "--init-method-std 0.02 -> 0.1: no effect: all weights come from the"),
        ("", " --vocab-size 9", "--vocab-size 8 -> 9: tokens and weights no longer match: the weights know"),
        ("", " --clip-grad 0", "--clip-grad 1.0 -> 0.0: the new limit applies from here"),
        (
            " --use-rotary-position-embeddings",
            " --use-rotary-position-embeddings --rotary-position-embeddings-theta 500000",
            "--rotary-position-embeddings-theta 10000 -> 500000: the new value applies, and the model no longer",
        ),
        (" --fp16", " --fp16 --loss-scale 8", "--loss-scale (none) -> 8.0: the new value applies from here; a dynamic"),
    ],
)  # fmt: skip
def test_one_line_says_what_is_changed_and_what_it_means(saved: str, mine: str, line: str) -> None:
    (found,) = told(saved, mine)
    assert found.startswith(line), found


@pytest.mark.parametrize(
    ("saved", "mine"),
    [
        ("", ""),
        (" --split 9,1", " --split 90/10/0"),  # the same parts
        ("", " --micro-batch-size 2 --global-batch-size 1"),
        (" --optimizer sgd", " --optimizer sgd --adam-beta2 0.9"),  # Adam's settings are not in use
        (" --swiglu", " --swiglu --no-bias-gelu-fusion"),
        ("", " --lr 1e-4 --weight-decay 0.5"),  # for the schedule to say
        ("", " --num-workers 0 --log-interval 7 --eval-iters 3 --data-cache-path /x --train-iters 9"),
        ("", " --save /s --save-interval 3 --checkpoint-engine lazy --restart-trace off"),
        (" --seed 7", " --seed 8 --finetune"),  # another training begins
        (" --fp16", " --fp16 --initial-loss-scale 4 --no-load-optim"),  # it has its effect then
    ],
)
def test_nothing_is_told_where_nothing_changes(saved: str, mine: str) -> None:
    if "--micro-batch-size 2" in mine:
        mine = mine.replace("--global-batch-size 1", "--global-batch-size 2")
        saved += " --global-batch-size 2"
    assert told(saved, mine) == []


def test_what_finetuning_must_know() -> None:
    """The function that the weights were trained for is theirs, whatever training they go on to."""
    (line,) = told("", " --finetune --layernorm-epsilon 1e-6 --adam-beta2 0.9 --split 1,1")
    assert line.startswith("--layernorm-epsilon 1e-05 -> 1e-06: ")


@pytest.mark.parametrize("flag", ["--finetune", "--reset-iteration"])
def test_another_tokenizer_is_told_whatever_training_the_weights_go_on_to(flag: str) -> None:
    """Finetuning means other data, and the weights know the ids of their own tokenizer."""
    saved = " --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model /t/old.model"
    (line,) = told(saved, saved.replace("old", "new") + f" --split 1,1 {flag}")
    assert line.startswith("--tokenizer-model /t/old.model -> /t/new.model: unless this is the same tokenizer")


def test_blends() -> None:
    def found(mine: str) -> list[str]:
        return changes(settings(consumed=40), settings(RESUME, data=mine))

    assert found(" --data-path 2 /d/a 2 /d/b") == []  # weights are shares
    (line,) = found(" --data-path 3 /d/a 1 /d/b")
    assert line.startswith("--data-path 1 /d/a 1 /d/b -> 3 /d/a 1 /d/b: unless these are the same files at another")
    lines = found(" --train-data-path /d/a --valid-data-path /d/v")
    assert [line.split(":")[0] for line in lines] == [
        "--data-path 1 /d/a 1 /d/b -> (none)", "--train-data-path (none) -> /d/a", "--valid-data-path (none) -> /d/v",
    ]  # fmt: skip


def with_contents(contents: Any, data: str = DATA, consumed: int | None = None) -> argparse.Namespace:
    args = settings(RESUME if consumed is None else "", data, consumed)
    args.input_contents = contents
    return args


@pytest.mark.parametrize(
    ("then", "now", "mine", "line"),
    [
        (["a", "b"], ["a", "b"], " --data-path 1 /moved/a 1 /moved/b", None),
        (["a", "b"], ["b", "a"], DATA, "--data-path 1 /d/a 1 /d/b has another content than before: training continues"),
        (["a", "b"], ["a", "c"], " --data-path 1 /d/a 1 /d/c", "--data-path 1 /d/a 1 /d/b -> 1 /d/a 1 /d/c: training "),
        (["a", "b"], ["a", "b"], " --data-path 3 /d/a 1 /d/b", "--data-path 1 /d/a 1 /d/b -> 3 /d/a 1 /d/b: training "),
        (["a"], ["a", "b"], " --data-path 1 /d/a 1 /d/c", "--data-path 1 /d/a 1 /d/b -> 1 /d/a 1 /d/c: unless these "),
    ],
)
def test_content_counts_where_it_is_known(then: list[str], now: list[str], mine: str, line: str | None) -> None:
    lines = changes(with_contents({"data_path": then}, consumed=40), with_contents({"data_path": now}, mine))
    assert [told[: len(line or "")] for told in lines] == ([] if line is None else [line])


@pytest.mark.parametrize("hostile", [None, 7, [], {"data_path": "ab"}, {"data_path": [[], {}]}])
def test_contents_of_a_checkpoint_may_be_anything(hostile: Any) -> None:
    changes(with_contents(hostile, consumed=40), with_contents({"data_path": ["a", "b"]}))


def test_the_contents_of_all_files_of_a_run(tmp_path: Path) -> None:
    for name in ("a.idx", "a.bin", "b.idx", "b.bin", "vocab.json", "merges.txt"):
        (tmp_path / name).write_text(name)
    paths = {name: str(tmp_path / name) for name in ("a", "b", "vocab.json", "merges.txt")}
    data = DataConfig(
        train_data_path=("1", paths["a"], "2", paths["b"]), valid_data_path=(paths["b"],),
        tokenizer_type="GPT2BPETokenizer", vocab_file=paths["vocab.json"], merge_file=paths["merges.txt"],
    )  # fmt: skip
    found = input_contents(data)
    assert list(found) == ["train_data_path", "valid_data_path", "vocab_file", "merge_file"]
    assert found["train_data_path"][1:] == found["valid_data_path"] and len(set(sum(found.values(), []))) == 4
    without = dataclasses.replace(data, vocab_file=str(tmp_path / "gone"))
    assert input_contents(without).keys() == found.keys() - {"vocab_file"}


STARTS = """
import os, signal, socket, sys
from pathlib import Path
from megatron.checkpointing.state.changed_flags import input_contents
from megatron.config import DataConfig
from megatron.processes.in_process_restart import REPORT_SIGNAL, InProcessRestarts, send_start

signal.signal(REPORT_SIGNAL, signal.SIG_IGN)
launcher, mine = socket.socketpair(type=socket.SOCK_SEQPACKET)
restarts = InProcessRestarts(mine, os.getpid(), 1.0)
kept, replaced = Path(sys.argv[1], "kept"), Path(sys.argv[1], "replaced")
data = DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(kept), merge_file=str(replaced))
opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" else None)
for content in ("one", "two", "two"):
    replaced.with_name("new").write_text(content)
    replaced.with_name("new").rename(replaced)
    found = input_contents(data)
    replaced.with_name("new").write_text("six")
    replaced.with_name("new").rename(replaced)
    assert input_contents(data) == found
    print(*found["vocab_file"], *found["merge_file"], opened.count(str(kept)))
    send_start(launcher, os.environ)
    restarts.wait_for_start()
"""


def test_each_start_of_a_process_finds_the_files_that_are_there_by_then(tmp_path: Path) -> None:
    """Within a start they stay those that it has opened. Those that are the same are not read again."""
    (tmp_path / "kept").write_text("kept")
    command = [sys.executable, "-c", STARTS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (kept, one, _), *later = (line.split() for line in done.stdout.splitlines())
    assert len(later) == 2 and len({kept, one, later[0][1]}) == 3
    assert later == [[kept, later[0][1], "1"]] * 2


def upstream_args() -> argparse.Namespace:
    name = "mp_rank_00_model_states.pt"
    directory = ROOT / "tests" / "golden" / "upstream_run" / "global_step5"
    return create_engine("torch", EngineOptions()).load([name], SavedCheckpoint(directory), untraced_operation())[name][
        "args"
    ]


# The flags of tests/golden/upstream_run, as far as a change of them is told.
OF_UPSTREAM: dict[str, Any] = {
    "seq_length": 64, "max_position_embeddings": 64, "global_batch_size": 8, "adam_beta2": 0.95, "split": "100,0,0",
    "data_path": ["run/data/corpus_text_document"], "tokenizer_type": "GPTSentencePieceTokenizer",
    "tokenizer_model": "run/data/tokenizer.model", "vocab_size": None, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "swiglu": True, "add_bias_linear": False, "bias_gelu_fusion": False, "use_rotary_position_embeddings": True,
}  # fmt: skip


def test_upstreams_checkpoint_is_compared_as_ours() -> None:
    mine = settings(RESUME)
    vars(mine).update(OF_UPSTREAM)
    assert changes(upstream_args(), mine) == []
    mine.adam_beta2, mine.seed = 0.9, 9
    assert [line.split(":")[0] for line in changes(upstream_args(), mine)] == [
        "--seed 1234 -> 9", "--adam-beta2 0.95 -> 0.9",
    ]  # fmt: skip


def test_what_an_older_program_did_not_save_is_not_compared() -> None:
    bare = argparse.Namespace(consumed_train_samples=4, seed=9)
    assert [line.split(":")[0] for line in changes(bare, settings(RESUME))] == ["--seed 9 -> 1234"]


def test_state_of_another_optimizer() -> None:
    saved, directory = settings(" --optimizer sgd"), Path("/c/global_step1")
    message = "^--optimizer adam: /c/global_step1 was saved with --optimizer sgd"
    with pytest.raises(CheckpointMismatchError, match=message):
        check_refused(saved, settings(RESUME), directory)
    for flags in (" --no-load-optim", " --finetune", " --optimizer sgd"):
        check_refused(saved, settings(RESUME + flags), directory)
    check_refused(argparse.Namespace(), settings(RESUME), directory)  # of an older program
