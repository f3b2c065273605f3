"""Making and removing where a link leads to somebody else's files, which must stay as they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.fileio import no_links


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """Somebody else's directory, with a file, and one in a folder."""
    directory = tmp_path / "precious"
    (directory / "folder").mkdir(parents=True)
    for name in ("a.pt", "folder/a.pt"):
        (directory / name).write_text("mine")
    return directory


def untouched(precious: Path) -> bool:
    return all((precious / name).read_text() == "mine" for name in ("a.pt", "folder/a.pt"))


def test_files_and_their_empty_folders_go_and_others_stay(tmp_path: Path) -> None:
    for name in ("a.pt", "one/a.pt", "one/deep/a.pt", "two/a.pt", "two/notes.txt"):
        path = tmp_path / "checkpoint" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    no_links.remove_files(tmp_path / "checkpoint", ["a.pt", "one/a.pt", "one/deep/a.pt", "two/a.pt", "absent.pt"])
    assert no_links.files_in(tmp_path / "checkpoint") == ["two/notes.txt"]
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["two"]
    no_links.remove_files(tmp_path / "absent", ["a.pt"])


@pytest.mark.parametrize("linked", ["", "one", "one/folder"])
def test_no_part_of_a_path_may_be_a_link(tmp_path: Path, precious: Path, linked: str) -> None:
    directory = tmp_path / "checkpoint"
    link = directory / linked
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(precious / "folder" if linked == "one/folder" else precious)
    names = [f"{linked}/a.pt".lstrip("/"), f"{linked}/folder/a.pt".lstrip("/"), "a.pt", "one/folder/a.pt"]
    no_links.remove_files(directory, names)
    assert untouched(precious) and link.is_symlink()
    assert no_links.files_in(directory) == ([linked] if linked else [])


def test_a_link_that_has_the_name_of_a_file_goes_itself(tmp_path: Path, precious: Path) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for name, target in (("a.pt", precious / "a.pt"), ("b.pt", precious), ("c.pt", tmp_path / "absent")):
        (directory / name).symlink_to(target)
    no_links.remove_files(directory, ["a.pt", "b.pt", "c.pt"])
    assert untouched(precious) and list(directory.iterdir()) == []


def test_a_directory_is_made_with_those_above_and_may_be_there(tmp_path: Path) -> None:
    for _ in range(2):
        no_links.make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "link").symlink_to(tmp_path / "a")  # --save may lie behind one
    no_links.make_directory(tmp_path / "link" / "c")
    assert (tmp_path / "a" / "c").is_dir()


@pytest.mark.parametrize("there", ["link", "dangling", "file"])
def test_nothing_but_a_directory_passes_for_one(tmp_path: Path, precious: Path, there: str) -> None:
    path = tmp_path / "mine"
    path.touch() if there == "file" else path.symlink_to(precious if there == "link" else tmp_path / "absent")
    why = "is not a directory" if there == "file" else "is a link, which is not followed"
    with pytest.raises(NotADirectoryError, match=f"{why}: remove it, or rename it: '{path}'"):
        no_links.make_directory(path)
    assert untouched(precious) and not os.path.exists(tmp_path / "absent")


@pytest.mark.parametrize("looked", ["lstat", "stat"])
def test_a_folder_that_others_remove_meanwhile_is_not_the_directory_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked: str
) -> None:
    for name in ("one/a.pt", "two/a.pt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    call = getattr(os, looked)

    def then_gone(path: str, **where: object) -> os.stat_result:
        if path == "one" and (tmp_path / "one").exists():
            monkeypatch.undo()
            no_links.remove_files(tmp_path, ["one/a.pt"])
        return call(path, **where)

    monkeypatch.setattr(os, looked, then_gone)
    assert no_links.files_in(tmp_path) == ["two/a.pt"]
    with pytest.raises(FileNotFoundError):
        no_links.files_in(tmp_path / "absent")
