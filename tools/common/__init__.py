"""What several tools share: the machine, the page cache, sizes and samples."""
