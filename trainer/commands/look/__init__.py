"""`marsrl view`: a run in the browser or on the terminal. Reads run directories and writes nothing into them."""
