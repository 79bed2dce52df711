"""Recorder of a run for `marsrl view --demo`: the data that the viewer shows, without weights, host paths or host name.

    python -m marsrl.commands.look.record runs/NAME            # replaces the recording in this checkout
    python -m marsrl.commands.look.record runs/NAME FOLDER     # writes it to a new folder

The recording has the files of KEPT, and the samples and tokens of as many steps as fit into MOST_BYTES: the first, the last, and
others evenly between them.
"""

from __future__ import annotations

import argparse
import re
import shutil
import socket
from pathlib import Path

from marsrl.trainer.runs.directory import RunDirectory, step_files, write_atomically

DEMO = Path(__file__).parent / "demo"
MOST_BYTES = 1_800_000  # maximum size of a recording
KEPT = ("config.yaml", "metrics.jsonl", "warnings.jsonl", "summary.json", "trace.json", "plan.json")
_HOST = re.compile(rf"\b{re.escape(socket.gethostname())}\b")
_PATH = re.compile(r"(?<![\w.:/<])/(?:[^\s/'\"<>:,;=\\]+/)+([^\s/'\"<>:,;=\\]*)")


def record(run: RunDirectory, out: Path) -> int:
    """Write the recording of a run to the new folder `out`; return its size in bytes.

    Raises ValueError if `out` exists, `run` is not a run directory, a sample's text contains this host's name or a path below
    the home folder, or the files of KEPT alone take more than MOST_BYTES.
    """
    if out.exists():
        raise ValueError(f"record: {out} exists; name a new folder")
    if not run.config.is_file():
        raise ValueError(f"record: {run.path} has no config.yaml; name a run's directory")
    texts = [run.path / name for name in KEPT] + sorted(run.evaluations.glob("step_*/evaluation.json"))
    for path in filter(Path.is_file, texts):
        text = without_host(path.read_text("utf-8"))
        write_atomically(out / path.relative_to(run.path), text.encode("utf-8"))
    size = _size(out)
    samples, tokens = step_files(run.samples), step_files(run.tokens)
    for num in range(len(samples), 0, -1):
        steps = _spread(sorted(samples), num)
        files = [folder[step] for folder in (samples, tokens) for step in steps if step in folder]
        if size + sum(path.stat().st_size for path in files) <= MOST_BYTES:
            break
    else:
        raise ValueError(
            f"record: {run.path} takes {size:,} bytes without any sample; expected less than {MOST_BYTES:,}"
        )
    for path in files:
        _refuse_host_in(path)
        target = out / path.relative_to(run.path)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    return _size(out)


def without_host(text: str) -> str:
    """Shorten every absolute path in the text to its last part, and replace this host's name by `host`."""
    return _HOST.sub("host", _PATH.sub(r"\1", text))


def _spread(steps: list[int], num: int) -> list[int]:
    """Return `num` evenly spaced steps, including the last one and, if num > 1, the first."""
    return [steps[-1 - round(i * (len(steps) - 1) / max(1, num - 1))] for i in range(num)]


def _refuse_host_in(path: Path) -> None:
    import pyarrow.parquet as pq

    text = str(pq.read_table(path, partitioning=None).to_pylist())
    if found := _HOST.search(text) or re.search(rf"(?<!\w){re.escape(str(Path.home()))}/", text):
        raise ValueError(
            f"record: {path} has a text with {found[0]}; expected none that names this host; record another run"
        )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Record a run for `marsrl view --demo`.")
    parser.add_argument("run", type=Path, help="a run's directory")
    parser.add_argument("out", type=Path, nargs="?", help="a new folder (default: the recording of this checkout)")
    words = parser.parse_args()
    made = words.out or DEMO.with_name("demo.part")
    print(f"{record(RunDirectory(words.run), made):,} bytes in {words.out or DEMO}")
    if words.out is None:
        shutil.rmtree(DEMO, ignore_errors=True)
        made.rename(DEMO)
