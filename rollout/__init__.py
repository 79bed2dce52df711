"""Plays problems with a team of agents: prompts, engines, rewards, picks, and the scheduler that runs them in stages."""
