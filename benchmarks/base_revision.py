"""Comparison of our kernels with those of another git revision, to see whether a change made them faster."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from namespace import ROOT, folder_with_marsrl

TURNS = 3


def compare(revision: str, cases: list[str], device: str, quick: bool) -> None:
    """Print our time at `revision` divided by our time now, for each table; processes of the two revisions alternate."""
    seconds: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--detach", str(tree), revision], check=True)
        try:
            build = [sys.executable, "setup.py", "build_ext", "--inplace"]
            subprocess.run(build, cwd=tree, check=True, stdout=subprocess.DEVNULL)
            for turn in range(TURNS):
                for root in (ROOT, tree):
                    medians = _medians(root, cases, device, quick, Path(folder) / f"{turn}.json")
                    for title, median in medians.items():
                        seconds.setdefault((title, root.name), []).append(median)
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], check=True)
    print(f"\nours at {revision} / ours here, medians of {TURNS} turns")
    for title, name in seconds:
        if name == ROOT.name and (title, tree.name) in seconds:
            here_s, there_s = (statistics.median(seconds[title, tree_name]) for tree_name in (name, tree.name))
            print(f"  {there_s / here_s:6.3f}  {title}")


def _medians(root: Path, cases: list[str], device: str, quick: bool, file: Path) -> dict[str, float]:
    script = root / "benchmarks" / "run.py"
    if not script.exists():
        raise SystemExit(f"--base: {root} has no benchmarks/run.py; choose a revision that has it")
    command = [sys.executable, str(script), *cases, "--device", device, "--only", "ours", "--no-memory", "--all"]
    command += ["--json", str(file), *(["--quick"] if quick else [])]
    # PYTHONPATH takes precedence over the installed marsrl.
    environment = {**os.environ, "PYTHONPATH": str(folder_with_marsrl(file.parent / f"path of {root.name}", root))}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    tables = json.loads(file.read_text())["tables"]
    return {
        f"{table['case']} {json.dumps(table['shape'], sort_keys=True)}": row["median_s"]
        for table in tables
        for row in table["rows"]
        if row["name"] == "ours"
    }
