"""Simulation behind pipeline.py: the project's player on a virtual clock, a study of it, and the study's tables.

Simulated engines only let time pass, and a completion is only a length.
"""
