"""Environments that have this package and what it requires, and nothing else of the one that runs the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
# What a checkout has beside its files; build/ and *.egg-info may be of an older state.
_BESIDE = {"build", "dist", "runs"}
_ANYWHERE = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__")
_SCRIPT = """\
#!{python}
import sys
from {module} import {name}
sys.exit({name}())
"""


def clean() -> dict[str, str]:
    """This environment without what leads a process to the checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def run(*words: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=clean() | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make_environment(place: Path, *install: str) -> Path:
    """An environment in `place` with this package and nothing else."""
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=place.parent)
    python, dependencies = place / "bin" / "python", sysconfig.get_path("purelib")
    # pip sees setuptools by PYTHONPATH, and by --ignore-installed not the package that is installed there.
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index",
        "--no-build-isolation", "--ignore-installed", *install, cwd=place.parent, PYTHONPATH=dependencies,
    )  # fmt: skip
    return place


def site_packages(environment: Path) -> Path:
    return next(environment.glob("lib/python3*/site-packages"))


def required(site: Path, name: str = "megatron_restart") -> list[str]:
    """What the distribution `name` that is installed in `site` requires, each with the extra that asks for it."""
    (metadata,) = site.glob(f"{name}-*.dist-info/METADATA")
    return Parser().parsestr(metadata.read_text()).get_all("Requires-Dist", [])


def link_requirements(names: Iterable[str], site: Path, linked: set[str], extra: str = "") -> None:
    """Put these distributions into `site`, and what they require without extras: links to those that run the tests.

    Of `names` themselves those of `extra` count, too.
    """
    for requirement in map(Requirement, names):
        name = canonicalize_name(requirement.name)
        if name in linked or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        linked.add(name)
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {".."}:
            if not (site / top).exists():
                (site / top).symlink_to(str(found.locate_file(top)))
        link_requirements(found.requires or (), site, linked)


def link_script(environment: Path, name: str, package: str) -> None:
    """Put the console script `name` of a linked distribution into `environment`."""
    (entry,) = (one for one in distribution(package).entry_points if one.name == name)
    script = environment / "bin" / name
    script.write_text(_SCRIPT.format(python=environment / "bin" / "python", module=entry.module, name=entry.attr))
    script.chmod(0o755)


def copy_of_the_checkout(place: Path, *left_out: str) -> Path:
    """The files of this checkout in `place`, but for those whose name begins with a dot and these directories."""

    def ignored(directory: str, names: list[str]) -> set[str]:
        return _ANYWHERE(directory, names) | ({*_BESIDE, *left_out} if Path(directory) == ROOT else set())

    return shutil.copytree(ROOT, place, ignore=ignored)
