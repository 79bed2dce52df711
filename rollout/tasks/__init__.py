"""Tasks: problems, and judges of answers."""
