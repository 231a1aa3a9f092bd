"""What measures, and how it is shown."""
