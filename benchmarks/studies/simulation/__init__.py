"""`pipeline.py`: the project's player on a virtual clock, with engines that only take time and completions that are
only lengths; its study and its tables."""
