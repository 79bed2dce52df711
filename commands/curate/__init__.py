"""Selection of problems for training. Independent of learner and runs, with its own way to resume."""
