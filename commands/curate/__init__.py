"""`marsrl curate`: select problems for training, before any run. Running it again resumes where it stopped."""
