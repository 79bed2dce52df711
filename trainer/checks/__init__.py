"""Cheap checks before a run starts, and checks of a host for `marsrl doctor`."""
