"""Built-in teams, one file per team, and the loader of teams from users' files."""
