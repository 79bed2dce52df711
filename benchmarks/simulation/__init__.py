"""`benchmarks/pipeline.py`: the project's player on a virtual clock, with engines that only take time and completions that only
have a length; the study that it plays and the tables that it prints."""
