"""What DeepSpeed's JSON may say of engine `lazy`, and what becomes of a state in a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed.runtime.engine
import pytest
import torch

import megatron.adapters.deepspeed  # noqa: F401
from megatron.adapters.deepspeed_engine import LazySettings, load_file
from megatron.adapters.lazy_files import options
from megatron.adapters.to_torch import main as to_torch
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from tests.dist.harness import ROOT


def engine_for(checkpoint: dict[str, Any], **others: Any) -> Any:
    """What deepspeed.initialize makes with this JSON."""
    config = SimpleNamespace(_param_dict={"checkpoint": checkpoint, **others})
    return deepspeed.runtime.engine.create_checkpoint_engine(config, None, 1, False, True)


@pytest.mark.parametrize(
    ("checkpoint", "others", "message"),
    [
        ({"engine": "lazy"}, {}, r'"engine": \'lazy\'.*must be {"type": "lazy"}; or leave it out'),
        ({"engine": {"type": "quick"}}, {}, "'quick'.*must be"),
        ({"engine": {"type": "lazy", "fysnc": True}}, {}, '"fysnc": true.*keys beside "type" are "snapshot"'),
        ({"engine": {"type": "lazy", "fsync": 1}}, {}, '"fsync": 1'),
        ({"engine": {"type": "lazy", "snapshot": "eager"}}, {}, '"snapshot": "eager".*lazy or copy'),
        ({"engine": {"type": "lazy", "io_threads": 0}}, {}, '"io_threads": 0.*a number above 0'),
        ({"engine": {"type": "lazy", "timeout_minutes": True}}, {}, '"timeout_minutes": true'),
        ({"engine": {"type": "lazy"}, "writer": {"type": "FAST"}}, {}, "choose one"),
        ({"engine": {"type": "lazy"}}, {"datastates_ckpt": {"enabled": True}}, "choose one"),
        ({"engine": {"type": "lazy"}, "use_node_local_storage": True}, {}, "use a shared one"),
    ],
)
def test_a_stanza_that_cannot_be_obeyed_is_refused(
    checkpoint: dict[str, Any], others: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine_for(checkpoint, **others)


def test_settings_are_those_of_the_stanza() -> None:
    given = {"snapshot": "copy", "fsync": False, "verify": False, "io_threads": 2, "timeout_minutes": 0.5}
    assert LazySettings.of(given) == LazySettings("copy", False, False, 2, 0.5)


def test_files_of_torch_save_are_loaded_and_others_refused(tmp_path: Path) -> None:
    for name, zip_file in (("new.pt", True), ("old.pt", False)):
        torch.save({"step": 3}, tmp_path / name, _use_new_zipfile_serialization=zip_file)
        assert load_file(tmp_path / name, "cpu", options()) == {"step": 3}
    (tmp_path / "lost.pt").write_bytes(b"\x10" + bytes(100))
    with pytest.raises(CheckpointDamagedError, match="lost.pt: not a file of torch.save, and .*lazy_manifest"):
        load_file(tmp_path / "lost.pt", "cpu", options())
    (tmp_path / "lazy_manifest.json").write_text('{"version": 1, "files": {"new.pt')
    with pytest.raises(CheckpointDamagedError, match="lazy_manifest.json: cannot be read as a manifest"):
        load_file(tmp_path / "new.pt", "cpu", options())


def run_module(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron.adapters", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_command_runs_a_script_as_an_interpreter_would(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("import sys\nprint(sys.argv, sys.path[0], 'deepspeed' in sys.modules, __name__)\nsys.exit(3)\n")
    done = run_module("--local_rank=1", str(script), "--steps", "2")  # as DeepSpeed's launcher gives it
    assert done.returncode == 3
    assert done.stdout == f"{[str(script), '--local_rank=1', '--steps', '2']} {tmp_path} False __main__\n"
    done = run_module("-m", "json.tool", "--help")
    assert done.returncode == 0 and "json" in done.stdout
    done = run_module()
    assert done.returncode == 2 and "no program is given" in done.stderr


def test_what_is_no_checkpoint_is_not_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert to_torch([str(tmp_path), str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said == f"to_torch: {tmp_path}/lazy_manifest.json is missing: no complete checkpoint of engine lazy\n"
    assert not (tmp_path / "out").exists()
