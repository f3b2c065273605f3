"""Optimizer choice, parameter groups and schedules."""
