"""Discovery and commits among hostile files: `latest`, manifests and names that nobody would write by accident."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.checkpointing.engines.base import SavedFile
from megatron.checkpointing.store import commit
from megatron.checkpointing.store.manifest import Manifest
from megatron.checkpointing.store.search import discover
from tests.unit.hostile import NO_FILES, altered, blocking_fails, fifo
from tests.unit.megatron.checkpointing.store.test_commit import FILE, committed, found, manifest_of, prune, write

MANIFEST = "manifest.json"
PART = {"rank": 0, "header": [[0, 1, "0" * 8], [1, 2, "0" * 8]], "data": [2, 3], "states": ["a"]}
GARBAGE = [
    b"", b" \n", b"\xff\xff", b"a\x00b", b".", b"..", b"../..", b"/etc", b"a/b", b"x" * 300, b"x" * 100_000,
    b"\x1b]0;x\x07", b".incomplete_global_step1_a", b"absent",
]  # fmt: skip


def signed(content: dict[str, Any]) -> str:
    """The text of a manifest of any content, with the checksum that belongs to it."""
    import hashlib

    rest = {key: value for key, value in content.items() if key != "checksum"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    return json.dumps(rest | {"checksum": f"sha256:{digest}"})


def content_of(step: int) -> dict[str, Any]:
    return json.loads(manifest_of(step).to_json())


def discovered(save: Path) -> tuple[list[str], list[str]]:
    with blocking_fails():
        candidates, problems = discover(save, None)
    return [c.directory.name for c in candidates], problems


def reason_for(save: Path, text: str | bytes) -> str:
    """What is told of the manifest `text` of step 2, in whose place the checkpoint of step 1 is taken."""
    committed(save, 1, 2)
    (save / "global_step2" / MANIFEST).write_bytes(text.encode() if isinstance(text, str) else text)
    names, problems = discovered(save)
    assert names == ["global_step1"] and len(problems) == 1, problems
    begin = f"{save / 'global_step2' / MANIFEST}: cannot be used: "
    assert problems[0].startswith(begin)
    return problems[0].removeprefix(begin)


# `latest`


@pytest.mark.parametrize("content", GARBAGE, ids=lambda content: ascii(content[:20]))
def test_garbage_in_latest_is_told_once_and_neither_loads_nor_saves_care(tmp_path: Path, content: bytes) -> None:
    committed(tmp_path, 1)
    (tmp_path / "latest").write_bytes(content)
    names, problems = discovered(tmp_path)
    assert names == ["global_step1"]
    assert len(problems) == 1 and problems[0].startswith(str(tmp_path / "latest"))
    assert problems[0].isprintable() and len(problems[0]) < 400
    committed(tmp_path, 2)
    assert found(tmp_path) == ["global_step2", "global_step1"]


@pytest.mark.parametrize("make", NO_FILES)
def test_latest_that_is_no_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    committed(tmp_path, 1)
    (tmp_path / "latest").unlink()
    make(tmp_path / "latest")
    names, problems = discovered(tmp_path)
    assert names == ["global_step1"] and len(problems) == 1
    assert "latest: names no checkpoint: is a" in problems[0]
    with blocking_fails():
        assert commit.next_sequence(tmp_path) == 2
        committed(tmp_path, 2)
    assert discovered(tmp_path)[0] == ["global_step2", "global_step1"]


def test_latest_whose_checkpoint_is_gone(tmp_path: Path) -> None:
    committed(tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "global_step2")
    told = f"{tmp_path / 'latest'} names global_step2, which is not there"
    assert discovered(tmp_path) == (["global_step1"], [told])
    shutil.rmtree(tmp_path / "global_step1")
    assert discovered(tmp_path) == ([], [told])
    (tmp_path / "global_step2").mkdir()
    assert len(discovered(tmp_path)[1]) == 1  # as a checkpoint without a manifest: once is enough
    (tmp_path / "latest").write_text("final")
    (tmp_path / "final").mkdir()
    problems = discovered(tmp_path)[1]
    assert f"{tmp_path / 'latest'} names final, in which there is no checkpoint" in problems
    assert discover(tmp_path, "global_step1") == ([], [])  # another one is asked for


def test_latest_whose_checkpoint_is_moved_aside_names_it_still(tmp_path: Path) -> None:
    committed(tmp_path, 1)
    os.rename(tmp_path / "global_step1", tmp_path / "global_step1.replaced")
    assert found(tmp_path) == ["global_step1.replaced"]


@pytest.mark.parametrize("pointer", ["latest", "latest_checkpointed_iteration.txt"])
def test_pointer_that_cannot_be_replaced_is_told_of_and_the_checkpoint_is_there(tmp_path: Path, pointer: str) -> None:
    committed(tmp_path, 1)
    (tmp_path / pointer).unlink()
    (tmp_path / pointer).mkdir()
    for step in (2, 3):
        temporary = write(tmp_path, step)
        told = commit.publish(tmp_path, temporary, Manifest.of(temporary), fsync=True)
        assert len(told) == 1 and told[0].startswith(f"{tmp_path / pointer} could not be replaced (Is a directory)")
        assert discovered(tmp_path)[0][0] == f"global_step{step}"
        prune(tmp_path, 2, step)
    assert discovered(tmp_path)[0] == ["global_step3", "global_step2"]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_temporary_file_of_latest_that_is_no_file(tmp_path: Path) -> None:
    fifo(tmp_path / ".latest.tmp")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("untouched")
    (tmp_path / ".latest_checkpointed_iteration.txt.tmp").symlink_to(elsewhere)
    with blocking_fails():
        committed(tmp_path, 1)
    assert found(tmp_path) == ["global_step1"] and elsewhere.read_text() == "untouched"


# Manifests


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tag": 5}, "tag: must be text, and is 5"),
        ({"tag": "../x"}, "tag: '../x' begins with a dot"),
        ({"tag": "a/b"}, "tag: 'a/b' is not one name, but a path"),
        ({"tag": "a\x1b[2J"}, r"tag: 'a\x1b[2J' has characters that cannot be printed"),
        ({"step": True}, "step: must be a whole number from 0 to 9223372036854775807, and is True"),
        ({"step": -1}, "step: must be a whole number from 0"),
        ({"step": 1.0}, "step: must be a whole number from 0"),
        ({"step": "1"}, "step: must be a whole number from 0"),
        ({"step": 1 << 63}, "step: must be a whole number from 0"),
        ({"sequence": None}, "sequence: must be a whole number from 0"),
        ({"manifest_version": True}, "manifest version True, and only 1 is known"),
        ({"engine": ["torch"]}, "engine: must be printable text, and is ['torch']"),
        ({"engine": "torch\x1b[2J"}, r"engine: must be printable text, and is 'torch\x1b[2J'"),
        ({"engine": ""}, "engine: must be printable text, and is ''"),
        ({"layout": [1, 1, 1]}, "layout: must be an object, and is [1, 1, 1]"),
        ({"layout": {"tp": 2, "pp": 1}}, "layout: dp is missing"),
        ({"layout": {"tp": 2, "pp": 1, "dp": 0}}, "layout: dp: must be a whole number from 1"),
        ({"layout": {"tp": 2, "pp": 1, "dp": 1, "fsdp": 1}}, "layout: 'fsdp' is unknown"),
        ({"layout": {"tp": 2, "pp": 1, "dp": 3, "ep": 2}}, "layout: ep 2 does not divide dp 3"),
        ({"layout": {"tp": 1 << 20, "pp": 1 << 20, "dp": 1}}, "layout: is of more than 16777216 ranks"),
        ({"model": 1}, "model: must be an object, and is 1"),
        ({"model": {"hidden_size": [64]}}, "model: hidden_size must be one value, and is [64]"),
        ({"files": {}}, "files: must be an object that tells of files, and is {}"),
        ({"files": {"a": 1}}, "files: 'a': must be an object, and is 1"),
        ({"extra": 1}, "'extra' is unknown"),
        ({"files": None}, "files: must be an object that tells of files, and is None"),
    ],
    ids=str,
)  # fmt: skip
def test_manifest_of_wrong_types(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    assert told in reason_for(tmp_path, signed(content_of(2) | change))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_bytes": -1}, "num_bytes: must be a whole number from 0"),
        ({"num_bytes": True}, "num_bytes: must be a whole number from 0"),
        ({"num_bytes": 1e2}, "num_bytes: must be a whole number from 0"),
        ({"checksum": None}, "checksum: must be printable text, and is None"),
        ({"states": "a"}, "states: must be a list, and is 'a'"),
        ({"states": [{}]}, "states: must be text, and is {}"),
        ({"name": "other"}, "calls itself 'other'"),
        ({"mode": 1}, "'mode' is unknown"),
        ({"parts": []}, "parts: must be a list of what ranks have written, and is []"),
        ({"parts": [7]}, "parts: must be an object, and is 7"),
        ({"parts": [{}]}, "parts: rank is missing"),
        ({"parts": [PART | {"rank": -1}]}, "parts: rank: must be a whole number from 0"),
        ({"parts": [PART | {"data": [4, 3]}]}, "parts: data: ends before it begins: [4, 3]"),
        ({"parts": [PART | {"data": [0]}]}, "parts: data: must be the first byte of an extent and the one after"),
        ({"parts": [PART | {"data": ["0", 1]}]}, "parts: data: must be a whole number from 0"),
        ({"parts": [PART | {"header": PART["header"][:1]}]}, "parts: header: must be 2 extents with their checksums"),
        ({"parts": [PART | {"header": [[0, 4096, "x"]] * 2}]}, "parts: header: must be an extent with its checksum"),
        ({"parts": [PART | {"header": [[0, 1 << 40, "0" * 8]] * 2}]}, "parts: header: is longer than a header may be"),
        ({"parts": [PART | {"states": ["../x"]}]}, "parts: states: the path '../x' leads out of the checkpoint"),
        ({"parts": [PART | {"more": 1}]}, "parts: 'more' is unknown"),
    ],
    ids=str,
)
def test_file_of_wrong_types(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    content = content_of(2)
    content["files"][FILE] |= change
    assert reason_for(tmp_path, signed(content)).startswith(f"files: '{FILE}': {told}")


@pytest.mark.parametrize("key", ["tag", "step", "engine", "layout", "model", "files"])
def test_manifest_without(tmp_path: Path, key: str) -> None:
    content = content_of(2)
    del content[key]
    assert reason_for(tmp_path, signed(content)) == f"{key} is missing"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("", "is absolute or has an empty part"),
        ("/etc/passwd", "is absolute or has an empty part"),
        ("a//b", "is absolute or has an empty part"),
        ("../global_step1/" + FILE, "leads out of the checkpoint"),
        ("a/../../x", "leads out of the checkpoint"),
        (".", "leads out of the checkpoint"),
        ("x" * 256, "is longer than a file name can be"),
        ("a\0b", "has characters that cannot be printed"),
        ("a\ud800", "has characters that cannot be printed"),
        (MANIFEST, "is the manifest"),
    ],
)
def test_file_name_that_is_none(tmp_path: Path, name: str, told: str) -> None:
    content = content_of(2)
    content["files"][name] = content["files"].pop(FILE) | {"name": name}
    assert told in reason_for(tmp_path, signed(content))


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b'{"a":' * 100_000, b'{"checksum": ' + b"[" * 900 + b"]" * 900 + b', "a": 1}'],
    ids=["list", "object", "closed"],
)
def test_manifest_that_is_nested_deep(tmp_path: Path, text: bytes) -> None:
    told = reason_for(tmp_path, text)
    assert told in ("it is nested too deeply", "its content does not have the checksum it was written with")


def test_manifest_that_is_nested_deep_and_signed(tmp_path: Path) -> None:
    inner: Any = 1
    for _ in range(300):
        inner = {"a": inner}
    assert "model: a must be one value" in reason_for(tmp_path, signed(content_of(2) | {"model": inner}))


def test_manifest_with_a_key_twice(tmp_path: Path) -> None:
    text = manifest_of(2).to_json().replace('"step": 2,', '"step": 2,\n "step": 2,')
    assert reason_for(tmp_path, text) == "key 'step' is given twice in one object"


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_manifest_with_a_number_that_is_none(tmp_path: Path, constant: str) -> None:
    text = manifest_of(2).to_json().replace('"step": 2', f'"step": {constant}')
    assert reason_for(tmp_path, text) == f"{constant} is not a JSON number"


def test_manifest_of_before_has_no_origin_and_is_read(tmp_path: Path) -> None:
    content = content_of(2)
    del content["loaded_from"]
    assert Manifest.from_json(signed(content)) == manifest_of(2)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_altered_manifest_is_a_manifest_or_told_of(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever it says, with the right checksum: the checkpoint is offered, or named as one that cannot be used."""
    save = tmp_path_factory.mktemp("save")
    committed(save, 1, 2)
    content = data.draw(altered(content_of(2)))
    text = signed(content) if isinstance(content, dict) and data.draw(st.booleans()) else json.dumps(content)
    (save / "global_step2" / MANIFEST).write_bytes(text.encode("utf-8", "surrogatepass"))
    names, problems = discovered(save)
    assert "global_step1" in names and len(names) + len(problems) >= 2
    assert set(names) <= {"global_step1", "global_step2"}
    assert all(problem.isprintable() for problem in problems)
    prune(save, 1, 2)
    assert discovered(save)[0]


