"""What both sides agree on, and the readers of both files."""
