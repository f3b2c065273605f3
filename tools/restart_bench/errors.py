"""How a launch ends before its ranks have started."""

from __future__ import annotations


class SettingsError(ValueError):
    """A setting or an argument is wrong, or a launch cannot be: names the setting, its value and what to do."""


class LaunchEnded(Exception):
    """A program that the launch needs has failed, and has printed why. `reason`: in its words, for other nodes."""

    def __init__(self, status: int, reason: str = "") -> None:
        super().__init__(f"exit status {status}")
        self.status = status
        self.reason = reason
