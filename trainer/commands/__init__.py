"""The `marsrl` command: its command line, the viewer, curation of problems."""
