"""The warm start: supervised training of policies with random weights."""
