"""`marsrl view`: runs in the browser or on the terminal. Run directories are only read."""
