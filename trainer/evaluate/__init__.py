"""How good a team is on held-out problems."""
