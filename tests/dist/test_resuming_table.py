"""docs/resuming.md has a table of what may change on a resume; each of its rows is run here.

What is refused before the imports is one light start for each flag (tests.dist.light_starts). All else is changed in
few starts of the real trainer, many flags at once: it must log the decision of each flag of a row that is logged, and
of no other.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megatron.checkpointing.preflight.first_start import FirstStart
from megatron.checkpointing.preflight.repeated_errors import STARTS, StepErrors
from megatron.checkpointing.state.changed_flags import DECISIONS, Kind
from megatron.checkpointing.store.commit import write_manifest
from megatron.checkpointing.store.manifest import Manifest
from megatron.config import CheckpointConfig
from megatron.config.arguments import parse_args
from megatron.parallel.topology import Layout
from tests.dist.harness import ROOT, Zygote, records
from tests.dist.light_starts import IMPORTS, light_starts
from tests.dist.test_changed_flags import told
from tests.dist.test_defaults import FIELDS, SPECS
from tests.dist.tiny_runs import SINGLE, Launcher, load_file

PAGE = ROOT / "docs" / "resuming.md"


class Row(NamedTuple):
    """A row of the table; `flags`: those that it is about, if it is about flags alone."""

    changed: str
    happens: str
    meaning: str

    @property
    def flags(self) -> list[str]:
        alone = re.fullmatch(r"(`--[\w-]+` ?)+", self.changed)
        return re.findall(r"`(--[\w-]+)`", self.changed) if alone else []

    @property
    def words(self) -> list[str]:
        """What the log or the error must say."""
        return re.findall(r'"([^"]+)"', self.meaning)


def table() -> list[Row]:
    """Of what a directory holds, and of flags."""
    found = []
    for line in PAGE.read_text().partition("## What may change\n")[2].partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] not in ("changed or missing", "flags", "---"):
            found.append(Row(*cells))
    return found


ROWS = table()
OF_FLAG = {flag: row for row in ROWS for flag in row.flags}
OF_LAYOUT = {
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--no-pipeline-parallel",
    "--moe-expert-parallel-size",
}  # fmt: skip
MEANINGS = {
    SPECS[name].names[0]: decision.meaning.format(sample=8) for name, decision in DECISIONS.items() if name in SPECS
}  # flag -> what the log says of it; 8 samples were consumed
ALLOWED = {
    SPECS[name].names[0] for name, decision in DECISIONS.items() if decision.kind is Kind.FREE and name in SPECS
}  # the table has those of them that have consequences
OF_DIRECTORIES = {row.changed: row for row in ROWS if not row.flags}

# Four runs of two layers. Of a dropped flag the word begins with "!" where a start changes them.
COMMON = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 32 --split 100,0,0 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3 --num-workers 0 --eval-iters 0 "
    "--log-interval 1 --data-path {data} --max-position-embeddings 32"
)
LEARNED = (
    f"{COMMON} --bf16 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0.1 "
    "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model {tokenizer}"
)
DECAYING = (
    f"{LEARNED} --lr-decay-tokens 1000 --lr-warmup-tokens 9 --start-weight-decay 0.05 --end-weight-decay 0.1 "
    "--weight-decay-incr-style linear"
)
EXPERTS = f"{LEARNED} --num-experts 4 --topk 2"
ROTARY = (
    f"{COMMON} --fp16 --use-rotary-position-embeddings --optimizer sgd --lr-decay-style constant "
    "--tokenizer-type NullTokenizer --vocab-size 1000"
)

REFUSED_OF_LEARNED = [
    "--num-layers 4", "--hidden-size 128", "--ffn-hidden-size 128", "--num-attention-heads 8",
    "--num-key-value-heads 2", "--kv-channels 8", "--position-embedding-type alibi", "--use-rotary-position-embeddings",
    "--no-position-embedding", "--embed-layernorm",
    "--normalization rmsnorm", "--swiglu", "--untie-embeddings-and-output-weights", "--disable-bias-linear",
    "--max-position-embeddings 64", "--make-vocab-size-divisible-by 1000", "!--bf16", "!--bf16 --fp16",
    "--optimizer sgd", "--lr 2e-3", "--min-lr 2e-4", "--lr-decay-style linear", "--lr-decay-iters 5",
    "!--train-iters --train-samples 16 --lr-decay-samples 20", "--lr-decay-tokens 1000", "--lr-warmup-iters 1",
    "!--train-iters --train-samples 16 --lr-warmup-samples 2", "--lr-warmup-fraction 0.5",
    "--weight-decay 0.2",
]  # fmt: skip
REFUSED_OF_EXPERTS = ["--num-experts 8", "--expert-interval 1", "--mlp-type residual"]
# Flags that a start accepts only with others: these are in the run already, so that each is changed alone.
REFUSED_OF_DECAYING = [
    "--lr-decay-tokens 2000", "--lr-warmup-tokens 11", "--start-weight-decay 0.02", "--end-weight-decay 0.2",
    "--weight-decay-incr-style cosine",
]  # fmt: skip
REFUSED = [
    *((LEARNED, changes) for changes in REFUSED_OF_LEARNED),
    *((DECAYING, changes) for changes in REFUSED_OF_DECAYING),
    *((EXPERTS, changes) for changes in REFUSED_OF_EXPERTS),
]


class Start(NamedTuple):
    """A start of the real trainer that accepts all changes; `exact`: losses must be those of an uninterrupted run.

    `unused`: flags that mean nothing with the others, so that no line tells of them.
    """

    base: str
    changes: str
    layout: Layout = SINGLE
    exact: bool = False
    unused: tuple[str, ...] = ()


ACCEPTED = {
    "numbers": Start(
        LEARNED,
        "--attention-dropout 0 --hidden-dropout 0 --layernorm-epsilon 1e-6 --no-bias-gelu-fusion --init-method-std 0.1 "
        "--seq-length 16 --global-batch-size 2 --seed 77 --data-parallel-random-init --split 90,10,0 --clip-grad 0.5 "
        "--adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-7 --eod-mask-loss --override-opt_param-scheduler",
    ),
    "files": Start(
        LEARNED,
        "!--data-path !--split --train-data-path {data} --valid-data-path {data} --test-data-path {data} "
        "--train-doc-idx-path {index}_doc_idx.npy --train-sample-idx-path {index}_sample_idx.npy "
        "--train-shuffle-idx-path {index}_shuffle_idx.npy !--tokenizer-model --tokenizer-type GPT2BPETokenizer "
        "--vocab-file {vocab} --merge-file {merges}",
        unused=("--split",),
    ),
    "ramp": Start(LEARNED, "!--train-iters --train-samples 16 --rampup-batch-size 2 2 8 --lr-decay-samples 16"),
    "fp16": Start(
        ROTARY,
        "--rotary-percent 0.5 --rotary-position-embeddings-theta 500000 --initial-loss-scale 64 --min-loss-scale 2 "
        "--loss-scale-window 7 --hysteresis 3 --accumulate-allreduce-grads-in-fp32 "
        "--sgd-momentum 0.5 --vocab-size 1001",
    ),
    "experts": Start(
        EXPERTS,
        "--topk 1 --moe-train-capacity-factor 2 --moe-eval-capacity-factor 3 --moe-min-capacity 8 "
        "--disable-moe-token-dropping --disable-moe-top2-2nd-expert-sampling --moe-loss-coeff 0.2",
    ),
    "divided experts": Start(EXPERTS, "--moe-expert-parallel-size 2", Layout(tp=1, pp=1, dp=2)),
    "finetune experts": Start(EXPERTS, "--finetune --topk 1 --moe-loss-coeff 0.2"),
    "scale": Start(ROTARY, "--loss-scale 8"),
    "host memory": Start(ROTARY, "--no-load-optim --optimizer adam --cpu-optimizer"),
    "loop": Start(
        LEARNED,
        "--checkpoint-activations --checkpoint-num-layers 2 --deepspeed-activation-checkpointing "
        "--synchronize-each-layer --profile-backward --distributed-backend gloo --distributed-timeout-minutes 5 "
        "--warmup-communicators --warmup-kernels --no-pipeline-parallel --zero-stage 0 --log-interval 2 "
        "--log-level debug --tensorboard-dir {tmp}/tb --tensorboard-log-interval 2 --tensorboard-queue-size 5 "
        "--log-timers-to-tensorboard --log-batch-size-to-tensorboard --no-log-learnig-rate-to-tensorboard "
        "--no-log-loss-scale-to-tensorboard --log-validation-ppl-to-tensorboard --log-memory-to-tensorboard "
        "--log-world-size-to-tensorboard --log-params-norm --log-num-zeros-in-grad "
        "--log-optimizer-states-to-tensorboard --profile pt --profile_steps 1,1 --profile-ranks 0 --exit-interval 9 "
        "--exit-duration-in-mins 99 --eval-interval 3 --eval-iters 1 --train-tokens 99999 --exit-signal-handler "
        "--exit-signal SIGUSR1 --allow-injected-faults --data-impl mmap --data-cache-path {tmp}/cache --num-workers 1 "
        "--local-rank 0 --deepspeed_config {deepspeed} --restart-trace-probes off --restart-trace-nvtx off "
        "--load-timeout 99 --load-tag global_step2 --exit-on-missing-checkpoint --allow-start-over "
        "--ckpt-fully-parallel-load "
        "--checkpoint-verify size --prefetch-on-start --prefetch-limit 0.1 --use-checkpoint-opt_param-scheduler",
        exact=True,
    ),
    "saves": Start(
        LEARNED,
        "--save {tmp}/save --save-interval 1 --keep-last 1 --no-save-optim --no-save-rng --checkpoint-engine lazy "
        "--checkpoint-files-per-node 1 --checkpoint-durability none --host-cache-size 0.1 --io-threads 1 "
        "--io-block-size 4 --direct-io off "
        "--checksum none --verify-restored-state --take-over --allow-other-checkpoints --start-over again "
        "--on-repeated-error retry --export-hf-interval 4 --export-hf-dir {tmp}/models --export-hf-wait 60 "
        "--recompute-activations --restart-trace-probes-interval 0.5",
        exact=True,
    ),
    "memory": Start(
        LEARNED,
        "--save {tmp}/memory --save-interval 1 --checkpoint-engine memory --persist-interval 2 --peer-timeout 5 "
        "--failure-domain {domains} --replica-compression zstd --replication-traffic interleave "
        "--comm-profile-steps 20 --span-threshold 10 "
        "--span-alpha 0.6 --max-blocks-in-span 2 --snapshot-buffer-size 4 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 2",
        exact=True,
    ),
    "replicas": Start(
        LEARNED,
        "--save {tmp}/replicas --save-interval 1 --checkpoint-engine memory --replicas 1 --no-load-optim --no-load-rng "
        "--no-load-lr-state",
    ),
    "reset": Start(LEARNED, "--reset-iteration --train-iters 5 --override-opt_param-scheduler"),
    "finetune": Start(
        LEARNED,
        "--finetune --layernorm-epsilon 1e-6 --no-bias-gelu-fusion --clip-grad 0.5 !--tokenizer-model "
        "--tokenizer-type GPT2BPETokenizer --vocab-file {vocab} --merge-file {merges}",
    ),
    "finetune rotary": Start(
        ROTARY, "--finetune --rotary-percent 0.5 --rotary-position-embeddings-theta 500000 --vocab-size 1001"
    ),
    "tensors": Start(
        LEARNED,
        "--tensor-model-parallel-size 2 --checkpoint-activations --deepspeed-activation-checkpointing "
        "--partition-activations --contigious-checkpointing --checkpoint-in-cpu",
        Layout(tp=2, pp=1, dp=1),
    ),
    "stages": Start(
        LEARNED,
        "--pipeline-model-parallel-size 2 --micro-batch-size 2 --deterministic on --restart-trace off",
        Layout(tp=1, pp=2, dp=1),
    ),
    "parts": Start(LEARNED, "--ds-sequence-parallel-size 2", Layout(tp=1, pp=1, dp=2)),
    "sequence": Start(LEARNED, "--tensor-model-parallel-size 2 --sequence-parallel", Layout(tp=2, pp=1, dp=1)),
}
# What the starts above cannot have: the test that has it.
ELSEWHERE = {
    "--load": "every start here",
    "--restart-trace-dir": "every start here",
    "--universal-checkpoint": "tests/dist/test_universal_checkpoint.py",
    "--otlp": "tests/dist/test_otlp.py",
    "--storage-cache": "tests/dist/test_object_storage.py",
    "--storage-deadline": "tests/dist/test_object_storage.py",
    "--checkpoint-compression": "tests/dist/test_engines_training.py",
    "--torch-compile": "tests/dist/test_compilation.py",
}


def command(given: Mapping[str, object], *texts: str) -> list[str]:
    """The words of the first text, changed by those that follow: "!--flag" drops one. Names in braces are `given`."""
    values: dict[str, list[str]] = {}
    for text in texts:
        flag = ""
        for word in shlex.split(text.format(**given)):
            if word.startswith("!"):
                del values[word[1:]]
            elif word.startswith("--"):
                flag = word
                values[flag] = []
            else:
                values[flag].append(word)
    return [word for flag, words in values.items() for word in (flag, *words)]


def changed_flags(changes: str) -> list[str]:
    return re.findall(r"--[\w-]+", changes)


class Saved(NamedTuple):
    """Checkpoints after 2 of 4 iterations of the runs, an uninterrupted run's losses, and the files of starts."""

    launcher: Launcher
    given: dict[str, object]
    load: dict[str, Path]
    losses: dict[int, float]

    def words(self, *texts: str, **more: object) -> list[str]:
        return command(self.given | more, *texts)


