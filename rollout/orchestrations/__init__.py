"""The teams that ship, and those of users' own files. One file a team."""
