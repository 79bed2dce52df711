"""Cheap checks of a run before anything starts; `marsrl doctor` runs those of a host."""
