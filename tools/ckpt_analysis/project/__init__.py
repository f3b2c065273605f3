"""What measured runs would cost elsewhere.

At scale, checkpoint interval against failure rate: `model` holds the formulas, `inputs` takes their numbers from a
report or from flags, `projection` puts them together. On another layout: `drills` takes what runs measured, `costs`
learns from them, `deployment` reads what is asked for, `twin` predicts. `what_if` asks what other phases would make of
a start or a save: `replay` does the ranks again, `save_replay` a save's pieces. `replicas` counts which losses copies
in memory survive. `render` prints. docs/metrics.md gives every formula with its source.
"""
