"""The commit protocol on disk, step by step and with whatever a crash, a full disk or a flipped bit leaves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpointing.engines.base import SavedFile
from megatron.checkpointing.engines.errors import SaveDirectorySupersededError
from megatron.checkpointing.store import commit, removal, search
from megatron.checkpointing.store.files import check_sizes, wrong_files
from megatron.checkpointing.store.manifest import Manifest, content_checksum
from megatron.checkpointing.store.naming import temporary_directory
from megatron.checkpointing.store.ownership import Ownership, claim
from megatron.checkpointing.store.search import Known, discover
from restart_trace.recorder import untraced_operation
from tests.unit.trace_helpers import start_python

FILE = "mp_rank_00_model_states.pt"


def manifest_of(step: int, num_bytes: int = 100, sequence: int = 1) -> Manifest:
    return Manifest(
        tag=f"global_step{step}",
        step=step,
        engine="torch",
        layout={"tp": 2, "pp": 1, "dp": 1},
        model={"hidden_size": 64, "swiglu": True, "normalization": "rmsnorm"},
        files={FILE: SavedFile(FILE, num_bytes, "zip-directory-crc32:0badcafe")},
        sequence=sequence,
    )


def write(save: Path, step: int, content: bytes = bytes(100)) -> Path:
    """An unfinished save: files and manifest in the hidden directory."""
    temporary = save / temporary_directory(f"global_step{step}", "000_1")
    temporary.mkdir(parents=True)
    (temporary / FILE).write_bytes(content)
    sequence = commit.next_sequence(save)
    commit.write_manifest(temporary, manifest_of(step, len(content), sequence), fsync=False)
    return temporary


def publish(save: Path, temporary: Path, fsync: bool = False, owner: Ownership | None = None) -> list[str]:
    return commit.publish(save, temporary, Manifest.of(temporary), fsync, owner)


def committed(save: Path, *steps: int, content: bytes = bytes(100)) -> None:
    for step in steps:
        publish(save, write(save, step, content), fsync=True)


def names(save: Path) -> list[str]:
    return sorted(path.name for path in save.iterdir() if path.is_dir())


def found(save: Path, tag: str | None = None) -> list[str]:
    """Names of the directories that a load would try, in order; there must be no problem with any."""
    candidates, problems = discover(save, tag)
    assert problems == []
    return [c.directory.name for c in candidates]


def prune(
    save: Path, keep_last: int | None, step: int, owner: Ownership | None = None, known: Known | None = None
) -> list[str]:
    """What the one rank of a job removes, when it is gone."""
    known = known or Known()
    while (pruned := removal.prune(save, keep_last, step, owner, known)).to_look_at:
        for candidate in pruned.to_look_at:
            if candidate.manifest is None or wrong_files(candidate.directory, candidate.manifest.files):
                known.damaged.add(candidate.directory)
            else:
                known.complete[candidate.directory] = candidate
    removals = removal.Removals(0)
    removals.begin(removal.Removal(pruned.set_aside, [], [], {}, untraced_operation()))
    removals.close()
    return pruned.removed


def test_what_may_not_be_looked_at_does_not_count_as_absent(tmp_path: Path) -> None:
    """As with an expired Kerberos ticket of NFS. A directory that has not the name of a checkpoint is others'."""
    committed(tmp_path, 1, 2)
    (tmp_path / "lost+found").mkdir()
    code = f"""
        import os, pathlib
        from megatron.checkpointing.store.search import Search
        from megatron.checkpointing.preflight.directories import newest_tag
        from tests.dist.storage import drop_root_rights
        drop_root_rights()
        save = pathlib.Path({str(tmp_path)!r})
        os.chmod(save / "lost+found", 0)
        search = Search(save, None)
        print(search.steps, search.problems, search.unanswered, newest_tag(save))
        os.chmod(save / "global_step2", 0)
        search = Search(save, None)
        print(search.steps, len(search.problems), type(search.unanswered).__name__)
        os.chmod(save, 0)
        try:
            print(Search(save / "inner", None).problems)
        except PermissionError as error:
            print(error.filename)
        for path in (save, save / "global_step2", save / "lost+found"):
            os.chmod(path, 0o700)
    """
    process = start_python(code)
    output, _ = process.communicate(timeout=300)
    assert output.splitlines() == ["[2, 1] [] None global_step2", "[1] 1 PermissionError", str(tmp_path / "inner")]


