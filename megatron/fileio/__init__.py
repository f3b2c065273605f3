"""Files and host memory beneath the checkpoint engines: direct, timed and measured I/O, zip archives."""
