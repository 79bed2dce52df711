"""Agents as text: roles, prompts, parsers, and the rules by which a team plays."""
