"""Time and memory of `marsrl curate` on short prompts, and its recall of planted near-duplicates.

    python benchmarks/curate.py [--rows 1000000] [--json FILE]

Prompts are 10 to 40 words of a made-up vocabulary with Zipf frequencies. A fifth are edited copies of an earlier prompt. An edit
changes case, white space and punctuation, replaces a word or two, or leaves out a word. A copy should be dropped if its exact
Jaccard similarity to the original, computed from the same shingles as in the near-duplicates stage, reaches the threshold.

    recall      dropped copies that should be dropped / copies that should be dropped
    precision   dropped copies that should be dropped / dropped prompts
    seconds     time of the whole command in a separate process, from reading jsonl to writing curated.jsonl and the report
    memory      peak memory of that process

The target is a million prompts within 10 minutes and 4 GB on 2 cores. `ratio:` is 10 minutes, scaled to this number of rows,
divided by the seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marsrl.commands.curate.near_duplicates import as_compared, jaccard, shingled
from marsrl.trainer.config.curate import NearDuplicatesConfig

SECONDS, BYTES, ROWS = 600.0, 4e9, 1_000_000
EDITED = 0.2  # share of the prompts that are edited copies
EDITS = ("surface", "a word replaced", "a word left out", "two words replaced")
_CONFIG = NearDuplicatesConfig()


def write_prompts(path: Path, num_rows: int) -> dict[int, tuple[str, float]]:
    """Write the prompts; return {line number from 1: (kind of edit, similarity to the original)} of the edited prompts."""
    drawn = random.Random(0)
    vocabulary = ["".join(drawn.choices(string.ascii_lowercase, k=drawn.randint(2, 10))) for _ in range(20_000)]
    weights = list(itertools.accumulate(1 / rank for rank in range(1, len(vocabulary) + 1)))
    draw_words = lambda n: drawn.choices(vocabulary, cum_weights=weights, k=n)  # noqa: E731
    originals: list[str] = []
    planted: dict[int, tuple[str, float]] = {}
    with path.open("w", encoding="utf-8") as file:
        for line in range(1, num_rows + 1):
            if originals and drawn.random() < EDITED:
                before, kind = drawn.choice(originals), drawn.choice(EDITS)
                prompt = _edited(before, kind, drawn, draw_words(2))
                planted[line] = (kind, _similarity(before, prompt))
            else:
                prompt = " ".join(draw_words(drawn.randint(10, 40))).capitalize() + "?"
                originals.append(prompt)
            file.write(json.dumps({"question": prompt, "answer": str(line)}) + "\n")
    return planted


def _edited(prompt: str, kind: str, drawn: random.Random, new: Sequence[str]) -> str:
    if kind == "surface":
        return "  ".join(prompt.upper().split(" ")).rstrip("?") + drawn.choice(["", ".", " ?"])
    prompt_words = prompt.split(" ")
    for new_word in new[: {"a word replaced": 1, "a word left out": 0, "two words replaced": 2}[kind]]:
        prompt_words[drawn.randrange(len(prompt_words))] = new_word
    if kind == "a word left out":
        del prompt_words[drawn.randrange(len(prompt_words))]
    return " ".join(prompt_words)


def _similarity(one: str, other: str) -> float:
    return jaccard(*(frozenset(shingled(as_compared(text), _CONFIG.shingle)) for text in (one, other)))


def measure(num_rows: int, folder: Path) -> dict[str, Any]:
    """Measure the command on this many rows.

    dropped_unplanted: original prompts mistaken for duplicates. edits: planted near-duplicates by kind, with their mean
    similarity, how many are above and below the threshold, and how many of each were dropped.
    """
    planted = write_prompts(folder / "prompts.jsonl", num_rows)
    command = [sys.executable, "-m", "marsrl.commands.cli", "curate", "prompts.jsonl", "--out", "out"]
    load, before, start = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)
    seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    with (folder / "out/stages/near_duplicates/dropped.jsonl").open(encoding="utf-8") as lines:
        dropped = {json.loads(line)["row"] + 1 for line in lines}
    edits: list[dict[str, Any]] = []
    for kind in EDITS:
        similarity_of = {
            line: similarity for line, (planted_kind, similarity) in planted.items() if planted_kind == kind
        }
        above = {line for line, similarity in similarity_of.items() if similarity >= _CONFIG.threshold}
        below = similarity_of.keys() - above
        edit = {"kind": kind, "similarity": sum(similarity_of.values()) / max(1, len(similarity_of))}
        edit |= {"above": len(above), "above_dropped": len(above & dropped)}
        edits.append(edit | {"below": len(below), "below_dropped": len(below & dropped)})
    num_found = sum(edit["above_dropped"] for edit in edits)
    return {
        "rows": num_rows,
        "recall": num_found / max(1, sum(edit["above"] for edit in edits)),
        "precision": num_found / max(1, len(dropped)),
        "dropped_unplanted": len(dropped - planted.keys()),
        "seconds": seconds,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_bytes": after.ru_maxrss * 1024,
        "load": load,
        "edits": edits,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=ROWS, help="number of prompts (default: %(default)s)")
    parser.add_argument("--json", help="also write the numbers to this file")
    options = parser.parse_args()
    if options.rows < 100:
        parser.error(f"--rows is {options.rows}, expected at least 100")
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options.rows, Path(folder))
    for edit in result["edits"]:
        print(
            "{kind}: similarity {similarity:.2f} on average; dropped {above_dropped:,} of {above:,} at or above {threshold:g}, "
            "{below_dropped:,} of {below:,} below".format(**edit, threshold=_CONFIG.threshold)
        )
    print(
        "recall {recall:.4f}, precision {precision:.4f}, {dropped_unplanted:,} original prompts dropped\n"
        "{rows:,} rows: {seconds:.0f} s ({cpu_seconds:.0f} s of CPU), {gb:.2f} GB at most; load of the machine before: "
        "{load:.1f}".format(**result, gb=result["peak_bytes"] / 1e9)
    )
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if result["rows"] >= ROWS:
        is_held = result["seconds"] <= SECONDS and result["peak_bytes"] <= BYTES
        print(f"{SECONDS / 60:.0f} minutes and {BYTES / 1e9:.0f} GB: {'met' if is_held else 'MISSED'}")
    print(f"ratio: {SECONDS * result['rows'] / ROWS / result['seconds']:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
