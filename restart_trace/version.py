"""The version of the project, defined here only. setup.py and the scripts read this file as text."""

__version__ = "0.1.0"
