"""The restart study's own command line of its 3b model, with each of its DeepSpeed files: trained, saved, resumed.

Only paths and sizes are replaced, and nccl by gloo. Approaches 2 and 6 ask for DeepSpeed's FastFileWriter, 3, 4 and 7
for DataStates-LLM: what these need and a machine lacks ends the run with one message, here of one approach of each.
That the others ask for the same is in tests/unit/megatron/config/test_study.py.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer

from megatron.parallel.topology import Layout
from tests.dist.harness import ROOT, Run, Zygote, losses
from tests.dist.tiny_runs import Launcher
from tests.unit.megatron.config.test_study import FILES, LINES

LAYOUT = Layout(tp=4, pp=1, dp=1)
SIZES = {
    "--num-layers": "2", "--hidden-size": "64", "--ffn-hidden-size": "96", "--num-attention-heads": "8",
    "--num-key-value-heads": "4", "--seq-length": "32", "--max-position-embeddings": "32", "--micro-batch-size": "2",
    "--global-batch-size": "2", "--train-iters": "4", "--distributed-backend": "gloo",
}  # fmt: skip
BATCH = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2}
LACKING = {
    "6": "--direct-io on: DeepSpeed's FastFileWriter cannot be used: ",
    "7": "--checkpoint-engine datastates: package datastates is not installed",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """GPT-2's kind of vocabulary, and the golden run's dataset, whose tokens are fewer."""
    directory = tmp_path_factory.mktemp("study")
    trained = ByteLevelBPETokenizer(add_prefix_space=False)
    trained.train_from_iterator([Path(__file__).read_text()] * 4, vocab_size=600, special_tokens=["<|endoftext|>"])
    trained.save_model(str(directory))
    corpus = ROOT / "tests" / "golden" / "upstream_run" / "data"
    for name in ("corpus_text_document.bin", "corpus_text_document.idx"):
        shutil.copy(corpus / name, directory)  # what a training caches goes beside them
    vocabulary = {"--vocab-file": str(directory / "vocab.json"), "--merge-file": str(directory / "merges.txt")}
    return vocabulary | {"--data-path": str(directory / "corpus_text_document")}


def run_approach(zygote: Zygote, directory: Path, data: dict[str, str], approach: str, *further: str) -> Run:
    file = directory / "ds_config.json"
    file.write_text(json.dumps(FILES[approach] | BATCH))
    words = shlex.split(LINES["3"])
    for name, value in (SIZES | data | {"--save": str(directory / "save")}).items():
        words[words.index(name) + 1] = value
    words = [f"--deepspeed_config={file}" if "--deepspeed_config" in word else word for word in words]
    return Launcher(zygote, [], directory).run(LAYOUT, *words, *further)


@pytest.mark.parametrize("approach", ["0", "1", pytest.param("5", marks=pytest.mark.nightly(minutes=1))])
def test_an_approach_trains_and_resumes(zygote: Zygote, data: dict[str, str], approach: str, tmp_path: Path) -> None:
    run = run_approach(zygote, tmp_path, data, approach, "--exit-interval", "3")
    assert run.ok, run.output[-6000:]
    save = tmp_path / "save"
    if approach == "0":
        assert not list(save.glob("global_step*"))
        return
    resumed = run_approach(zygote, tmp_path, data, approach, "--load", str(save))
    assert resumed.ok, resumed.output[-6000:]
    trace = save / "restart_trace"
    assert sorted(losses(trace, 0)) == [1, 2, 3] and sorted(losses(trace, 1)) == [4]
    assert (save / "latest").read_text() == "global_step4"


@pytest.mark.parametrize("approach", LACKING)
def test_an_approach_whose_engine_cannot_be_had_ends_with_one_message(
    zygote: Zygote, data: dict[str, str], approach: str, tmp_path: Path
) -> None:
    run = run_approach(zygote, tmp_path, data, approach)
    errors = re.findall(r"^error.*", run.output, re.MULTILINE)
    assert set(run.exit_codes) == {2} and len(errors) == 1, run.output[-3000:]
    assert LACKING[approach] in errors[0]
