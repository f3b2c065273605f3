"""Each system call of a commit and of a search fails in each way: what is said of a checkpoint is true."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing.store import commit
from megatron.checkpointing.store.manifest import Manifest
from megatron.checkpointing.store.ownership import claim
from megatron.checkpointing.store.search import discover
from tests.faults.injection import Fault, Traced, faults_at, in_a_small_process, run_traced
from tests.unit.megatron.checkpointing.store.test_commit import committed, write

TAG = "global_step3"


def each_fault(work: Callable[[], Any], directory: Path, effects: tuple[str, ...]) -> Iterator[tuple[Fault, Traced]]:
    """Do `work` with one fault after the other, each time on a new copy of what is in the directory."""
    before = directory.with_name("before")
    shutil.copytree(directory, before)

    def run(fault: Fault | None) -> Traced:
        shutil.rmtree(directory)
        shutil.copytree(before, directory)
        return run_traced(work, lambda path: f"{path}/".startswith(f"{directory}/"), fault)

    for faults in faults_at(run(None).calls):
        for fault in faults:
            if fault.effect in effects:
                yield fault, run(fault)


@pytest.mark.slow
def test_a_commit_that_raises_has_published_nothing(tmp_path: Path) -> None:
    """Whatever fails after the rename is returned, and is no error: the checkpoint would be found by every load."""
    in_a_small_process(commit_with_each_fault, tmp_path / "save")


def commit_with_each_fault(save: Path) -> None:
    save.mkdir()
    held = claim(save)
    held.release()
    committed(save, 1, 2)
    temporary = write(save, 3)
    manifest = Manifest.of(temporary)

    def publish() -> str | None:
        """Why nothing was published."""
        try:
            commit.publish(save, temporary, manifest, True, held)
        except OSError as error:
            return str(error)
        return None

    refused = 0
    for fault, traced in each_fault(publish, save, ("EIO", "late EIO", "lasting EIO")):
        assert traced.raised is None, traced.raised
        assert (save / TAG / "manifest.json").exists() == (traced.result is None), f"{fault} ({traced.hit})"
        assert {path.name for path in save.glob("global_step?")} >= {"global_step1", "global_step2"}
        refused += traced.result is not None
    assert refused


@pytest.mark.slow
def test_a_search_that_storage_does_not_answer_hides_no_checkpoint(tmp_path: Path) -> None:
    """A manifest of which the storage does not tell is not one that is missing, and a directory not an empty one."""
    in_a_small_process(search_with_each_fault, tmp_path / "save")


def search_with_each_fault(save: Path) -> None:
    committed(save, 1, 2)
    (save / "latest").unlink()

    def search() -> tuple[list[str], list[str]]:
        candidates, problems = discover(save, None)
        return [candidate.tag for candidate in candidates], problems

    told = 0
    for fault, traced in each_fault(search, save, ("EIO", "late EIO")):
        if traced.raised is not None:
            assert "OSError" in traced.raised, traced.raised
            continue
        tags, problems = traced.result
        for tag in {"global_step1", "global_step2"} - set(tags):
            told += 1
            assert any(tag in problem for problem in problems), (
                f"{fault} ({traced.hit}) hides {tag}: {tags}, {problems}"
            )
    assert told
