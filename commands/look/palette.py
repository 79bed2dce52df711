"""Colours in charts: each agent and each activity has the same colour on all pages.

A colour is a CSS class, c0 to c7, which the page styles for light and dark mode.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from itertools import cycle

COLORS = tuple(f"c{k}" for k in range(8))
_GREY = COLORS[-1]
_OF_ALL = ("all", "system")

_ACTIVITIES = {
    "rollout": "c0",
    "decode": "c0",
    "step": "c1",
    "credit": "c2",
    "publish": "c3",
    "load weights": "c3",
    "judge": "c4",
    "pack": "c5",
    "evaluate": "c6",
}


def series_colors(labels: Iterable[str], agents: Sequence[str] = ()) -> dict[str, str]:
    """Return the colour of each series of a chart, by its label.

    An agent (solver, main/solver) has the colour of its position in the team. Series of all agents together are grey. Other
    series take the remaining colours in order.
    """
    labels = list(labels)
    agent_colors = {
        label: COLORS[agents.index(name) % 7] for label in labels if (name := label.rpartition("/")[2]) in agents
    }
    known = agent_colors | {label: _GREY for label in labels if label in _OF_ALL}
    free = cycle([color for color in COLORS[:-1] if color not in agent_colors.values()] or COLORS)
    return {label: known.get(label) or next(free) for label in labels}


def activity_color(name: str) -> str:
    """Return the colour of an activity of engines, ranks or judges, for timelines and charts of a step's parts."""
    return _ACTIVITIES.get(name) or COLORS[zlib.crc32(name.encode("utf-8", "replace")) % 8]
