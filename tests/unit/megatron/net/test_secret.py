"""The secret of a launch: made, given, refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from megatron.net.secret import VARIABLE, SecretError, launch_secret, make_secret, required_secret, take_secret_of

GIVEN = "g" * 32


@pytest.fixture
def none_given(own_environment: None) -> None:
    os.environ.pop(VARIABLE, None)


@pytest.mark.usefixtures("none_given")
def test_one_host_makes_its_own_and_takes_a_given_one() -> None:
    with pytest.raises(SecretError, match=f"{VARIABLE}: is not set"):
        required_secret()
    make_secret()
    made = required_secret()
    assert len(made) == 64
    make_secret()
    assert required_secret() == made
    os.environ[VARIABLE] = GIVEN
    make_secret()
    assert launch_secret() == GIVEN
    os.environ[VARIABLE] = "short"
    with pytest.raises(SecretError, match=f"{VARIABLE}: has 5 characters") as refused:
        launch_secret()
    assert "short" not in str(refused.value)


@pytest.mark.usefixtures("none_given")
def test_a_file_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(SecretError, match=r"--secret-file \S+: No such file or directory; start the coordinator first"):
        take_secret_of(file, create=False)
    take_secret_of(file, create=True)
    made = required_secret()
    assert file.read_bytes() == made + b"\n" and file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]
    take_secret_of(file, create=True)
    assert required_secret() == made
    os.environ[VARIABLE] = GIVEN
    with pytest.raises(SecretError, match=rf"--secret-file \S+: {VARIABLE} is another secret"):
        take_secret_of(file, create=True)
    os.environ.pop(VARIABLE)
    file.chmod(0o604)
    with pytest.raises(SecretError, match=re.escape(f"others may access it (mode 604); chmod 600 {file}")) as refused:
        take_secret_of(file, create=False)
    assert "defaultMode: 0400" in str(refused.value) and VARIABLE in str(refused.value)
    with pytest.raises(SecretError, match=r"--secret-file \S+: No such file or directory; make it yourself"):
        take_secret_of(tmp_path / "absent" / "secret", create=True)  # the coordinator itself
    for content, why in ((b"short", "has 5 characters"), (b"\xff" * 40, "is no text"), (b"", "has 0 characters")):
        file.write_bytes(content)
        file.chmod(0o600)
        with pytest.raises(SecretError, match=why):
            take_secret_of(file, create=True)
