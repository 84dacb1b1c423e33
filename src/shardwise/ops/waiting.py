"""Communication in progress, as forms of operations see it."""

from __future__ import annotations

from typing import Protocol


class Pending(Protocol):
    """Communication in progress."""

    def wait(self) -> None: ...


class _Complete:
    def wait(self) -> None:
        """No-op."""


COMPLETE = _Complete()
