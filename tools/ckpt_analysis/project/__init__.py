"""Predictions of what measured runs would cost in other conditions. docs/metrics.md has the formulas with sources.

At scale, over checkpoint interval and failure rate: `model` has the formulas, `inputs` takes their numbers from a
report or from flags, `projection` applies them, `recovery` does so with measured restarts. On another layout: `drills`
takes the samples of runs, `costs` fits them, `deployment` reads the flags, `twin` predicts. With other phase
durations: `what_if` asks, `replay` replays a start and `save_replay` a save. `replicas` computes which losses of nodes
copies in memory survive.
"""
