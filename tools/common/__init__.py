"""What several tools share: the machine, the page cache, command lines, tables and samples."""
