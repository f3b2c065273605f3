"""Certificates for tests, made by the `openssl` command."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

from megatron.net.tls import FLAGS


class Files(NamedTuple):
    """A certificate, its key and that of the CA."""

    certificate: Path
    key: Path
    authority: Path

    @property
    def flags(self) -> list[str]:
        return [word for flag, path in zip(FLAGS, self, strict=True) for word in (flag, str(path))]

    @property
    def variables(self) -> dict[str, str]:
        return {variable: str(path) for variable, path in zip(FLAGS.values(), self, strict=True)}


def make_files(
    directory: Path, *, days: int = 2, usage: str = "serverAuth,clientAuth", passphrase: str | None = None
) -> Files:
    """In a directory that is made: a CA of its own, and what it has issued, as of `issue`."""
    directory.mkdir()
    _openssl(directory, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "ca.key")
    _openssl(
        directory, "req", "-x509", "-key", "ca.key", "-subj", "/CN=ca", "-days", "3", "-out", "ca.pem",
        "-addext", "keyUsage=critical,keyCertSign",
    )  # fmt: skip
    authority = Files(directory / "none", directory / "none", directory / "ca.pem")
    return issue(authority, directory, days=days, usage=usage, passphrase=passphrase)


def issue(
    of: Files, directory: Path, *, days: int = 2, usage: str = "serverAuth,clientAuth", passphrase: str | None = None
) -> Files:
    """A certificate of the CA of these files, in a directory that is made if there is none.

    `days`: for which it is valid from now; negative: until when it was. `usage`: its extendedKeyUsage. `passphrase`:
    of its key.
    """
    directory.mkdir(exist_ok=True)
    _openssl(directory, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "node.key")
    _openssl(directory, "req", "-new", "-key", "node.key", "-subj", "/CN=node", "-out", "node.csr")
    (directory / "usage").write_text(f"extendedKeyUsage={usage}\n")
    _openssl(
        directory, "x509", "-req", "-in", "node.csr", "-CA", str(of.authority), "-CAkey",
        str(of.authority.with_name("ca.key")), "-set_serial", "2", "-days", str(days), "-extfile", "usage", "-out",
        "node.pem",
    )  # fmt: skip
    if passphrase is not None:
        words = ("ec", "-in", "node.key", "-aes256", "-passout", f"pass:{passphrase}", "-out", "locked.key")
        _openssl(directory, *words)
        (directory / "locked.key").rename(directory / "node.key")
    return Files(directory / "node.pem", directory / "node.key", of.authority)


def _openssl(directory: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True, timeout=60)