def upstream_checkpoint(save: Path, tag: str) -> None:
    (save / tag).mkdir(parents=True)
    (save / tag / FILE).write_bytes(b"x")
    (save / "latest").write_text(tag)


# The manifest


def test_manifest_survives_its_file() -> None:
    manifest = manifest_of(5)
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert json.loads(manifest.to_json())["checksum"].startswith("sha256:")


@given(st.data())
def test_manifest_with_a_flipped_bit_is_refused_or_means_the_same(data: st.DataObject) -> None:
    manifest = manifest_of(5)
    content = bytearray(manifest.to_json().encode())
    position = data.draw(st.integers(0, 8 * len(content) - 1))
    content[position // 8] ^= 1 << position % 8
    try:
        read = Manifest.from_json(content.decode())
    except ValueError:
        return
    assert read == manifest  # a flip in the white space


@given(st.integers(0, len(manifest_of(5).to_json()) - 2))
def test_truncated_manifest_is_refused(size: int) -> None:
    with pytest.raises(ValueError):
        Manifest.from_json(manifest_of(5).to_json()[:size])


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '"checksum"', '{"checksum": 1, "tag": "a"}'])
def test_other_json_is_no_manifest(text: str) -> None:
    with pytest.raises(ValueError):
        Manifest.from_json(text)


def test_manifest_of_a_later_version_is_refused() -> None:
    later = json.loads(manifest_of(5).to_json())
    del later["checksum"]
    later["manifest_version"] = 2
    text = json.dumps(later | {"checksum": content_checksum(later)})
    with pytest.raises(ValueError, match="manifest version 2, and only 1 is known"):
        Manifest.from_json(text)


def test_two_ranks_with_one_file_name() -> None:
    one, other = SavedFile("a", 1, "c:1"), SavedFile("b", 2, "c:2")
    assert commit.collect_files([[one], [], [other]]) == {"a": one, "b": other}
    with pytest.raises(ValueError, match="two ranks wrote a"):
        commit.collect_files([[one], [other, one]])


# Publishing


