"""Selection of problems for training. It is independent of training runs and resumes by itself."""
