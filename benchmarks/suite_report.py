"""What gpu_suite.py has found so far, for people: report.md, from the files that its parts leave in a folder."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from one_by_one import Journal

SHOWN = 40  # failures of a journal; all of them are in its file
OF_A_STEP = (
    "reward/all/mean", "rollout/tokens", "rollout/tokens_per_s", "actor/loss", "actor/grad_norm", "actor/tokens",
    "train_rollout/prob_diff_mean", "sync/probe_diff_max", "timing_s/rollout", "timing_s/step", "timing_s/publish",
)  # fmt: skip


def report(folder: Path, suite: dict[str, Any]) -> str:
    """suite: as gpu_suite.py writes it to suite.json."""
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
    for file in sorted(folder.glob("*.jsonl")):
        lines += ["", *_journal(file)]
    found = {file.stem: _json(file) for file in sorted(folder.glob("*.json"))}
    order = [str(part["name"]).replace(" ", "_") for part in suite["parts"]]
    for name in sorted(found, key=lambda name: order.index(name) if name in order else len(order)):
        content = found[name]
        if isinstance(content, dict) and "tables" in content:
            for table in content["tables"]:
                lines += ["", *_table(table, where.get("memory_bytes"))]
    if isinstance(content := found.get("dz_rows"), dict):
        lines += ["", *_dz_rows(content)]
    if isinstance(content := found.get("profile"), list):
        for entry in content:
            lines += ["", *_profile(entry)]
    if isinstance(content := found.get("train_step"), dict):
        lines += ["", *_train_step(content)]
    if isinstance(content := found.get("first_steps"), dict):
        lines += ["", *_steps(content)]
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


def _table(table: dict[str, Any], memory_bytes: float | None) -> list[str]:
    sizes = ", ".join(f"{name} {value}" for name, value in table["shape"].items() if value and name != "device")
    lines = [f"## {table['case']}: {sizes}", ""]
    measured = (
        f"GEMM {table['gemm_flops'] / 1e12:.1f} TFLOP/s, copy {table['copy_bytes'] / 1e9:.0f} GB/s, measured here"
    )
    if memory_bytes:
        measured += f" ({table['copy_bytes'] / memory_bytes:.0%} of the memory's)"
    lines += [f"{table['flops'] / 1e9:,.1f} GFLOP, {table['bytes'] / 1e6:,.1f} MB at least; {measured}."]
    if table["failure"]:
        return [*lines, "", f"Wrong, so nothing was measured: {table['failure']}"]
    lines += ["", "| | ms | spread | x ours | roofline | TFLOP/s | GB/s | extra MiB | largest error | |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for row in table["rows"]:
        extra = "-" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 2**20:,.0f}"
        error = f"{max(row['errors'].values()):.1e}" if row["errors"] else "-"
        seconds = row["median_s"]
        lines.append(
            f"| {row['name']} | {seconds * 1e3:.3f} | {row['spread']:.0%} | {row['over_ours']:.2f} | {row['floor_share']:.0%} "
            f"| {table['flops'] / seconds / 1e12:.1f} | {table['bytes'] / seconds / 1e9:,.0f} | {extra} "
            f"| {error}{'' if row['is_right'] else ' !'} | {row['does']} |"
        )
    return lines + [f"\n{name}: skipped, {reason}" for name, reason in table["skipped"].items()]


def _dz_rows(record: dict[str, Any]) -> list[str]:
    lines = [f"## Rows of logits x chunks whose dz wait: {record['shape']}", "", "| | ms | spread | peak MiB |"]
    lines.append("|---|---|---|---|")
    for row in record["dz_rows"]:
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.0f}"
        lines.append(f"| {row['rows']} | {row['median_s'] * 1e3:.3f} | {row['spread']:.0%} | {peak} |")
    return lines


def _profile(entry: dict[str, Any]) -> list[str]:
    lines = [f"## Top kernels of linear_policy_loss: {entry['shape']}", "", "| ms | share | launches | kernel |"]
    lines.append("|---|---|---|---|")
    return lines + [
        f"| {each['milliseconds']:.3f} | {each['share']:.1%} | {each['launches']:.1f} | `{each['name'][:90]}` |"
        for each in entry["kernels"]
    ]


def _train_step(record: dict[str, Any]) -> list[str]:
    lines = [f"## A training step of {record['model']}", "", "| | ranks | tokens/s | s | MFU | extra MiB |"]
    lines.append("|---|---|---|---|---|---|")
    for name, row in record["results"]["DMMPT off"]["rows"].items():
        if "problem" in row:
            lines.append(f"| {name} | {row['problem']} | | | | |")
            continue
        median = sorted(row["seconds"])[len(row["seconds"]) // 2]
        lines.append(
            f"| {name} | {row['ranks']} | {row['tokens'] / median:,.0f} | {median:.3f} | {row['mfu']:.1%} "
            f"| {row['extra_bytes'] / 2**20:,.0f} |"
        )
    return lines


def _steps(record: dict[str, Any]) -> list[str]:
    rows = record["steps"]
    lines = [f"## The first steps of configs/single_gpu.yaml, decoded by the engine {record['engine']}", ""]
    lines += ["| |" + "".join(f" {row['step']} |" for row in rows), "|---|" + "---|" * len(rows)]
    for name in OF_A_STEP:
        lines.append(f"| {name} |" + "".join(f" {row[name]:.4g} |" if name in row else " - |" for row in rows))
    return lines