def test_forged_sequence_keeps_nobody_from_saving(tmp_path: Path) -> None:
    committed(tmp_path, 1)
    (tmp_path / "global_step1" / MANIFEST).write_text(signed(content_of(1) | {"sequence": (1 << 63) - 1}))
    committed(tmp_path, 2, 3)
    assert found(tmp_path) == ["global_step3", "global_step2", "global_step1"]
    (tmp_path / "latest").write_bytes(b"\xff")
    committed(tmp_path, 4)
    assert found(tmp_path)[0] == "global_step4"


def test_manifest_that_no_load_would_take_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leads out of the checkpoint"):
        bad = SavedFile("../x", 1, "none")
        commit.write_manifest(tmp_path, replace(manifest_of(1), files={"../x": bad}), fsync=False)
    assert list(tmp_path.iterdir()) == []


# What lies in a checkpoint


@pytest.mark.parametrize("make", NO_FILES)
@pytest.mark.parametrize("name", [MANIFEST, FILE])
def test_what_is_no_file_in_a_checkpoint(tmp_path: Path, make: Callable[[Path], None], name: str) -> None:
    committed(tmp_path, 1, 2)
    path = tmp_path / "global_step2" / name
    path.unlink()
    make(path)
    names, problems = discovered(tmp_path)
    assert names == ["global_step1"] and len(problems) == 1
    assert f"{path}" in problems[0] and ("is a" in problems[0])


