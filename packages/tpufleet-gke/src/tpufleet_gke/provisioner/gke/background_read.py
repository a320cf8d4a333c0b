"""Reads from GKE that reconciling can do without for a while. One that hangs delays one round."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import datetime, timedelta
from typing import Generic, TypeVar

from tpufleet.errors import FleetError

log = logging.getLogger("tpufleet_gke.provisioner")
T = TypeVar("T")

RETRY_AFTER = timedelta(seconds=5)  # after a failure


class BackgroundRead(Generic[T]):
    def __init__(
        self, read: Callable[[], T], what: str, timeout: timedelta, refresh_after: timedelta
    ) -> None:
        self._read, self._what = read, what
        self._timeout, self._refresh_after = timeout, refresh_after
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=what.split()[0])
        self._call: Future[T] | None = None
        self._due: datetime | None = None  # None: at once
        self._last_error = ""
        self.value: T | None = None  # None before the first has ended

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def update(self, now: datetime, *, wait_for_it: bool) -> bool:
        """Whether `value` was read just now. A new call is started when it is due, and waited for
        if that is asked for; one that has outlasted its round is not waited for again."""
        started = self._call is None and (self._due is None or self._due <= now)
        if started:
            self._call = self._executor.submit(self._read)
        if self._call is None:
            return False
        if started and wait_for_it:
            wait([self._call], self._timeout.total_seconds())
        if not self._call.done():
            return False
        call, self._call = self._call, None
        return self._take(call, now) and started

    def _take(self, call: Future[T], now: datetime) -> bool:
        try:
            self.value = call.result()
        except FleetError as error:
            self._due = now + RETRY_AFTER
            if str(error) != self._last_error:
                log.warning("cannot read %s: %s", self._what, error)
            self._last_error = str(error)
            return False
        self._due, self._last_error = now + self._refresh_after, ""
        return True