def losses_in(trace: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in records(trace, rank=0) if r["type"] == "iteration"}


@pytest.fixture(scope="module")
def saved(zygote: Zygote, dataset: list[str], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    tmp = tmp_path_factory.mktemp("table")
    named = dict(zip(dataset[::2], dataset[1::2], strict=True))
    launcher = Launcher(zygote, (), tmp)
    corpus = Path(named["--data-path"])  # beside which other tests leave indexes of other lengths
    own = shutil.copytree(corpus.parent, tmp / "data", ignore=shutil.ignore_patterns("index-cache"))
    given: dict[str, object] = {
        "data": own / corpus.name, "tokenizer": named["--tokenizer-model"], "tmp": tmp,
        "vocab": tmp / "vocab.json", "merges": tmp / "merges.txt", "domains": tmp / "domains",
        "deepspeed": tmp / "ds.json", "index": tmp / "index",
    }  # fmt: skip
    load = {
        LEARNED: tmp / "learned", DECAYING: tmp / "decaying", EXPERTS: tmp / "experts", ROTARY: tmp / "rotary",
    }  # fmt: skip
    for base, save in load.items():
        flags = ["--save", save, "--save-interval", "2", "--verify-restored-state", "--checkpoint-durability", "none"]
        launcher.train(SINGLE, *command(given, base), *flags)
    losses = losses_in(load[LEARNED] / "restart_trace")
    for save in load.values():  # what the run saved at its end is not wanted, and its trace tells of it
        shutil.rmtree(save / "global_step4")
        shutil.rmtree(save / "restart_trace")
        (save / "latest").write_text("global_step2")
        (save / "latest_checkpointed_iteration.txt").write_text("2")
    _write_given(given, own)
    return Saved(launcher, given, load, losses)


def _write_given(given: Mapping[str, object], data: Path) -> None:
    tmp = Path(str(given["tmp"]))
    (tmp / "domains").write_text("\n".join(f"{host} rack" for host in (socket.gethostname(), "other")))
    (tmp / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    vocabulary = [*"abcdefghijklmnopqrstuvwxyz", "<|endoftext|>"]
    vocabulary += [f"{first}{second}{third}" for first in "abcdefghij" for second in "abcdefghij" for third in "abcd"]
    (tmp / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(vocabulary)}))
    (tmp / "merges.txt").write_text("#version: 0.2\na b\n")
    for kind in ("doc_idx", "sample_idx", "shuffle_idx"):
        (found, *_) = sorted(data.rglob(f"*{kind}*.npy"))
        shutil.copy(found, f"{tmp}/index_{kind}.npy")


