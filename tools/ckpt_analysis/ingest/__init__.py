"""From the files of a trace to the valid records of one run on one time line (`load`)."""
