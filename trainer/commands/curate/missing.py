"""Stops a stage that could not judge too many of its rows."""

from __future__ import annotations

_ENOUGH = 50  # rows from which a share is meaningful


class CurationStopped(RuntimeError):
    """A stage cannot continue; its decisions are kept."""


class MissingShare:
    """Counts rows without a verdict. key: the setting that bounds their share."""

    def __init__(self, key: str, most: float) -> None:
        self._key, self._most = key, most
        self._num_missing = self._num_rows = 0

    def count(self, missing: str | None) -> None:
        """Count a row. missing: its id and why it has no verdict; raises CurationStopped for too many, once there are enough
        rows."""
        self._num_rows += 1
        if missing is not None:
            self._num_missing += 1
            if self._num_rows >= _ENOUGH:
                self.check(missing)

    def check(self, last: str = "the stage is at its end") -> None:
        """Raise CurationStopped for too many, however few rows there are."""
        if self._num_missing > self._most * self._num_rows:
            raise CurationStopped(
                f"{self._num_missing} of {self._num_rows} questions could not be judged, which is more than "
                f"{self._key} = {self._most:g}; last: {last}. What was answered is kept: see to the model or its prompt, or "
                "raise the share, and run the command again"
            )