def test_every_row_is_run() -> None:
    """A new flag of the table needs a start here; a row about directories needs a case below."""
    refused = {flag for flag, row in OF_FLAG.items() if row.happens.startswith("refused")}
    tried = {flag for _, changes in REFUSED for flag in changed_flags(changes)}
    assert not refused - tried, "flags that are refused, and no light start gives them another value"
    accepted = {flag for start in ACCEPTED.values() for flag in changed_flags(start.changes)} | ELSEWHERE.keys()
    assert not (OF_FLAG.keys() | ALLOWED) - refused - accepted, "flags to which no start gives another value"
    changed = {
        flag for start in ACCEPTED.values() if "--finetune" in start.changes for flag in changed_flags(start.changes)
    }
    with_finetune = {flag for flag, row in OF_FLAG.items() if "also with --finetune" in row.happens}
    assert not with_finetune - changed, "flags that no start changes with --finetune"
    assert OF_DIRECTORIES.keys() == {case.row for case in (*LIGHT, *LOADS)}


def settings(words: Sequence[str]) -> dict[str, object]:
    """Field -> its value with these flags."""
    given = vars(parse_args(words, {}))
    return given | {name: given.get(name, FIELDS[name].default) for name in SPECS}


def test_each_flag_is_given_another_value() -> None:
    """One that has its value, or its default, already would change nothing."""
    given = {
        name: f"/{name}" for name in ("data", "tokenizer", "tmp", "vocab", "merges", "domains", "deepspeed", "index")
    }
    fields = {flag: name for name, spec in SPECS.items() for flag in spec.names} | {"--bf16": "bf16", "--fp16": "fp16"}
    starts = [*((start.base, start.changes) for start in ACCEPTED.values()), *REFUSED]
    for base, changes in starts:
        before, after = settings(command(given, base)), settings(command(given, base, changes))
        same = {flag for flag in changed_flags(changes) if before.get(fields[flag]) == after.get(fields[flag])}
        assert same <= {"--local-rank"}, f"{changes}: {same}"  # a process has one


