"""What backs docs/results: measurements of this project, the logs they are made on, and the judging of our targets."""
