"""Judges answers in processes of their own."""
