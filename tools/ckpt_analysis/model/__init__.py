"""What a run is: its frames of operations, spans and iterations, its cycles, ranks and model."""
