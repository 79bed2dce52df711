"""Tries the judge of a file's answers: references, other notations of them, and answers that differ from them."""
