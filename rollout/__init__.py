"""Plays problems with a team of agents: prompts, engines, rewards, choice of agents' inputs, and the player that runs stages."""
