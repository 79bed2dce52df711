"""Near-duplicate questions: MinHash finds candidates (rensa), their shingles decide.

A row is compared with the earlier rows that were kept, so the first of similar rows stays: only the order of rows matters.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from marsrl.commands.curate.rows import Decision, Decisions, Row, Stage
from marsrl.rollout.imports import check_installed
from marsrl.trainer.config.curate import NearDuplicatesConfig

_BATCH = 1024  # rows hashed in one call
_SEED = 0
_HASHES = 126  # of a question
_FOUND = 0.95  # least share of the pairs just as similar as the threshold that the index finds
_COMPARED = 64  # candidates whose shingles are compared: questions from one template can have thousands


def near_duplicates(config: NearDuplicatesConfig) -> Stage:
    """See the module. Raises ValueError if rensa is not installed."""
    check_installed("curate.near_duplicates", "rensa", extra="curate", otherwise="set curate.near_duplicates=null")
    return Stage("near_duplicates", config.model_dump(mode="json"), lambda rows: _Questions(config).decisions(rows))


class _Questions:
    """The kept questions, and an index of them."""

    def __init__(self, config: NearDuplicatesConfig) -> None:
        import rensa

        self._config = config
        bands, rows = bands_and_rows(config.threshold)
        self._num_hashes = bands * rows
        self._sketches = rensa.RMinHash.from_token_sets
        self._index = rensa.RMinHashLSH(config.threshold, self._num_hashes, bands)
        self._kept: list[tuple[str, str, str | None]] = []  # normalised question, id, answer
        self._hashes = np.empty((_BATCH, self._num_hashes), np.uint16)  # low halves of the kept rows' hashes, then room

    def decisions(self, rows: Iterator[Row]) -> Decisions:
        while batch := list(itertools.islice(rows, _BATCH)):
            texts = [as_compared(row.problem.question) for row in batch]
            shingles = [shingled(text, self._config.shingle) for text in texts]
            sketches = self._sketches(shingles, self._num_hashes, _SEED)
            for row, text, sketch in zip(batch, texts, sketches, strict=True):
                decision = self._decision(row, text, sketch)
                if decision.is_kept:
                    self._keep(row, text, sketch)
                yield row, decision

    def _keep(self, row: Row, text: str, sketch: Any) -> None:
        place = len(self._kept)
        self._index.insert(place, sketch)
        self._kept.append((text, row.problem.id, row.problem.answer))
        if place == len(self._hashes):
            self._hashes = np.concatenate([self._hashes, np.empty_like(self._hashes)])
        self._hashes[place] = _low_halves(sketch)

    def _decision(self, row: Row, text: str, sketch: Any) -> Decision:
        candidates = self._index.query(sketch)
        if len(candidates) > _COMPARED:
            candidates = self._most_alike(candidates, sketch)
        if not candidates:
            return Decision(True, "new")
        size = self._config.shingle
        own = frozenset(shingled(text, size))
        found = [(jaccard(own, frozenset(shingled(self._kept[i][0], size))), -i) for i in candidates]
        similarity, place = max(found)
        if similarity < self._config.threshold:
            return Decision(True, "new")
        _, uid, answer = self._kept[-place]
        other = "" if answer == row.problem.answer else ", which has another answer"
        return Decision(False, "near duplicate", f"similarity {similarity:.2f} to {uid}{other}")

    def _most_alike(self, candidates: Sequence[int], sketch: Any) -> list[int]:
        """The candidates with the most common hashes, an estimate of similarity; the earliest in a tie."""
        places = np.sort(np.asarray(candidates))
        shared = (self._hashes[places] == _low_halves(sketch)).sum(axis=1)
        return places[np.argsort(-shared, kind="stable")[:_COMPARED]].tolist()


def bands_and_rows(threshold: float) -> tuple[int, int]:
    """The bands of the index, and hashes of a band: the most that find enough pairs, as more compare fewer that are unlike.

    A pair of similarity s is found with probability 1 - (1 - s^rows)^bands (Leskovec et al., Mining of Massive Datasets, 3.4.2).
    """
    enough = (rows for rows in range(1, 13) if 1 - (1 - threshold**rows) ** (_HASHES // rows) >= _FOUND)
    rows = max(enough, default=1)
    return _HASHES // rows, rows


def _low_halves(sketch: Any) -> np.ndarray:
    return np.asarray(sketch.digest(), np.uint32).astype(np.uint16)


def as_compared(question: str) -> str:
    """The normalised question: ignores case, equivalent characters (NFKC), control characters and repeated spaces."""
    text = unicodedata.normalize("NFKC", question).casefold()
    if not text.isprintable():
        text = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(text.split())


def shingled(text: str, size: int) -> list[str]:
    """All substrings of `size` characters, in order; a shorter text itself."""
    return [text[i : i + size] for i in range(max(1, len(text) - size + 1))]


def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    """Jaccard similarity: size of the intersection over the union."""
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared)
