"""In a checkout, tools/ under its name in an installed package, which all scripts call. See setup.py."""

from pathlib import Path

__path__ = [str(Path(__file__).absolute().with_name("tools"))]
