"""`marsrl view`: a run in the browser or on the terminal. Reads run directories without writing into them."""
