"""Whether lossless compression would shorten the saves of a checkpoint: ratios, speeds, and time over slow storage."""
