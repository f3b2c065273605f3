"""What reading a state into memory that nobody has touched costs, by its pages and by the way there."""