def test_what_is_refused_is_refused_before_the_imports(saved: Saved) -> None:
    """Each flag alone, and by the words of its row; with the flag that the row names it is accepted."""
    tried = [*((base, "") for base in (LEARNED, DECAYING, EXPERTS)), *REFUSED]
    starts = light_starts([[*saved.words(base, changes), "--load", str(saved.load[base])] for base, changes in tried])
    for (_, changes), start in zip(tried, starts, strict=True):
        if not changes:
            assert start.exit_code == IMPORTS, start.output
            continue
        rows = [OF_FLAG[flag] for flag in changed_flags(changes) if OF_FLAG[flag].happens.startswith("refused")]
        assert start.exit_code == 2, f"{changes}: {start}"
        assert any(all(word in start.output for word in row.words) for row in rows), f"{changes}: {start}"
        assert start.output.count("error: ") == 1 and "Traceback" not in start.output


def test_what_rows_of_accepted_flags_refuse(saved: Saved) -> None:
    """A schedule in iterations, of another number of samples or another end; a table of positions of another length.

    Which engines refuse another layout: tests/unit/megatron/checkpointing/preflight/test_compatibility.py.
    """
    tried = {
        "--global-batch-size": ("--global-batch-size 2", "learning-rate schedule"),
        "--train-iters": ("--train-iters 6", "learning-rate schedule"),
        "--train-samples": ("!--train-iters --train-samples 32", "learning-rate schedule"),
        "--seq-length": ("!--max-position-embeddings --seq-length 64", "another model"),
    }
    rows = {flag for flag, row in OF_FLAG.items() if "refused" in row.meaning and not row.happens.startswith("refused")}
    assert rows - OF_LAYOUT == tried.keys()
    load = ["--load", str(saved.load[LEARNED])]
    found = light_starts([[*saved.words(LEARNED, changes), *load] for changes, _ in tried.values()])
    for (changes, words), start in zip(tried.values(), found, strict=True):
        assert start.exit_code == 2 and words in start.output, f"{changes}: {start}"


