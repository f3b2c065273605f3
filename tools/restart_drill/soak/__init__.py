"""Many saves and restarts with every engine. Do they lose a checkpoint, or leak files, shared memory or processes?

    python -m tools.restart_drill.soak --out runs/soak --minutes 10
    python -m tools.restart_drill.soak --out runs/soak --saves 200 --restarts 50

For each engine, megatron.launch trains a tiny model that saves at every iteration. Faults end its ranks again and
again, and the launcher restarts them in place, so that a leak of the launcher accumulates. Then the last ranks train on
without faults, and end after SIGTERM. docs/restart_drill.md says what is checked.
"""
