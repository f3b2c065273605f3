"""Damage on the way from disk: an error that names the file, or the state as it was; never another state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing.engines.errors import CheckpointDamagedError
from tests.conformance.damage import BOMB, OTHER, REFUSED, damaged, flipped, outcome, pickles, positions, resized
from tests.conformance.states import tensor
from tests.conformance.subjects import Saved, Subject

FIRST, SECOND = "layer_01-model_00-model_states.pt", "layer_02-model_00-model_states.pt"
FLIPS_PER_FILE = 40


def states() -> dict[str, Any]:
    return {
        FIRST: {"weight": tensor(torch.float32, 300, seed=1), "step": 7, "list": ["a", 1.5, {"b": None}]},
        SECOND: {"weight": tensor(torch.bfloat16, 7, 9, seed=2), "step": 8, "name": "second"},
    }


@dataclass
class Target:
    """A checkpoint to harm; every test leaves it as it was."""

    subject: Subject
    saved: Saved

    @property
    def files(self) -> list[Path]:
        return [self.saved.directory / file.name for file in self.saved.files]

    def outcome(self, path: Path, content: bytes, named: str | None = None, **options: Any) -> str:
        """What loading comes to with that content in a file; `named` is what an error must name."""
        with damaged(path, content):
            return outcome(self.subject, states(), self.saved, damaged=path.name if named is None else named, **options)


@pytest.fixture(scope="module")
def target(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    made = Target(subject, subject.save(states(), tmp_path_factory.mktemp("damaged") / "checkpoint"))
    before = {path: path.read_bytes() for path in made.files}
    yield made
    assert {path: path.read_bytes() for path in made.files} == before


def test_a_flipped_bit_anywhere_in_any_file(target: Target) -> None:
    """Headers and metadata included."""
    refused = 0
    for number, path in enumerate(target.files):
        content = path.read_bytes()
        assert content, f"{path} is empty"
        for position, bit in positions(len(content), FLIPS_PER_FILE, seed=number):
            found = target.outcome(path, flipped(content, position, bit))
            assert found != OTHER, f"bit {bit} of byte {position} of {path.name} went unnoticed"
            refused += found == REFUSED
    assert refused >= FLIPS_PER_FILE // 3, "hardly any damage was noticed"


def test_a_flipped_bit_without_verification_raises_nothing_else(target: Target) -> None:
    """--checkpoint-verify size: a header that makes no sense is still an error by name, or the trainer would die."""
    for number, path in enumerate(target.files):
        content = path.read_bytes()
        for position, bit in positions(len(content), FLIPS_PER_FILE // 2, seed=100 + number):
            target.outcome(path, flipped(content, position, bit), named="", verify_checksums=False)


def test_a_short_file(target: Target) -> None:
    for path in target.files:
        content = path.read_bytes()
        for size in (0, 1, len(content) // 2, len(content) - 1):
            assert target.outcome(path, content[:size]) == REFUSED, f"{path.name} with {size} bytes"
        assert target.outcome(path, content + b"\0") == REFUSED, f"{path.name} with a byte too many"


@pytest.mark.parametrize("verify", [True, False])
def test_a_file_that_was_short_all_along(target: Target, verify: bool) -> None:
    """The manifest says the size that it has: only its content tells."""
    for path in target.files:
        content, name = path.read_bytes(), path.relative_to(target.saved.directory).as_posix()
        for size in (0, 1, 8, 100, len(content) // 2, len(content) - 1):
            if size >= len(content):
                continue
            manifest = resized(target.saved.manifest, name, size)
            named = path.name if verify else ""  # the parser that stumbles may know no more than the state
            found = target.outcome(path, content[:size], named, manifest=manifest, verify_checksums=verify)
            assert found == REFUSED or (not verify and size == len(content) - 1), f"{path.name} with {size} bytes"


def test_a_missing_file(target: Target) -> None:
    for path in target.files:
        content = path.read_bytes()
        path.unlink()
        try:
            with pytest.raises((CheckpointDamagedError, FileNotFoundError), match=path.name):
                target.subject.load(list(states()), target.saved)
        finally:
            path.write_bytes(content)


def test_a_directory_in_the_place_of_a_file(target: Target) -> None:
    path = target.files[0]
    content = path.read_bytes()
    path.unlink()
    path.mkdir()
    try:
        with pytest.raises((CheckpointDamagedError, OSError), match=path.name):
            target.subject.load(list(states()), target.saved)
    finally:
        path.rmdir()
        path.write_bytes(content)


def test_files_of_two_checkpoints_mixed_up(subject: Subject, tmp_path: Path) -> None:
    """Every file as long as the manifest says, but of another step."""
    one = subject.save({FIRST: {"weight": torch.zeros(500), "step": 1}}, tmp_path / "one")
    other = subject.save({FIRST: {"weight": torch.ones(500), "step": 2}}, tmp_path / "other")
    for file, its_like in zip(one.files, other.files, strict=True):  # some engines give files random names
        path = one.directory / file.name
        stranger = (other.directory / its_like.name).read_bytes()
        if stranger == path.read_bytes():
            continue
        manifest = resized(one.manifest, file.name, len(stranger))  # an engine that compresses: sizes differ
        with damaged(path, stranger), pytest.raises((CheckpointDamagedError, OSError), match=path.name):
            subject.load([FIRST], one, manifest=manifest)


# ---------------------------------------------------------------- pickles


class Harmful:
    """Making a pickle of it is harmless; unpickling it makes a directory."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        import os

        return os.mkdir, ("harmed",)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a pickle that is run leaves its mark."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_state_that_would_run_code_when_unpickled(subject: Subject, here: Path) -> None:
    try:
        saved = subject.save({FIRST: {"weight": torch.ones(3), "harmful": Harmful()}}, here / "checkpoint")
    except Exception as exc:  # refusing to save it is fine
        assert "Harmful" in str(exc) or "mkdir" in str(exc)  # the class, or what its pickle would call
    else:
        with pytest.raises(CheckpointDamagedError):
            subject.load([FIRST], saved)
    assert not (here / "harmed").exists()


@pytest.mark.parametrize("verify", [True, False])
def test_no_pickle_is_run(target: Target, here: Path, verify: bool) -> None:
    """Not one in the place of a file, and not one in the place of a pickle within a file."""
    torch.save({"weight": Harmful()}, here / "bomb.pt")
    for path in target.files:
        content, name = path.read_bytes(), path.relative_to(target.saved.directory).as_posix()
        harmful = [BOMB, (here / "bomb.pt").read_bytes()]
        for start, length in pickles(content):
            if length >= len(BOMB):
                harmful.append(content[:start] + BOMB.ljust(length, b".") + content[start + length :])
        for bomb in harmful:
            manifest = resized(target.saved.manifest, name, len(bomb))
            found = target.outcome(path, bomb, named="", manifest=manifest, verify_checksums=verify)
            assert not (here / "harmed").exists(), f"{path.name}: code in it was run"
            assert found != OTHER or not verify
