"""What a dry run finds out about the storage of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.restart_bench.free_space import free_space, resumes


def checkpoint(place: Path, file: str) -> str:
    (place / "global_step5").mkdir(parents=True)
    (place / "global_step5" / file).touch()
    return str(place)


def test_a_run_resumes_from_a_complete_checkpoint_that_it_loads(tmp_path: Path) -> None:
    save, load = tmp_path / "save", checkpoint(tmp_path / "load", "manifest.json")
    save.mkdir()
    assert not resumes(str(save), str(save))
    assert not resumes(str(save), None) and not resumes(load, None)  # without --load a run begins anew
    assert resumes(str(save), load) and resumes(load, load)
    assert not resumes(str(save), load, weights_alone=True)
    assert resumes(load, load, weights_alone=True)  # its own later start
    assert resumes(str(save), "s3://bucket/run")  # which only the launch asks


def test_without_a_manifest_a_checkpoint_counts_if_latest_names_it(tmp_path: Path) -> None:
    place = checkpoint(tmp_path, "mp_rank_00_model_states.pt")
    assert not resumes(place, place)
    latest = tmp_path / "latest"
    for content, found in (("", False), ("global_step6", False), ("..", False), ("global_step5\n", True)):
        latest.write_text(content)
        assert resumes(place, place) == found, content
    latest.write_bytes(b"\xff\xfe")
    assert not resumes(place, place)


def test_a_checkpoint_that_is_being_written_or_removed_does_not_count(tmp_path: Path) -> None:
    place = checkpoint(tmp_path, "manifest.json")
    (tmp_path / "global_step5").rename(tmp_path / ".global_step5")
    assert not resumes(place, place)


def test_a_file_has_no_space_for_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for place in (file, file / "below"):
        with pytest.raises(NotADirectoryError, match="is no directory"):
            free_space(str(place))
