"""Frames of a run's operations, spans and iterations, and facts about its cycles, ranks and model."""