def test_published_checkpoint_is_found_and_named(tmp_path: Path) -> None:
    committed(tmp_path, 5, 10)
    assert found(tmp_path) == ["global_step10", "global_step5"]
    assert (tmp_path / "latest").read_text() == "global_step10"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert sorted(os.listdir(tmp_path)) == [
        "global_step10", "global_step5", "latest", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip


def test_unfinished_save_is_not_seen(tmp_path: Path) -> None:
    committed(tmp_path, 5)
    write(tmp_path, 10)
    assert found(tmp_path) == ["global_step5"]


def test_tag_that_is_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    committed(tmp_path, 5)
    committed(tmp_path, 5, content=b"new")
    assert found(tmp_path) == ["global_step5", "global_step5.replaced"]
    assert (tmp_path / "global_step5" / FILE).read_bytes() == b"new"
    assert prune(tmp_path, None, 5) == ["global_step5.replaced"]
    assert names(tmp_path) == ["global_step5"]


def test_crash_with_the_old_one_aside(tmp_path: Path) -> None:
    """The old one is loaded, kept by the next commit, and gone once its tag stands again."""
    committed(tmp_path, 5)
    os.rename(tmp_path / "global_step5", tmp_path / "global_step5.replaced")
    shutil.rmtree(write(tmp_path, 5, b"new"))
    assert found(tmp_path) == found(tmp_path, "global_step5") == ["global_step5.replaced"]
    committed(tmp_path, 6)
    prune(tmp_path, None, 6)
    assert names(tmp_path) == ["global_step5.replaced", "global_step6"]
    committed(tmp_path, 5, content=b"again")
    prune(tmp_path, None, 5)
    assert names(tmp_path) == ["global_step5", "global_step6"]


def test_publish_that_fails_changes_nothing(tmp_path: Path) -> None:
    """The rename is refused, with the old checkpoint moved aside already: it is put back."""
    committed(tmp_path, 5)
    with pytest.raises(FileNotFoundError):
        commit.publish(tmp_path, tmp_path / "absent", manifest_of(5), fsync=False)
    assert (tmp_path / "global_step5" / FILE).read_bytes() == bytes(100)
    assert not (tmp_path / "global_step5.replaced").exists()
    assert (tmp_path / "latest").read_text() == "global_step5"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5"


def test_every_step_of_a_commit_is_synchronised_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read off the order of the real calls, each of which is carried out."""
    calls: list[str] = []
    real_fsync, real_rename, real_replace = os.fsync, os.rename, os.replace

    def fsync(fd: int) -> None:
        calls.append("fsync " + Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        real_fsync(fd)

    def rename(source: Path, target: Path) -> None:
        calls.append("rename to " + Path(target).name)
        real_rename(source, target)

    def replace(source: Path, target: Path) -> None:
        calls.append("replace " + Path(target).name)
        real_replace(source, target)

    temporary = tmp_path / temporary_directory("global_step5", "a")
    temporary.mkdir()
    (temporary / FILE).write_bytes(bytes(100))
    for name, function in (("fsync", fsync), ("rename", rename), ("replace", replace)):
        monkeypatch.setattr(os, name, function)
    commit.write_manifest(temporary, manifest_of(5), fsync=True)
    publish(tmp_path, temporary, fsync=True)
    assert calls == [
        "fsync .manifest.json.tmp", "replace manifest.json", f"fsync {temporary.name}",
        "fsync .latest.tmp", "fsync .latest_checkpointed_iteration.txt.tmp",
        "rename to global_step5", f"fsync {tmp_path.name}",
        "replace latest", "replace latest_checkpointed_iteration.txt", f"fsync {tmp_path.name}",
    ]  # fmt: skip
    calls.clear()
    publish(tmp_path, write(tmp_path, 6))
    assert not [call for call in calls if call.startswith("fsync")]


# Going back to an earlier step


def test_commits_are_counted(tmp_path: Path) -> None:
    assert commit.next_sequence(tmp_path) == 1
    committed(tmp_path, 1, 2)
    assert commit.next_sequence(tmp_path) == 3
    (tmp_path / "latest").unlink()
    assert commit.next_sequence(tmp_path) == 3
    for told in ("no_such_tag", "global_step1"):  # as users of other programs go back
        (tmp_path / "latest").write_text(told)
        assert commit.next_sequence(tmp_path) == 3
    known = Known()
    assert [commit.next_sequence(tmp_path, known) for _ in range(2)] == [3, 4]


def test_after_going_back_the_new_course_is_newest_and_the_old_one_last(tmp_path: Path) -> None:
    committed(tmp_path, 5, 10, 15)
    committed(tmp_path, 8)  # resumed from 5 with --load-tag
    assert found(tmp_path) == ["global_step8", "global_step5", "global_step15", "global_step10"]
    (tmp_path / "global_step8" / FILE).write_bytes(b"short")
    candidates, problems = discover(tmp_path, None)
    assert candidates[0].tag == "global_step15" and len(problems) == 1
    prune(tmp_path, 2, 8)
    assert "global_step5" in names(tmp_path)


# Pruning


def test_prune_keeps_all_without_keep_last(tmp_path: Path) -> None:
    committed(tmp_path, 1, 2, 3)
    assert prune(tmp_path, None, 3) == []
    assert names(tmp_path) == ["global_step1", "global_step2", "global_step3"]


def test_prune_removes_attempts_of_generations_that_are_over_and_no_others(tmp_path: Path) -> None:
    claim(tmp_path).release()
    owner = claim(tmp_path)  # generation 2
    for attempt in ("g1_7", "g2_1", "g3_1"):
        (tmp_path / temporary_directory("global_step4", attempt)).mkdir()
    assert prune(tmp_path, None, 3) == []  # without an owner, nobody's generation is over
    assert prune(tmp_path, None, 3, owner) == [temporary_directory("global_step4", "g1_7")]
    left = [temporary_directory("global_step4", attempt) for attempt in ("g2_1", "g3_1")]
    assert names(tmp_path) == sorted([".generations", *left])
    owner.release()


def test_superseded_owner_neither_publishes_nor_prunes(tmp_path: Path) -> None:
    owner = claim(tmp_path)
    committed(tmp_path, 1, 2, 3)
    unfinished = write(tmp_path, 4)
    successor = claim(tmp_path, take_over=True)
    for change in (lambda: publish(tmp_path, unfinished, owner=owner), lambda: prune(tmp_path, 1, 3, owner)):
        with pytest.raises(SaveDirectorySupersededError, match=successor.owner.launch_id):
            change()
    assert names(tmp_path)[2:] == ["global_step1", "global_step2", "global_step3"] and unfinished.is_dir()
    assert (tmp_path / "latest").read_text() == "global_step3"
    publish(tmp_path, unfinished, owner=successor)
    assert found(tmp_path)[0] == "global_step4"
    for held in (owner, successor):
        held.release()


def damage_missing(directory: Path) -> None:
    (directory / FILE).unlink()


def damage_short(directory: Path) -> None:
    (directory / FILE).write_bytes(b"short")


def damage_no_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


@pytest.mark.parametrize("damage", [damage_missing, damage_no_manifest])
def test_only_what_is_complete_is_published(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    committed(tmp_path, 4)
    temporary = write(tmp_path, 5)
    manifest = Manifest.of(temporary)
    damage(temporary)
    with pytest.raises(FileNotFoundError, match="is not complete"):
        commit.publish(tmp_path, temporary, manifest, fsync=False)
    assert names(tmp_path) == [temporary.name, "global_step4"]
    assert (tmp_path / "latest").read_text() == "global_step4"


def test_files_whose_sizes_their_ranks_have_seen_are_only_looked_for(tmp_path: Path) -> None:
    temporary = write(tmp_path, 5)
    manifest = Manifest.of(temporary)
    check_sizes(temporary, manifest.files.values())
    damage_short(temporary)
    with pytest.raises(OSError, match=f"{FILE} has 5 bytes, 100 were saved"):
        check_sizes(temporary, manifest.files.values())
    damage_missing(temporary)
    with pytest.raises(FileNotFoundError, match=f"is not complete: .*{FILE} is missing"):
        commit.publish(tmp_path, temporary, manifest, fsync=False)
    (temporary / FILE).write_bytes(bytes(100))
    assert commit.publish(tmp_path, temporary, manifest, fsync=False) == []
    assert found(tmp_path) == ["global_step5"]


def test_what_this_launch_has_committed_is_not_looked_at_again(tmp_path: Path) -> None:
    """It counts as it was left, though a look would show that its file is short."""
    committed(tmp_path, 1, 2, 3)
    known = Known({candidate.directory: candidate for candidate in discover(tmp_path, None)[0]})
    damage_short(tmp_path / "global_step2")
    prune(tmp_path, 2, 3, known=known)
    assert names(tmp_path) == ["global_step2", "global_step3"]
    (tmp_path / "global_step3" / "manifest.json").unlink()
    assert commit.next_sequence(tmp_path, known) == 4


@pytest.mark.parametrize(("keep_last", "left"), [(1, [3]), (2, [2, 3]), (3, [1, 2, 3]), (9, [1, 2, 3])])
def test_keep_last(tmp_path: Path, keep_last: int, left: list[int]) -> None:
    committed(tmp_path, 1, 2, 3)
    prune(tmp_path, keep_last, 3)
    assert names(tmp_path) == [f"global_step{step}" for step in left]


def test_what_was_moved_aside_is_not_counted(tmp_path: Path) -> None:
    """A tag that was saved again is one checkpoint, and that before it is kept."""
    committed(tmp_path, 3, 4, 5, 5)
    assert sorted(prune(tmp_path, 2, 5)) == ["global_step3", "global_step5.replaced"]
    assert found(tmp_path) == ["global_step5", "global_step4"]


def test_what_is_not_ours_is_not_counted_and_not_removed(tmp_path: Path) -> None:
    upstream_checkpoint(tmp_path, "global_step1")
    committed(tmp_path, 2, 3, 4)
    (tmp_path / "global_step3" / "manifest.json").write_bytes(b"damaged")
    (tmp_path / "restart_trace").mkdir()
    prune(tmp_path, 1, 4)
    assert names(tmp_path) == ["global_step1", "global_step3", "global_step4", "restart_trace"]


@pytest.mark.parametrize("damage", [damage_missing, damage_short])
def test_a_damaged_checkpoint_is_not_counted_and_goes_when_there_are_enough(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    committed(tmp_path, 1, 2, 3, 4)
    damage(tmp_path / "global_step3")
    prune(tmp_path, 2, 4)
    assert names(tmp_path) == ["global_step2", "global_step3", "global_step4"]
    committed(tmp_path, 5)
    prune(tmp_path, 2, 5)
    assert names(tmp_path) == ["global_step4", "global_step5"]


def test_checkpoints_of_a_course_given_up_do_not_push_out_those_of_this_one(tmp_path: Path) -> None:
    """Going on from 5 although 10 is there, damaged perhaps: 10 is no reason to remove 5."""
    committed(tmp_path, 5, 10, 6)
    prune(tmp_path, 2, 6)
    assert names(tmp_path) == ["global_step10", "global_step5", "global_step6"]
    committed(tmp_path, 15)
    prune(tmp_path, 2, 15)
    assert names(tmp_path) == ["global_step15", "global_step6"]


def test_a_checkpoint_loses_its_name_before_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a removal that is killed half-way leaves nothing that looks like a checkpoint."""
    committed(tmp_path, 1, 2)
    seen: list[list[str]] = []
    unlink = os.unlink

    def killed(path: Path, **at: int) -> None:
        if Path(path).name == "manifest.json":
            return unlink(path, **at)
        seen.append(found(tmp_path))
        raise OSError("as if it had not come to that")

    monkeypatch.setattr(os, "unlink", killed)
    prune(tmp_path, 1, 2)
    assert seen and all(loaded == ["global_step2"] for loaded in seen)
    monkeypatch.setattr(os, "unlink", unlink)
    (left,) = tmp_path.glob(".incomplete_removed_*")
    assert prune(tmp_path, 1, 2) == [left.name] and names(tmp_path) == ["global_step2"]


# Discovering


def test_nothing_there(tmp_path: Path) -> None:
    assert discover(tmp_path, None) == ([], [])
    assert discover(tmp_path / "absent", None) == ([], [])
    (tmp_path / "restart_trace").mkdir()
    (tmp_path / "global_step3").write_text("a file")
    assert discover(tmp_path, None) == ([], [])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda d: (d / FILE).unlink(), "global_step2: {d}/" + FILE + " is missing"),
        (lambda d: (d / FILE).write_bytes(bytes(99)), "global_step2: {d}/" + FILE + " has 99 bytes, 100 were saved"),
        (lambda d: (d / "manifest.json").write_text("{"), "{d}/manifest.json: cannot be used: "),
        (lambda d: (d / "manifest.json").write_bytes(b"\xff\xfe"), "{d}/manifest.json: cannot be used: "),
        (lambda d: (d / "manifest.json").unlink(), "{d}/manifest.json is missing, so global_step2 may be incomplete"),
    ],
)
def test_damaged_checkpoint_is_named_and_the_older_one_offered(tmp_path: Path, damage: object, problem: str) -> None:
    committed(tmp_path, 1, 2)
    damage(tmp_path / "global_step2")  # type: ignore[operator]
    candidates, problems = discover(tmp_path, None)
    assert [c.step for c in candidates if c.manifest] == [1]
    if not problems:  # `latest` names a directory without a manifest: it may be upstream's; its content will tell
        assert "missing" in problem and candidates[0].manifest is None and candidates[0].step == 2
        (tmp_path / "latest").write_text("global_step1")
        candidates, problems = discover(tmp_path, None)
    assert len(problems) == 1 and problems[0].startswith(problem.format(d=tmp_path / "global_step2"))
    assert discover(tmp_path, "global_step1") == (candidates, [])


