"""The project's player on a virtual clock: engines that only take time, completions that only have a length."""
