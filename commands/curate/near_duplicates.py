"""Near-duplicate questions: MinHash (rensa) finds candidates, and the Jaccard similarity of their shingles (substrings) decides.

Each row is compared with the rows kept before it, so the first of several similar rows is kept.
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
_HASHES = 126  # MinHash values per question
_FOUND = 0.95  # minimum probability that the index finds a pair with a similarity equal to the threshold
_COMPARED = 64  # maximum number of candidates compared by shingles; a question from a template can have thousands


def near_duplicates(config: NearDuplicatesConfig) -> Stage:
    """Return the stage that drops near-duplicates. Raises ValueError if rensa is not installed."""
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
        # Buffer with the low 16 bits of the kept rows' hashes; its last rows are unused.
        self._hashes = np.empty((_BATCH, self._num_hashes), np.uint16)

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
        index = len(self._kept)
        self._index.insert(index, sketch)
        self._kept.append((text, row.problem.id, row.problem.answer))
        if index == len(self._hashes):
            self._hashes = np.concatenate([self._hashes, np.empty_like(self._hashes)])
        self._hashes[index] = _low_halves(sketch)

    def _decision(self, row: Row, text: str, sketch: Any) -> Decision:
        candidates = self._index.query(sketch)
        if len(candidates) > _COMPARED:
            candidates = self._most_alike(candidates, sketch)
        if not candidates:
            return Decision(True, "new")
        size = self._config.shingle
        shingles = frozenset(shingled(text, size))
        similarity, negative_index = max(
            (jaccard(shingles, frozenset(shingled(self._kept[i][0], size))), -i) for i in candidates
        )
        if similarity < self._config.threshold:
            return Decision(True, "new")
        _, uid, answer = self._kept[-negative_index]
        other = "" if answer == row.problem.answer else ", whose answer differs"
        return Decision(False, "near duplicate", f"similarity {similarity:.2f} to {uid}{other}")

    def _most_alike(self, candidates: Sequence[int], sketch: Any) -> list[int]:
        """Return the candidates that share the most hashes with the sketch (estimated similarity); earlier ones win ties."""
        indices = np.sort(np.asarray(candidates))
        shared = (self._hashes[indices] == _low_halves(sketch)).sum(axis=1)
        return indices[np.argsort(-shared, kind="stable")[:_COMPARED]].tolist()


def bands_and_rows(threshold: float) -> tuple[int, int]:
    """Return (number of bands, hashes per band).

    More hashes per band give fewer false candidates. The returned number is the largest with which enough pairs are still found.

    A pair of similarity s is found with probability 1 - (1 - s^rows)^bands (Leskovec et al., Mining of Massive Datasets, 3.4.2).
    """
    enough = (rows for rows in range(1, 13) if 1 - (1 - threshold**rows) ** (_HASHES // rows) >= _FOUND)
    rows = max(enough, default=1)
    return _HASHES // rows, rows


def _low_halves(sketch: Any) -> np.ndarray:
    return np.asarray(sketch.digest(), np.uint32).astype(np.uint16)


def as_compared(question: str) -> str:
    """Normalise a question: fold case and equivalent characters (NFKC), drop control characters and repeated spaces."""
    text = unicodedata.normalize("NFKC", question).casefold()
    if not text.isprintable():
        text = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(text.split())


def shingled(text: str, size: int) -> list[str]:
    """Return all substrings of `size` characters, in order; the whole text if it is shorter."""
    return [text[i : i + size] for i in range(max(1, len(text) - size + 1))]


def jaccard(first: frozenset[str], second: frozenset[str]) -> float:
    """Return the Jaccard similarity: size of the intersection over size of the union."""
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared)
