"""The `marsrl` commands, with the viewer, the planner and the curation of problems."""
