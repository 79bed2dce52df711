"""A listener hears many short calls as few spans."""

from __future__ import annotations

from marsrl.rollout.pool.collect_spans import CollectSpans


def heard_of(*calls: tuple[int, float, float]) -> list[tuple[int, float, float]]:
    told: list[tuple[int, float, float]] = []
    spans = CollectSpans(lambda *span: told.append(span))
    for call in calls:
        spans.note(*call)
    spans.end()
    spans.end()
    return told


def test_calls_that_follow_each_other_are_one_span_a_replica_and_a_pause_or_a_second_ends_it() -> None:
    assert heard_of((0, 1.0, 1.1), (1, 1.0, 1.2), (0, 1.12, 1.3)) == [(0, 1.0, 1.3), (1, 1.0, 1.2)]
    assert heard_of((0, 1.0, 1.1), (0, 1.2, 1.3)) == [(0, 1.0, 1.1), (0, 1.2, 1.3)]
    assert heard_of((0, 1.0, 1.6), (0, 1.6, 1.9), (0, 1.9, 2.2)) == [(0, 1.0, 1.9), (0, 1.9, 2.2)]
    assert heard_of((0, 1.0, 1.0), (0, 0.999, 0.999)) == [(0, 1.0, 1.0)]  # the wall clock was set back
