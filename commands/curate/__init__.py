"""Selection of problems for training. The selection is independent of training runs, and resumes by itself."""
