"""Predicts the time of a training step on a named device; docs/ckpt_plan.md has formulas, sources and limits."""
