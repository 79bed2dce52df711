"""Built-in teams and users' own from files. One file per team."""
