"""A store whose calls fail on request, as when the database restarts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpufleet.errors import DatabaseUnreachable
from tpufleet.stores.base import Store


class FaultyStore:
    """Passes every call to a real store, except those that `fails` chooses.

    `fails` gets the name and the number of the call; it returns "before" (the call has no effect),
    "after" (the call has its effect, and the answer is lost) or None.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.calls: list[str] = []
        self.fails: Callable[[str, int], str | None] = lambda name, number: None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            when = self.fails(name, len(self.calls))
            self.calls.append(name)
            if when == "before":
                raise DatabaseUnreachable(f"injected: {name} had no effect")
            result = method(*args, **kwargs)
            if when == "after":
                raise DatabaseUnreachable(f"injected: the answer of {name} was lost")
            return result

        return call
