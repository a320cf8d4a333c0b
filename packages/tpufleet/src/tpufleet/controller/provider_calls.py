"""Provider calls: started in worker threads, never waited for; results are collected each tick.

What to call is derived from the recorded slices every time, so a crash here loses nothing.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from tpufleet.backoff import BackoffPolicy
from tpufleet.clocks import Clock
from tpufleet.errors import BadRequest, FleetError
from tpufleet.model.fleet.cloud_slices import CloudSlice, ExpectedSlice
from tpufleet.model.fleet.slices import SliceId, TpuSlice
from tpufleet.providers.base import Fault, Order, Provider

# A delete that no listing confirms is sent again.
RELEASE_RETRY_INTERVAL = timedelta(seconds=15)
BACKOFF = BackoffPolicy(first=timedelta(seconds=1), longest=timedelta(seconds=30))


class CallKind(StrEnum):
    REQUEST = "request"
    RELEASE = "release"
    LISTING = "listing"
    FAULT = "fault"


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a provider call."""

    call: CallKind
    provider: str
    started_at: datetime
    slices: tuple[SliceId, ...] = ()
    listing: Sequence[CloudSlice] = ()
    error: FleetError | None = None


def thread_executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=64, thread_name_prefix="provider")


class ProviderCalls:
    """Provider calls in flight, and their results."""

    def __init__(
        self,
        providers: Mapping[str, Provider],
        executor: Executor,
        clock: Clock,
        wake: Callable[[], None],
    ) -> None:
        self.providers = providers
        self._executor = executor
        self._clock = clock
        self._wake = wake
        self._results: queue.SimpleQueue[CallResult] = queue.SimpleQueue()
        self._in_flight: set[tuple[CallKind, str]] = set()
        self._not_before: dict[tuple[CallKind, str], datetime] = {}
        self._failures: dict[tuple[CallKind, str], int] = {}

    def take_results(self) -> list[CallResult]:
        """Results since the last call."""
        results: list[CallResult] = []
        while True:
            try:
                results.append(self._results.get_nowait())
            except queue.Empty:
                return results

    def request(self, order: Order, provider: str) -> None:
        self._start(
            CallKind.REQUEST,
            order.id,
            provider,
            lambda: self.providers[provider].request(order),
            order.slices,
        )

    def release(self, slice_id: SliceId, zone: str, provider: str) -> None:
        started = self._start(
            CallKind.RELEASE,
            slice_id,
            provider,
            lambda: self.providers[provider].release(slice_id, zone),
            (slice_id,),
        )
        self._not_before[(CallKind.RELEASE, slice_id)] = started + RELEASE_RETRY_INTERVAL

    def list(self, provider: str, expected: Sequence[ExpectedSlice] = ()) -> None:
        self._start(
            CallKind.LISTING,
            provider,
            provider,
            lambda: self.providers[provider].listing(expected),
        )

    def inject_fault(self, tpu_slice: TpuSlice, fault: str, host_index: int | None) -> None:
        def inject() -> None:
            try:
                kind = Fault(fault)
            except ValueError as error:
                raise BadRequest(f"unknown fault {fault!r}") from error
            self.providers[tpu_slice.provider].inject(tpu_slice.id, kind, host_index)

        self._start(CallKind.FAULT, tpu_slice.id, tpu_slice.provider, inject, (tpu_slice.id,))

    def may_start(self, call: CallKind, key: str, now: datetime) -> bool:
        if (call, key) in self._in_flight:
            return False
        after = self._not_before.get((call, key))
        return after is None or after <= now

    def back_off(self, call: CallKind, key: str, now: datetime) -> None:
        """After a temporary failure: do not start this call again for a while."""
        failures = self._failures[(call, key)] = self._failures.get((call, key), 0) + 1
        self._not_before[(call, key)] = now + BACKOFF.delay(failures, key=key)

    def failed(self, call: CallKind, key: str) -> bool:
        """Whether the last call failed."""
        return (call, key) in self._failures

    def reset(self, call: CallKind, key: str) -> None:
        self._failures.pop((call, key), None)
        self._not_before.pop((call, key), None)

    def _start(
        self,
        kind: CallKind,
        key: str,
        provider: str,
        call: Callable[[], Sequence[CloudSlice] | None],
        slices: tuple[SliceId, ...] = (),
    ) -> datetime:
        """Returns when it was started."""
        started = self._clock.now()

        def run() -> None:
            listing: Sequence[CloudSlice] | None = None
            failure: FleetError | None = None
            try:
                listing = call()
            except FleetError as error:
                failure = error
            except Exception as error:  # a bug in one provider must not stop the others
                failure = FleetError(f"unexpected error in provider {provider}: {error!r}")
                failure.__cause__ = error
            self._in_flight.discard((kind, key))
            self._results.put(
                CallResult(
                    call=kind,
                    provider=provider,
                    started_at=started,
                    slices=slices,
                    # An empty one may still name zones that did not answer.
                    listing=() if listing is None else listing,
                    error=failure,
                )
            )
            self._wake()

        self._in_flight.add((kind, key))
        self._executor.submit(run)
        return started
