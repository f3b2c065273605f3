"""Command-line tools that run without a training job."""