def test_what_allows_a_refused_change(saved: Saved) -> None:
    """The flags that the rows name."""
    allowed = [
        "--optimizer sgd --no-load-optim", "--lr 2e-3 --override-opt_param-scheduler",
        "--lr 2e-3 --use-checkpoint-opt_param-scheduler", "--lr 2e-3 --no-load-lr-state",
        "--make-vocab-size-divisible-by 64", "--train-iters 1 --lr-decay-iters 4 --reset-iteration",
    ]  # fmt: skip
    load = ["--load", str(saved.load[LEARNED])]
    found = light_starts([[*saved.words(LEARNED, changes), *load] for changes in allowed])
    longer = [*saved.words(ROTARY, "--max-position-embeddings 64"), "--load", str(saved.load[ROTARY])]
    found += light_starts([longer])
    assert [start.exit_code for start in found] == [IMPORTS] * len(found), found


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_accepted_is_logged_as_the_table_says(saved: Saved, name: str) -> None:
    start = ACCEPTED[name]
    trace = saved.launcher.directory / f"trace_{name}"
    words = saved.words(start.base, start.changes)
    tracing = [] if "--restart-trace off" in start.changes else ["--restart-trace-dir", trace]
    run = saved.launcher.train(start.layout, *words, "--load", saved.load[start.base], *tracing)
    assert "Traceback" not in run.output
    lines = {line.split()[0]: line for line in told(run.log(0))}
    logged = [flag for flag in changed_flags(start.changes) if is_logged(flag, start)]
    assert sorted(lines) == sorted(logged), run.log(0)
    for flag, line in lines.items():
        expected = MEANINGS[flag], re.sub("^unless [^,]*, ", "", MEANINGS[flag])  # without: the files' content is known
        assert any(line.endswith(f": {words}") for words in expected), line
    if start.exact:
        resumed = losses_in(trace)
        assert resumed == {step: saved.losses[step] for step in resumed} and resumed