def test_file_that_is_a_link(tmp_path: Path) -> None:
    """Within the checkpoint it may be one; out of it, it is another file than the one that was saved."""
    committed(tmp_path, 1, 2, 3, 4)
    for step, target in ((2, "data"), (3, "../global_step1/" + FILE), (4, "absent")):
        path = tmp_path / f"global_step{step}" / FILE
        os.rename(path, path.with_name("data"))
        path.symlink_to(target)
    names, problems = discovered(tmp_path)
    assert names == ["global_step2", "global_step1"]
    path = tmp_path / "global_step3" / FILE
    assert problems == [
        f"global_step4: {tmp_path / 'global_step4' / FILE} is missing",
        f"global_step3: {path} is a link that leads out of the checkpoint, not a regular file",
    ]


def test_directory_that_is_a_link(tmp_path: Path) -> None:
    committed(tmp_path, 1, 2)
    content = content_of(2)
    content["files"]["parts/" + FILE] = content["files"].pop(FILE) | {"name": "parts/" + FILE}
    (tmp_path / "global_step2" / MANIFEST).write_text(signed(content))
    (tmp_path / "global_step2" / "parts").symlink_to("../global_step1")
    names, problems = discovered(tmp_path)
    assert names == ["global_step1"]
    linked = tmp_path / "global_step2" / "parts"
    assert problems == [f"global_step2: {linked} is a link that leads out of the checkpoint"]
    os.rename(tmp_path / "global_step2", tmp_path / "moved")
    (tmp_path / "global_step1").rename(tmp_path / "archive")
    (tmp_path / "global_step1").symlink_to("archive")  # the checkpoint itself may lie elsewhere
    assert "global_step1" in discovered(tmp_path)[0]
