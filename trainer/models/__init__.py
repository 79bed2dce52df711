"""Model directories with random weights."""
