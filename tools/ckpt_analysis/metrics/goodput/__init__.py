"""What share of a run was useful, as several organisations define it. docs/metrics.md has the definitions."""
