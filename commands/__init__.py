"""What a person calls: the commands of `marsrl`, with the viewer, the planner and the curation of problems."""
