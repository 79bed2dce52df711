"""Who says what to whom: roles, prompts, parsers, the order of the agents and the inference loop. Text only."""