def test_older_directories_without_manifest_are_no_problem(tmp_path: Path) -> None:
    """Upstream's checkpoints have none; a run that goes on in their directory is not told of each."""
    for step in (1, 2, 3):
        upstream_checkpoint(tmp_path, f"global_step{step}")
    assert found(tmp_path) == ["global_step3"]
    committed(tmp_path, 4)
    assert found(tmp_path) == ["global_step4"]
    assert found(tmp_path, "global_step2") == ["global_step2"]


def test_copy_under_another_name_comes_after_the_original(tmp_path: Path) -> None:
    committed(tmp_path, 1, 2)
    os.rename(tmp_path / "global_step2", tmp_path / "backup")
    committed(tmp_path, 2)
    assert found(tmp_path) == ["global_step2", "backup", "global_step1"]


def test_a_job_that_saves_while_another_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published and named between the look at the directories and the end of it; and then the one before pruned."""
    committed(tmp_path, 5)
    listed = search.directories_in

    def then_saved(directory: Path) -> tuple[list[Path], list[tuple[str, str]]]:
        seen = listed(directory)
        monkeypatch.setattr(search, "directories_in", listed)
        committed(tmp_path, 10)
        return seen

    monkeypatch.setattr(search, "directories_in", then_saved)
    assert found(tmp_path) == ["global_step5"]

    def then_pruned(directory: Path) -> tuple[list[Path], list[tuple[str, str]]]:
        monkeypatch.setattr(search, "directories_in", listed)
        committed(tmp_path, 15)
        shutil.rmtree(tmp_path / "global_step10")
        return listed(directory)

    monkeypatch.setattr(search, "directories_in", then_pruned)
    assert found(tmp_path) == ["global_step15", "global_step5"]


@pytest.mark.parametrize("target", ["global_step9", "absent"])
def test_a_link_that_cannot_be_followed_is_named_and_hides_no_other(tmp_path: Path, target: str) -> None:
    committed(tmp_path, 5)
    for name in ("global_step9", "notes"):
        (tmp_path / name).symlink_to(tmp_path / (target if name == "global_step9" else name))
    candidates, problems = discover(tmp_path, None)
    assert [candidate.tag for candidate in candidates] == ["global_step5"]
    assert len(problems) == 1 and problems[0].startswith(f"{tmp_path / 'global_step9'}: cannot be followed: ")
    assert prune(tmp_path, 1, 5) == []


def test_the_manifest_of_another_checkpoint_is_called_so(tmp_path: Path) -> None:
    """Else its files would be damaged: they are not what that manifest says."""
    committed(tmp_path, 4)
    committed(tmp_path, 6, content=bytes(200))
    shutil.copy(tmp_path / "global_step4" / "manifest.json", tmp_path / "global_step6" / "manifest.json")
    candidates, problems = discover(tmp_path, None)
    assert [candidate.directory.name for candidate in candidates] == ["global_step4"]
    manifest = tmp_path / "global_step6" / "manifest.json"
    why = "is the manifest of global_step4, not of global_step6: restore that, or rename the directory"
    assert problems[0] == f"{manifest}: cannot be used: {why}"
