"""The warm start: supervised training of policies that start from random weights."""
