"""Test of a task's judge on each reference answer: the reference itself, other notations of it, and wrong answers."""