def is_logged(flag: str, start: Start) -> bool:
    row = OF_FLAG.get(flag)
    if row is None or "logged" not in row.happens or flag in start.unused:
        return False
    return "--finetune" not in start.changes or "also with --finetune" in row.happens


class Case(NamedTuple):
    """Of the row `row`: `prepare` changes a copy of the saved run, `changes` are flags beside --load of the copy.

    `allowed`: flags with which the start goes on; `still`: flags that the row names as no way to go on.
    """

    row: str
    changes: str
    prepare: Callable[[Path, Saved], object] = lambda run, saved: None
    allowed: str = ""
    still: str = ""  # of LIGHT
    layout: Layout = SINGLE  # of LOADS
    reads: bool = True  # of LOADS that are refused: after tensors were read


def _begun_elsewhere(run: Path, saved: Saved, **more: str) -> None:
    """As the checkpoint of a run that began with --load of another place."""
    directory = run / "global_step2"
    manifest = Manifest.of(directory)
    place = str(saved.load[LEARNED])
    begun = dataclasses.replace(manifest, loaded_from=place, first_start=f"--load {place}", **more)
    write_manifest(directory, begun, fsync=False)


def _gone_back(run: Path, saved: Saved) -> None:
    _begun_elsewhere(run, saved, resumed_with="--load-tag global_step1")


def _empty(run: Path, saved: Saved) -> None:
    shutil.rmtree(run)
    run.mkdir()


def _traced(run: Path, saved: Saved) -> None:
    """All checkpoints of a run are gone, and its trace is there."""
    _empty(run, saved)
    flags = ["--save", run, "--save-interval", "1", "--checkpoint-durability", "none", "--exit-interval", "1"]
    saved.launcher.train(SINGLE, *saved.words(LEARNED), *flags)
    shutil.rmtree(run / "global_step1")
    for name in ("latest", "latest_checkpointed_iteration.txt"):
        (run / name).unlink()


def _manifest_gone(run: Path, saved: Saved) -> None:
    _empty(run, saved)
    (run / "latest").write_text("global_step2")


def _without(setting: str) -> Callable[[Path, Saved], None]:
    def save(run: Path, saved: Saved) -> None:
        _empty(run, saved)
        flags = ["--save", run, "--save-interval", "1", setting, "--exit-interval", "1", "--restart-trace", "off"]
        saved.launcher.train(SINGLE, *saved.words(LEARNED), *flags)

    return save


def _converted(run: Path, saved: Saved) -> None:
    """As ds_to_universal leaves it, but for the content of parameters, which is not looked at before the imports."""
    universal = run / "global_step2_universal"
    parameter = universal / "zero" / "2.mlp.dense_4h_to_h.weight"
    parameter.mkdir(parents=True)
    shutil.move(run / "global_step2" / "mp_rank_00_model_states.pt", universal)
    for path in (parameter / "fp32.pt", parameter / "exp_avg.pt", parameter / "exp_avg_sq.pt"):
        path.touch()
    (universal / "zero" / "optimizer_state.pt").touch()
    shutil.rmtree(run / "global_step2")
    (run / "latest").unlink()
    (run / "latest_universal").write_text(universal.name)


def _converted_beside(run: Path, saved: Saved) -> None:
    """The conversion beside the checkpoint that it was made of, as ds_to_universal leaves it."""
    _converted(run, saved)
    shutil.copytree(saved.load[LEARNED], run, dirs_exist_ok=True)


def _converted_without_schedule(run: Path, saved: Saved) -> None:
    _converted(run, saved)
    path = run / "global_step2_universal" / "mp_rank_00_model_states.pt"
    torch.save(load_file(path) | {"lr_scheduler": None}, path)


def _failed(run: Path, saved: Saved) -> None:
    (run / ".generations").mkdir(exist_ok=True)
    options = CheckpointConfig(save=str(run), save_interval=1, load=str(run))
    for generation in range(STARTS):
        StepErrors(options, FirstStart(), generation, 2, 0).note(ValueError("a damaged sample"), 3)


