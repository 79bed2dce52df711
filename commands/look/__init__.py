"""`marsrl view`: shows runs in the browser or on the terminal. It only reads run directories."""
