"""What a measured run would cost at scale: checkpoint interval against failure rate.

`model` holds the formulas, `inputs` takes their numbers from a report or from flags, `projection` puts them together,
`render` prints. docs/metrics.md gives every formula with its source.
"""
