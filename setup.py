"""Packaging of megatron-restart. Exact versions that work together are in constraints.txt."""

from __future__ import annotations

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent

# Lower bounds only: constraints.txt pins one set that is known to work.
INSTALL_REQUIRES = [
    "torch>=2.6",
    "deepspeed>=0.19",
    "sentencepiece>=0.2",
    "tokenizers>=0.20",
    "numpy>=2.0",
    "psutil>=6.0",
    "nvidia-ml-py>=12.0",
    "isal>=1.7",  # CRC32 with carry-less multiplication: an order of magnitude faster than zlib's
]

ANALYSIS = [
    "polars>=2.0",
    "tqdm>=4.60",
    "scipy>=1.15",  # tests of comparisons, Lambert's function
    "plotly>=6.0",  # only the plotly.js that it brings
    "Jinja2>=3.1",
]
TENSORBOARD = ["tensorboard>=2.15"]
ENGINES = ["torchsnapshot==0.1.0"]
DEV = [
    *ANALYSIS,
    *TENSORBOARD,
    "pytest>=8.0",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "ruff>=0.8",
    "pyright[nodejs]>=1.1.390",  # the extra brings its own Node.js
    "safetensors>=0.4",
    "pandas>=2.2",  # tools.ckpt_analysis.bench compares itself with it
    "import-linter>=2.15",
    "playwright>=1.49",  # drives the system's Chromium; brings no browser
]

setup(
    name="megatron-restart",
    version="0.1.0",
    description="3D-parallel GPT pretraining that measures its own checkpoints and restarts",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.13",
    packages=find_packages(
        include=["megatron", "megatron.*", "restart_trace", "restart_trace.*", "tools", "tools.*"]
    ),
    # The explicit root makes an editable install one plain path entry. Without it setuptools installs an
    # import hook, which every process of a training run would load at start-up.
    package_dir={"": "."},
    package_data={"tools.ckpt_analysis.html": ["templates/*"]},
    py_modules=["pretrain_gpt"],
    install_requires=INSTALL_REQUIRES,
    extras_require={
        "analysis": ANALYSIS,
        "tensorboard": TENSORBOARD,
        "engines": ENGINES,
        "dev": DEV,
    },
    entry_points={
        "console_scripts": [
            "ckpt-analysis = tools.ckpt_analysis.__main__:main",
            "megatron-preprocess-data = tools.preprocess_data:main",
        ]
    },
)
