"""Which phases a rank waits in, and which follow their operation; a phase that is in none of these is work."""

from __future__ import annotations

# Time in these is time in which a rank does nothing but wait for other ranks, or for an earlier save.
WAITING = ("barrier", "rendezvous", "wait_previous")
# Phases, with all their details, in which every rank takes part and that none leaves before the last has come.
SYNCHRONISING = ("rendezvous", "communicators", "barrier", "first_step")
# What follows when the operation is over: no part of its whole.
AFTERWARDS = ("caught_up", "remove")
