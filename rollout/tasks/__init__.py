"""Where problems come from and what judges an answer."""
