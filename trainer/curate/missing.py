"""How many rows a stage could not judge, and when that is too many."""

from __future__ import annotations

_ENOUGH = 50  # rows after which a share says something


class CurationStopped(RuntimeError):
    """A stage cannot go on; what it has decided stays."""


class MissingShare:
    """Counts rows without a verdict of their own. key: the setting that bounds their share."""

    def __init__(self, key: str, most: float) -> None:
        self._key, self._most = key, most
        self._num_missing = self._num_rows = 0

    def count(self, is_missing: bool) -> None:
        self._num_rows += 1
        self._num_missing += is_missing

    def check_early(self, last: str) -> None:
        """Raise CurationStopped with too many, where there are enough rows to say so. last: of them, for the message."""
        if self._num_rows >= _ENOUGH:
            self.check(last)

    def check(self, last: str) -> None:
        """Raise CurationStopped with too many, few as the rows may be."""
        if self._num_missing > self._most * self._num_rows:
            raise CurationStopped(
                f"{self._num_missing} of {self._num_rows} questions could not be judged, which is more than "
                f"{self._key} = {self._most:g}; last: {last}. What was answered is kept: see to the model or its prompt, or "
                "raise the share, and run the command again"
            )
