"""The same faults for launchers of several projects: who is back when, with how much lost, and with which losses."""
