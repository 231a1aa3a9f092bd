"""Names and records that export and runtime share, and the readers of both files."""
