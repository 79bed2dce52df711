"""The file in which what a run has logged can be found quickly: its tables, and where it lies.

It is made of the run directory alone and is safe to delete: $MARSRL_CACHE (or ~/.cache/marsrl)/view/. Nothing is written into
the run. Texts are not copied: `words` can tell in which samples a word stands, and the samples files hold the texts.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from pathlib import Path

VERSION = 2  # of the tables; a file of another version is made anew
TRUNCATED, WRONG_VERDICT, MISSING_REWARD, FAILED, VERDICT = 1, 2, 4, 8, 16
FLAGS = {
    "truncated": TRUNCATED,
    "wrong verdict": WRONG_VERDICT,
    "missing reward": MISSING_REWARD,
    "error": FAILED,
    "verdict": VERDICT,
}
"""What a sample can be looked for by: it reached the maximum length; it is a verdict that its solution does not bear out; it has
no reward; the engine gave it up; it has given a verdict that could be read."""

_LINES, _GENERATIONS = 24, 8  # bits of a sample's id; the step is above them

TABLES = """
CREATE TABLE files(  -- one samples file; a step that was played again has a new generation
    step INTEGER PRIMARY KEY, mtime_ns INTEGER, size INTEGER, generation INTEGER, num INTEGER, damage TEXT);
CREATE TABLE names(id INTEGER PRIMARY KEY, name BLOB UNIQUE);  -- of agents, rollouts, problems
CREATE TABLE samples(
    id INTEGER PRIMARY KEY, agent INTEGER, problem INTEGER, rollout INTEGER, flags INTEGER, reward REAL, correct REAL,
    advantage REAL, verdict INTEGER, num_tokens INTEGER, age INTEGER, uid BLOB, parent BLOB, answer BLOB);
CREATE INDEX samples_of_rollout ON samples(rollout);
CREATE INDEX samples_of_problem ON samples(problem, id);
CREATE VIRTUAL TABLE words USING fts5(text, content='', columnsize=0, detail=none);
CREATE TABLE zones(  -- how many samples of a step are alike, and between which rewards: what a filter need not look at
    step INTEGER, agent INTEGER, flags INTEGER, bucket INTEGER, num INTEGER, low REAL, high REAL,
    PRIMARY KEY(step, agent, flags, bucket)) WITHOUT ROWID;
CREATE INDEX zones_of_agent ON zones(agent, step);
CREATE TABLE ages(step INTEGER, agent INTEGER, age INTEGER, num INTEGER, PRIMARY KEY(step, agent, age)) WITHOUT ROWID;
CREATE TABLE metrics(name INTEGER, step INTEGER, value REAL, PRIMARY KEY(name, step)) WITHOUT ROWID;
CREATE TABLE spans(lane INTEGER, name INTEGER, start REAL, end REAL, arguments TEXT);
CREATE INDEX spans_by_start ON spans(start, end);
CREATE TABLE read(what TEXT PRIMARY KEY, mark TEXT);  -- how far metrics, trace and warnings have been read
CREATE TABLE warnings(step INTEGER, kind TEXT, text BLOB);
"""


def index_path(run: Path) -> Path:
    """Where the index of a run lies; made of the run's path, so that two runs of one name have two."""
    root = Path(os.environ.get("MARSRL_CACHE") or Path.home() / ".cache" / "marsrl")
    digest = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:16]
    return root / "view" / f"{digest}.sqlite"


def connect(path: Path, *, writes: bool = False) -> sqlite3.Connection:
    """The index; one that writes makes it where it is not there, or is of another version of this program."""
    if writes:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _version(path) != VERSION:
            for end in ("", "-wal", "-shm"):
                Path(f"{path}{end}").unlink(missing_ok=True)
    index = sqlite3.connect(path if writes else f"{path.absolute().as_uri()}?mode=ro", uri=not writes, timeout=10)
    index.text_factory = bytes
    index.execute("PRAGMA mmap_size = 1073741824")
    if writes and not _version(path):
        index.execute("PRAGMA journal_mode = WAL")  # readers go on while it is written
        index.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {VERSION}; COMMIT")
    if writes:
        index.execute("PRAGMA synchronous = OFF")  # after a crash of the machine it is made anew
    return index


def _version(path: Path) -> int:
    """0: it is not there, is empty, or is no index."""
    if not path.exists():
        return 0
    try:
        found = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            return int(found.execute("PRAGMA user_version").fetchone()[0])
        finally:
            found.close()
    except sqlite3.Error:
        return 0


def sample_id(step: int, generation: int, line: int) -> int:
    """Ids grow with step and line; line: from 1, as in the samples file."""
    assert 0 <= line < 1 << _LINES, f"step {step} has more than {1 << _LINES} samples"
    return first_id(step) + (generation % (1 << _GENERATIONS) << _LINES) + line


def first_id(step: int) -> int:
    """Below every id of the step, above those of the step before."""
    return step << _LINES + _GENERATIONS


def place_of(identity: int) -> tuple[int, int]:
    """(step, line) of a sample's id."""
    return identity >> _LINES + _GENERATIONS, identity & (1 << _LINES) - 1


def stored(text: str) -> bytes:
    """Any text that JSON can hold, lone surrogates and all, as it lies in the index."""
    return text.encode("utf-8", "surrogatepass")


def loaded(content: bytes | None) -> str | None:
    return None if content is None else content.decode("utf-8", "surrogatepass")
