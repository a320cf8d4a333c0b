"""Listings of several zones at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Generic, TypeVar

from tpufleet.errors import ProviderError, ProviderUnavailable

View = TypeVar("View")
# A listing waits for a zone this many times as long as that zone usually takes, within bounds.
MIN_WAIT, MAX_WAIT, WAIT_FACTOR = 1.0, 20.0, 4.0


class ZoneListings(Generic[View]):
    """Observes all zones in parallel. A zone that does not respond is left out, and not asked again
    until it has: it blocks one thread and delays no other zone."""

    def __init__(self, zones: Sequence[str], min_wait: float) -> None:
        self._pool = ThreadPoolExecutor(max(len(zones), 1), thread_name_prefix="zones")
        self._zones = tuple(zones)
        self._min_wait = min_wait
        self._running: dict[str, Future[View | ProviderError]] = {}
        self._usual: dict[str, float] = {}

    def all(self, observe: Callable[[str], View]) -> tuple[dict[str, View], dict[str, str]]:
        """The views, and the errors of the other zones. Raises if no zone responds."""
        answers = self._ask(observe)
        errors = {zone: each for zone, each in answers.items() if isinstance(each, ProviderError)}
        if len(errors) == len(answers):
            raise next(iter(errors.values()), ProviderUnavailable("no zone responded"))
        views = {z: each for z, each in answers.items() if not isinstance(each, ProviderError)}
        return views, {zone: str(error) for zone, error in errors.items()}

    def _ask(self, observe: Callable[[str], View]) -> dict[str, View | ProviderError]:
        started = time.monotonic()
        answers: dict[str, View | ProviderError] = {}
        futures: dict[str, Future[View | ProviderError]] = {}
        for zone in self._zones:
            previous = self._running.get(zone)
            if previous is not None and not previous.done():
                answers[zone] = ProviderUnavailable(f"{zone} does not respond")
            else:
                futures[zone] = self._running[zone] = self._pool.submit(self._timed, observe, zone)
        for zone, future in futures.items():
            left = started + self._timeout(zone) - time.monotonic()
            wait_for([future], timeout=max(0.0, left))
            unanswered = ProviderUnavailable(f"{zone} does not respond")
            answers[zone] = future.result() if future.done() else unanswered
        return answers

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _timed(self, observe: Callable[[str], View], zone: str) -> View | ProviderError:
        started = time.monotonic()
        try:
            view = observe(zone)
        except ProviderError as error:
            return error
        self._usual[zone] = time.monotonic() - started
        return view

    def _timeout(self, zone: str) -> float:
        usual = self._usual.get(zone)
        longest = MAX_WAIT if usual is None else min(WAIT_FACTOR * usual, MAX_WAIT)
        return max(self._min_wait, longest)
