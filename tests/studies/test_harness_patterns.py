"""Ways in which harnesses call their agent, played without a model."""

from __future__ import annotations

import logging

import pytest
from harness_patterns import line, measure, num_nodes


def test_num_nodes_counts_shared_prefixes_once() -> None:
    assert num_nodes([[1, 2, 3], [1, 2, 4, 5], [1, 2], [2]]) == 6


@pytest.mark.parametrize("pattern", ["append_only", "branches"])
def test_a_pattern_becomes_a_row_of_the_table(pattern: str) -> None:
    logging.disable(logging.ERROR)
    row = measure(pattern)
    logging.disable(logging.NOTSET)
    merges = pattern == "append_only"
    assert (row["calls"], row["samples"]) == ((16, 2) if merges else (28, 8))
    assert row["trained"] == row["drawn"] and (row["fed"] == row["once"]) == merges
    assert line(row).endswith("| +1.00; -1.00 |" if merges else "| 4 x +1.00; 4 x -1.00 |")
