"""What can be wrong with a run and is cheap to see before anything starts; `marsrl doctor` says it of a host."""
