"""Packaging of megatron-restart, and of restart-trace, which is a part of it: the trace and its analysis.

`pip install .` installs megatron-restart; its extra `train` brings what training needs. `pip install
distributions/restart-trace` installs restart-trace. Exact versions that work together are in constraints.txt.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent

# `tools` is no name to take in everybody's site-packages: there the directory is megatron_restart_tools. Within it
# imports are relative, so that its modules work by either name. A checkout has its name by a module of that name,
# and an editable install is of a checkout: with the explicit root as its only directory it is one plain path entry.
# Otherwise setuptools installs an import hook, which every process of a training run would load at start-up.
INSTALLED_TOOLS = "megatron_restart_tools"
SCRIPTS = f"{INSTALLED_TOOLS}.restart_bench.scripts"
EDITABLE = "editable_wheel" in sys.argv
TOOLS = "tools" if EDITABLE else INSTALLED_TOOLS
TYPED = {"restart_trace": ["py.typed"], TOOLS: ["py.typed"]}
# What a package has beside Python files, for the trace and its analysis.
TRACE_DATA = {**TYPED, "restart_trace.hooks": ["site/*.py"], f"{TOOLS}.ckpt_analysis.render.html": ["templates/*"]}
TRACE_COMMANDS = ["restart-trace = restart_trace.run:main", f"ckpt-analysis = {INSTALLED_TOOLS}.ckpt_analysis.cli:main"]

(VERSION,) = re.findall(
    r'^__version__ = "(.+)"$', (HERE / "restart_trace" / "version.py").read_text(encoding="utf-8"), re.MULTILINE
)

# Lower bounds only: constraints.txt pins one set that is known to work.
INSTALL_REQUIRES = [
    "polars>=2.0",
    "numpy>=2.0",
    "tqdm>=4.60",
    "scipy>=1.15",  # tests of comparisons, Lambert's function
    "plotly>=6.0",  # only the plotly.js that it brings
    "Jinja2>=3.1",
    "psutil>=6.0",
    "nvidia-ml-py>=12.0",  # GPU values of the trace
]
TRAIN = [
    "torch>=2.11",  # the oldest with which the tests pass (tests/torch_versions.sh)
    "deepspeed>=0.19",
    "sentencepiece>=0.2",
    "tokenizers>=0.20",
    "PyYAML>=6.0",  # the file of a sweep
    "isal>=1.7",  # CRC32 with carry-less multiplication: an order of magnitude faster than zlib's
]

TENSORBOARD = ["tensorboard>=2.15"]
OTLP = ["opentelemetry-sdk>=1.40", "opentelemetry-exporter-otlp-proto-http>=1.40"]  # --otlp, ckpt-analysis follow
FIGURES = ["matplotlib>=3.8"]  # ckpt-analysis --figures
ENGINES = ["torchsnapshot==0.1.0"]
S3 = ["botocore>=1.36"]  # --save s3://BUCKET/PREFIX
COMPRESSION = ["zstandard>=0.22"]  # --checkpoint-compression zstd, --replica-compression zstd
S3TORCHCONNECTOR = [*S3, "s3torchconnector[dcp]>=1.5"]  # ckpt-replay --engine s3torchconnector
TORCH_CHECKPOINTING = ["torch-checkpointing>=0.1.1"]  # ckpt-replay --engine torch_checkpointing
SCOREBOARD = ["nvidia-resiliency-ext>=0.4", "torchft-nightly", "dlrover>=0.6"]  # benchmarks.restart_scoreboard
CLIENTS = [
    "transformers>=5.0",
    "accelerate>=1.0",
    "lightning>=2.5",
]  # trainers of others, which the tests of restart_trace.hooks trace
DEV = [
    *TRAIN,
    *TENSORBOARD,
    *OTLP,
    *FIGURES,
    *COMPRESSION,
    *CLIENTS,
    *S3TORCHCONNECTOR,
    *TORCH_CHECKPOINTING,
    "moto>=5.1",  # an S3 server
    "opentelemetry-proto>=1.40",  # reads exported spans in tests
    "prometheus-client>=0.20",  # and exported metrics
    "flask>=3.0",  # which moto serves with
    "flask-cors>=5.0",
    "pytest>=8.0",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "ruff>=0.8",
    "import-linter>=2.15",
    "pyright[nodejs]>=1.1.390",  # the extra brings its own Node.js
    "safetensors>=0.4",
    "playwright>=1.49",  # drives the system's Chromium; brings no browser
]


class WithoutTheTrainer(build_py):
    """Leaves out the tools' modules that import the trainer, of the packages that restart-trace has."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Return (package, module, file) of each module to install."""
        found = super().find_package_modules(package, package_dir)
        if package == INSTALLED_TOOLS:
            return [module for module in found if module[1] == "__init__"]
        return [module for module in found if module[:2] != (f"{INSTALLED_TOOLS}.common", "page_cache")]


