"""Typical ways in which agent programs (harnesses) call their model, played without a model."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from harness_patterns import line, measure, num_nodes


def test_num_nodes_counts_shared_prefixes_once() -> None:
    assert num_nodes([[1, 2, 3], [1, 2, 4, 5], [1, 2], [2]]) == 6


@pytest.fixture
def quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("pattern", "calls", "samples", "credit", "why"),
    [
        ("append_only", 16, 2, "+1.00; -1.00", ""),
        ("call_ids_made_anew", 16, 2, "+1.00; -1.00", ""),
        ("branches", 28, 8, "4 x +1.00; 4 x -1.00", "another call continues the same answer"),
        ("sub_agents", 40, 10, "5 x +1.00; 5 x -1.00", ""),
        ("summary", 20, 6, "3 x +1.00; 3 x -1.00", ""),
        (
            "old_outputs_dropped",
            16,
            12,
            "6 x +1.00; 6 x -1.00",
            "a user's message changes at character 1: 'output', '(dropped)'",
        ),
        ("clock_as_the_last_message", 16, 16, "8 x +1.00; 8 x -1.00", "a user's message is left out: 'It is 10:00.'"),
    ],
)
def test_a_pattern_becomes_a_row_of_the_table(
    quiet: None, pattern: str, calls: int, samples: int, credit: str, why: str
) -> None:
    row = measure(pattern)
    assert (row["calls"], row["samples"], row["trained"]) == (calls, samples, row["drawn"])
    assert line(row).endswith(f"| {credit} | {why} |")
    played = [sample for group in row["played"].credited.groups for sample in group.samples]
    assert row["fed"] - row["once"] == sum(sample.behind.num_tokens for sample in played if sample.behind is not None)
    num_called = sum(sample.caller is not None for sample in played)
    assert num_called == (6 if pattern == "sub_agents" else 0)  # no call follows the last sub-agent
