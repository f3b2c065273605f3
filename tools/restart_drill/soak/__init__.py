"""Many saves and restarts with every engine: is a checkpoint lost, or are files, memory or processes left behind?

For each engine, megatron.launch trains a tiny model that saves at every iteration. Faults end its ranks again and
again, and the launcher restarts them in place, so that a leak of the launcher accumulates. Then the last ranks train on
without faults, and end after SIGTERM. docs/restart_drill.md says what is checked.
"""
