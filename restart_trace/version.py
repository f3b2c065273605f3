"""The version of the project: the one place that says it. setup.py and the scripts read it as text."""

__version__ = "0.1.0"
