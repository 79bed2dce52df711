"""What gpu_suite.py has found so far, for people: report.md, from the files that its parts leave in a folder."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from one_by_one import Journal

SHOWN = 40  # failures of a journal; all of them are in its file
LINES = 150  # of what a part printed, its end; all of it is in its log


def file_name(part: str) -> str:
    """What the files of a part are called, without their suffix."""
    return part.replace(" ", "_").replace(",", "").replace("=", "")


def report(folder: Path, suite: dict[str, Any]) -> str:
    """suite: as gpu_suite.py writes it to suite.json. Surroundings, how each part ended, failures by name, what each printed."""
    where = _json(folder / "surroundings.json") or {}
    device = where.get("device", suite["device"])
    lines = [f"# marsrl on {device}, commit {suite['commit'] or where.get('commit')}", ""]
    lines += [f"- {when}: {suite[when]}" for when in ("before", "after") if suite[when]]
    lines += [f"- {', '.join(f'{name} {version}' for name, version in where.get('versions', {}).items())}"]
    if where.get("memory_bytes"):
        lines.append(f"- memory: {where['memory_bytes'] / 1e9:,.0f} GB/s by clock and width")
    lines += ["", "| part | status | s | kernels compiled | |", "|---|---|---|---|---|"]
    for each in suite["parts"]:
        compiled = "-" if each["compiled"] is None else each["compiled"]
        lines.append(f"| {each['name']} | {each['status']} | {each['seconds']:.0f} | {compiled} | {each['reason']} |")
    for each in suite["parts"]:
        journal, log = (folder / f"{file_name(each['name'])}.{kind}" for kind in ("jsonl", "log"))
        if journal.exists():
            lines += ["", *_journal(journal)]
        elif log.exists():
            printed = log.read_text(errors="replace").splitlines()
            left_out = [f"... {len(printed) - LINES} lines before, in {log.name}"] if len(printed) > LINES else []
            lines += ["", f"## {each['name']}", "", "```", *left_out, *printed[-LINES:], "```"]
    return "\n".join(lines) + "\n"


def _json(file: Path) -> Any:
    """None where a part was ended while it wrote it, or never did."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def _journal(file: Path) -> list[str]:
    checks = Journal(file).checks()
    counts = Counter(check.status for check in checks)
    wrong = [check for check in checks if check.status not in ("passed", "skipped")]
    lines = [f"## {file.stem}: {', '.join(f'{count} {status}' for status, count in counts.items())}", ""]
    for check in wrong[:SHOWN]:
        lines.append(f"- {check.status}: `{check.name}`: {check.first}" + (f" ... {check.last}" if check.last else ""))
    if len(wrong) > SHOWN:
        lines.append(f"- and {len(wrong) - SHOWN} more")
    reasons = Counter(check.first for check in checks if check.status == "skipped")
    return lines + [f"- {count} skipped: {reason}" for reason, count in reasons.most_common()]
