"""Metrics and messages on the pages are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from documents import ROOT, is_on_the_page, rows

CODE = [path for room in ("trainer", "rollout") for path in sorted((ROOT / room).rglob("*.py"))]
FAMILIES = "actor|advantage|cost|drmas|eval|judge|latency_s|metrics|mpt|perf|policy_cost|response_length|reward|rollout"
FAMILIES += "|router|sft|sync|teacher|team|timing_s|tools|train_rollout|verdicts"
NONE = {
    "reward/pool",
    "sync/<name>",
    "cost/<name>",
    "train_rollout/prob_diff_",
    "rollout/staleness_",
    "sft/held_out",
}  # lanes of the trace, beginnings of names


def test_every_metric_that_the_code_names_is_on_the_page() -> None:
    found = {
        re.sub(r"\{[^}]*\}", "<name>", name)
        for path in CODE
        for name in re.findall(rf'"((?:{FAMILIES})/[\w/{{}}.]+)"', path.read_text("utf-8"))
    }
    assert len(found) > 60
    missing = {name for name in found - NONE if not is_on_the_page(name)}
    assert not missing, "give each a row of docs/metrics.md"


def test_every_message_of_the_page_is_one_of_the_code() -> None:
    """Checks rows whose first cell is one message."""
    code = "".join(re.sub(r'"\s*\n\s*f?"', "", Path(path).read_text("utf-8")) for path in CODE)
    messages = [cells[0][1:-1] for cells in rows("troubleshooting.md") if re.fullmatch(r"`[^`]+`", cells[0])]
    assert len(messages) > 15
    assert not [message for message in messages if message not in code]
