"""Problems chosen for training. A room of its own: it needs no learner and no run, and all that makes it go on is its own."""
