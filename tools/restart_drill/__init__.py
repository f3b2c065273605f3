"""Inject a fault into a training at a chosen point, restart it, verify the result and account for the time lost."""
