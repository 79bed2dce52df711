"""Cheap checks before a run starts."""
