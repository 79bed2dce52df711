"""Problems, and the judgement of answers."""
