"""What --otlp costs a training step."""