LIGHT = [
    Case(
        "three starts in a row have ended with the same error at the same iteration", "--save {run} --save-interval 1",
        _failed, "--on-repeated-error retry",
    ),
    Case(
        "`--save` holds checkpoints of another run", "!--load --save {run} --save-interval 1",
        _begun_elsewhere, "--allow-other-checkpoints",
    ),
    Case(
        "no checkpoint is in `--save`, and the trace tells that this run has saved one there",
        "--save {run} --save-interval 1", _traced, "--allow-start-over",
    ),
    Case(
        "no checkpoint is in `--load`, which is another place than `--save`", "--exit-on-missing-checkpoint",
        _empty, "!--exit-on-missing-checkpoint",
    ),
    Case("no checkpoint is in `--load`, and `--finetune` is given", "--finetune", _empty, "!--finetune"),
    Case(
        "one checkpoint is given as `--load` (`DIR/global_step4`) instead of its directory",
        "--load {run}/global_step2", allowed="--load {run} --load-tag global_step2",
    ),
    Case(
        "the checkpoint is a universal one, and `--universal-checkpoint` is not given",
        "", _converted, "--universal-checkpoint",
    ),
    Case(
        "the checkpoint is a universal one, and `--universal-checkpoint` is not given",
        "--load-tag global_step2_universal", _converted_beside, "--universal-checkpoint",
    ),
    Case(
        "`--universal-checkpoint` is given, and the conversion is missing or incomplete",
        "--universal-checkpoint", allowed="!--universal-checkpoint", still="--allow-start-over",
    ),
    Case(
        "`--universal-checkpoint` is given, and the conversion is missing or incomplete",
        "--load-tag global_step2 --universal-checkpoint", allowed="!--universal-checkpoint",
        still="--allow-start-over",
    ),
    Case(
        "the checkpoint is without the state of the schedule", "--universal-checkpoint",
        _converted_without_schedule, "--no-load-lr-state",
    ),
    Case(
        "`latest` names a checkpoint that is not there, and there is no other", "", _manifest_gone,
        "--allow-start-over",
    ),
    Case(
        "the checkpoint is without optimizer state (`--no-save-optim`)", "", _without("--no-save-optim"),
        "--no-load-optim",
    ),
    Case("the checkpoint is without random state (`--no-save-rng`)", "", _without("--no-save-rng"), "--no-load-rng"),
    Case(
        "`--train-iters` is before the iteration of the checkpoint", "--train-iters 1 --lr-decay-iters 4",
        allowed="--reset-iteration",
    ),
]  # fmt: skip


def test_what_directories_hold_is_refused_before_the_imports(saved: Saved, tmp_path: Path) -> None:
    """With the words of the row; and what allows it is accepted, with these words where the row is logged."""
    command_lines = []
    for number, case in enumerate(LIGHT):
        run = tmp_path / str(number)
        shutil.copytree(saved.load[LEARNED], run)
        case.prepare(run, saved)
        texts = LEARNED, "--load {run}", case.changes
        command_lines += [saved.words(*texts, more, run=run) for more in ("", case.allowed, case.still)]
    found = iter(light_starts(command_lines))
    for case in LIGHT:
        row = OF_DIRECTORIES[case.row]
        refused, allowed, still = next(found), next(found), next(found)
        told_by = refused if row.happens.startswith("refused") else allowed
        code = int(row.happens.split()[-1]) if "exit code" in row.happens else 2
        assert (refused.exit_code, allowed.exit_code) == (code, IMPORTS), (case.row, refused, allowed)
        assert still.exit_code == code, (case.row, still)
        assert all(word in told_by.output for word in row.words), (case.row, told_by)


def _damage(*tags: str, cut: bool = False) -> Callable[[Path, Saved], None]:
    """Flip a byte of a file of these checkpoints, or cut it off."""

    def damage(run: Path, saved: Saved) -> None:
        for tag in tags:
            (path, *_) = sorted((run / tag).glob("*optim_states.pt"))
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content[:-1] if cut else content)

    return damage


def _without_schedule(run: Path, saved: Saved) -> None:
    directory = run / "global_step2"
    manifest, name = Manifest.of(directory), "mp_rank_00_model_states.pt"
    state = load_file(directory / name)
    torch.save(state | {"lr_scheduler": None}, directory / name)
    file = dataclasses.replace(manifest.files[name], num_bytes=(directory / name).stat().st_size)
    write_manifest(directory, dataclasses.replace(manifest, files=manifest.files | {name: file}), fsync=False)


def _second(run: Path, saved: Saved) -> None:
    """A copy of the checkpoint that was committed after it, under the name of a later step."""
    shutil.copytree(run / "global_step2", run / "global_step3")
    manifest = Manifest.of(run / "global_step2")
    newer = dataclasses.replace(manifest, tag="global_step3", step=3, sequence=manifest.sequence + 1)
    write_manifest(run / "global_step3", newer, fsync=False)


