"""`marsrl plan`: estimates by formula, without a GPU, whether a run fits in memory and how long a step takes."""
