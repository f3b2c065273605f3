"""What a start decides from flags and manifests, before any state is read; no torch."""
