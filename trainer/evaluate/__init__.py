"""Evaluation of a team on held-out problems."""
