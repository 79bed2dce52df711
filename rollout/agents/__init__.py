"""Agents' roles, prompts and parsers, and the rules by which a team plays."""
