"""Plays problems with a team of agents: prompts, engines, rewards, picks, and the player that runs them in stages."""
