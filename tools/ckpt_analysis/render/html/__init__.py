"""The report as one HTML file that works without a network: figures by plotly, tables, findings, definitions.

Each figure is a module with one function from `RunData` to `Content` and is a record in `figures.FIGURES`. What a
trace did not record becomes a sentence in its place.
"""
