"""Judges of answers, in separate processes."""
