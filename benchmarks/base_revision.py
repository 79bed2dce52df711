"""Comparison with another git revision: did a change make our kernels faster?"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from namespace import ROOT, folder_with_marsrl

TURNS = 3


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A temporary worktree with this git revision and its native libraries."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--detach", str(tree), revision], check=True)
        try:
            command = [sys.executable, "setup.py", "build_ext", "--inplace"]
            subprocess.run(command, cwd=tree, check=True, stdout=subprocess.DEVNULL)
            yield tree
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], check=True)


def compare(revision: str, cases: list[str], device: str, quick: bool) -> None:
    """Prints the ratio of our times here and at `revision` for each table; the two revisions' processes alternate."""
    with checked_out(revision) as tree:
        seconds: dict[tuple[str, str], list[float]] = {}
        for turn in range(TURNS):
            for root in (ROOT, tree):
                file = tree.parent / f"{turn}.json"
                for title, median in _medians(root, cases, device, quick, file).items():
                    seconds.setdefault((title, root.name), []).append(median)
    print(f"\nours at {revision} / ours here, medians of {TURNS} turns")
    for title, name in seconds:
        if name == tree.name or (title, tree.name) not in seconds:
            continue
        here, there = (statistics.median(seconds[title, each]) for each in (name, tree.name))
        print(f"  {there / here:6.3f}  {title}")


def _medians(root: Path, cases: list[str], device: str, quick: bool, file: Path) -> dict[str, float]:
    script = root / "benchmarks" / "run.py"
    if not script.exists():
        raise SystemExit(f"--base: {root} has no benchmarks/run.py; choose a revision that has it")
    command = [sys.executable, str(script), *cases, "--device", device, "--only", "ours", "--no-memory"]
    command += ["--json", str(file), *(["--quick"] if quick else [])]
    command += ["--all"] if '"--all"' in script.read_text() else []  # an older revision measures every shape anyway
    # takes precedence over the installed marsrl
    environment = {**os.environ, "PYTHONPATH": str(folder_with_marsrl(file.parent / f"path of {root.name}", root))}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    tables = json.loads(file.read_text())["tables"]
    return {
        f"{table['case']} {json.dumps(table['shape'], sort_keys=True)}": row["median_s"]
        for table in tables
        for row in table["rows"]
        if row["name"] == "ours"
    }
