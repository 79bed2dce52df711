"""Agents as text: roles, prompts, parsers, the order of the agents and the inference loop."""
