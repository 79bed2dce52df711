"""Simulation behind pipeline.py: the project's player on a virtual clock, its study and its tables.

Engines only take time, and completions are only lengths.
"""