def installed_tools(*names: str) -> list[str]:
    """Return the packages below tools/ that match `names`, by their names in site-packages."""
    return [name.replace("tools", INSTALLED_TOOLS, 1) for name in find_packages(include=names)]


def package(**arguments: Any) -> None:
    """Call setup() with `arguments` and what both distributions have, and leave nothing in the checkout.

    setuptools would build in the checkout, and install from there a module that is removed since.
    """
    with tempfile.TemporaryDirectory() as place:
        setup(
            version=VERSION,
            license="Apache-2.0",
            license_files=["LICENSE"],
            python_requires=">=3.10,<3.14",  # what was run under which: docs/results/README.md
            install_requires=INSTALL_REQUIRES,
            options={"build": {"build_base": place}, "egg_info": {"egg_base": place}},
            **arguments,
        )


def restart_trace() -> None:
    """Package the trace and its analysis, for an environment in which jobs of others run."""
    package(
        name="restart-trace",
        description="Measures where the checkpoints and restarts of a training job spend their time",
        packages=[
            *find_packages(include=["restart_trace", "restart_trace.*"]),
            *installed_tools("tools", "tools.common", "tools.ckpt_analysis", "tools.ckpt_analysis.*"),
        ],
        package_dir={"": ".", INSTALLED_TOOLS: "tools"},
        package_data=TRACE_DATA,
        extras_require={"otlp": OTLP, "figures": FIGURES},
        cmdclass={"build_py": WithoutTheTrainer},
        entry_points={"console_scripts": TRACE_COMMANDS},
    )


def megatron_restart() -> None:
    """Package all that there is."""
    ours = find_packages(include=["megatron", "megatron.*", "restart_trace", "restart_trace.*"])
    if EDITABLE:
        packages, package_dir = [*ours, *find_packages(include=["tools", "tools.*"])], {"": "."}
    else:
        # SCRIPTS is a package of scripts alone, which start tools.restart_bench.
        packages = [*ours, *installed_tools("tools", "tools.*"), SCRIPTS]
        package_dir = {"": ".", INSTALLED_TOOLS: "tools", SCRIPTS: "examples_deepspeed/restart_bench"}
    package(
        name="megatron-restart",
        description="3D-parallel GPT pretraining that measures its own checkpoints and restarts",
        long_description=(HERE / "README.md").read_text(encoding="utf-8"),
        long_description_content_type="text/markdown",
        packages=packages,
        package_dir=package_dir,
        package_data={**TRACE_DATA, SCRIPTS: ["*.sh", "sweep.py", "sweeps/*.yaml"], "megatron": ["py.typed"]},
        py_modules=["pretrain_gpt"],
        extras_require={
            "train": TRAIN,
            "tensorboard": TENSORBOARD,
            "engines": ENGINES,
            "s3": S3,
            "compression": COMPRESSION,
            "s3torchconnector": S3TORCHCONNECTOR,
            "torch-checkpointing": TORCH_CHECKPOINTING,
            "otlp": OTLP,
            "figures": FIGURES,
            "clients": CLIENTS,
            "scoreboard": SCOREBOARD,
            "dev": DEV,
        },
        entry_points={
            "console_scripts": [
                *TRACE_COMMANDS,
                f"restart-drill = {INSTALLED_TOOLS}.console:drill",
                f"restart-launch = {INSTALLED_TOOLS}.console:launch",
                f"restart-sweep = {INSTALLED_TOOLS}.console:sweep",
                f"ckpt-plan = {INSTALLED_TOOLS}.console:plan",
                f"ckpt-replay = {INSTALLED_TOOLS}.console:replay",
                f"hf-convert = {INSTALLED_TOOLS}.console:hf_convert",
                f"megatron-preprocess-data = {INSTALLED_TOOLS}.console:preprocess_data",
            ]
        },
    )


if __name__ == "__main__":
    megatron_restart()
