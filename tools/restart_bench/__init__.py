"""The launch scripts of examples_deepspeed/restart_bench: settings, presets, launchers, modes and jobs.

Standard library only, so that any Python of 3.10 and later can start it, before there is an environment to train with.
"""