def _newest_damaged(run: Path, saved: Saved) -> None:
    _second(run, saved)
    _damage("global_step3")(run, saved)


def _another_corpus(run: Path, saved: Saved) -> None:
    """The corpus of a checkpoint that was saved with another one at the same path."""
    for ending in (".bin", ".idx"):
        shutil.copy(str(saved.given["data"]) + ending, f"{run}/corpus{ending}")
    flags = ["--save", run / "save", "--save-interval", "1", "--exit-interval", "1", "--restart-trace", "off"]
    saved.launcher.train(SINGLE, *saved.words(LEARNED, "--data-path {run}/corpus", run=run), *flags)
    content = bytearray((run / "corpus.bin").read_bytes())
    content[:64] = content[64:128]  # other tokens of the same lengths
    (run / "corpus.bin").write_bytes(content)


LOADS = [
    Case(
        "`--save` holds checkpoints of this run, and flags of its first start are given",
        "--load {learned} --save {run} --save-interval 9", _begun_elsewhere,
    ),
    Case(
        "`--save` holds checkpoints of this run, and flags of its first start are given",
        "--load {learned} --save {run} --save-interval 9", _gone_back,
    ),
    Case(
        "`latest` names an older checkpoint than the one committed last", "", _second,
    ),
    Case(
        "every checkpoint is damaged or has lost a file", "", _damage("global_step2", cut=True), "--allow-start-over",
        reads=False,
    ),
    Case("every checkpoint is damaged or has lost a file", "", _damage("global_step2"), "--allow-start-over"),
    Case("the newest checkpoint alone is damaged", "", _newest_damaged),
    Case(
        "the checkpoint is without the state of the schedule", "--checkpoint-verify size", _without_schedule,
        "--no-load-lr-state",
    ),
    Case(
        "the checkpoint is without the state of the schedule", "--checkpoint-verify size",
        _without_schedule, "--no-load-lr-state", layout=Layout(tp=1, pp=1, dp=2), reads=False,
    ),
    Case("`--train-iters` is the iteration of the checkpoint", "--train-iters 2 --lr-decay-iters 4"),
    Case(
        "a dataset, vocabulary or tokenizer file was made again at the same path",
        "--load {run}/save --data-path {run}/corpus", _another_corpus,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", LOADS, ids=lambda case: case.row.replace("`", "")[:40])
def test_what_a_load_finds_is_told_as_the_table_says(saved: Saved, tmp_path: Path, case: Case) -> None:
    """With the words of the row; what the row refuses before reading has read nothing by then. And what allows it."""
    row, run, trace = OF_DIRECTORIES[case.row], tmp_path / "run", tmp_path / "trace"
    shutil.copytree(saved.load[LEARNED], run)
    case.prepare(run, saved)
    given = {"run": run, "learned": saved.load[LEARNED]}
    words = saved.words(LEARNED, "--load {run}", case.changes, **given)
    finished = saved.launcher.run(case.layout, *words, "--restart-trace-dir", trace)
    code = 2 if row.happens == "refused" else 0
    assert finished.exit_codes == [code] * case.layout.world_size, finished.output
    assert all(word in finished.output for word in row.words) and "Traceback" not in finished.output
    if row.happens == "refused":
        reads = [
            r for r in records(trace) if r["type"] == "span" and r["phase"] == "load" and r.get("detail") == "read"
        ]
        assert bool(reads) == case.reads and case.allowed
        words = saved.words(LEARNED, "--load {run}", case.changes, case.allowed, **given)
        allowed = saved.launcher.run(case.layout, *words, "--restart-trace", "off")
        assert allowed.exit_codes == [0] * case.layout.world_size, allowed.output


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--override-opt_param-scheduler", 2), ("--use-checkpoint-opt_param-scheduler", 2), ("--finetune", 0),
    ],
)  # fmt: skip
def test_a_checkpoint_without_the_state_of_the_schedule(saved: Saved, tmp_path: Path, flags: str, code: int) -> None:
    """Which schedule counts is no answer to where it goes on."""
    run = tmp_path / "run"
    shutil.copytree(saved.load[LEARNED], run)
    _without_schedule(run, saved)
    words = saved.words(LEARNED, "--load {run} --checkpoint-verify size", flags, run=run)
    finished = saved.launcher.run(SINGLE, *words)
    assert finished.exit_codes == [code], finished.output
    assert ("holds no state of the learning-rate schedule" in finished.output) == (code == 2)
