"""Carrying decisions out: provider calls, started and looked at again, never waited for.

What to ask is worked out from the recorded slices each time, so a crash here loses nothing.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from tpufleet.clocks import Clock
from tpufleet.errors import BadRequest, FleetError
from tpufleet.model.cloud_slices import CloudSlice
from tpufleet.model.slices import SliceId, TpuSlice
from tpufleet.policy import retry_delay
from tpufleet.providers.base import Fault, Order, Provider

# A delete that the listing does not confirm is sent again.
RELEASE_RETRY_INTERVAL = timedelta(seconds=15)
INITIAL_BACKOFF = timedelta(seconds=1)
MAX_BACKOFF = timedelta(seconds=30)


class CallKind(StrEnum):
    REQUEST = "request"
    RELEASE = "release"
    LISTING = "listing"
    FAULT = "fault"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallResult:
    """The answer of a provider call."""

    call: CallKind
    provider: str
    started_at: datetime
    slices: tuple[SliceId, ...] = ()
    listing: Sequence[CloudSlice] = ()
    error: FleetError | None = None


class InlineExecutor(Executor):
    """Runs each call at once, in the caller's thread: for tests and simulations."""

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        future: Future[object] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def thread_executor(workers: int = 64) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=workers, thread_name_prefix="provider")


class ProviderCalls:
    """Provider calls under way, and their answers."""

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
        self._answers: queue.SimpleQueue[CallResult] = queue.SimpleQueue()
        self._under_way: set[tuple[CallKind, str]] = set()
        self._not_before: dict[tuple[CallKind, str], datetime] = {}
        self._tries: dict[tuple[CallKind, str], int] = {}

    def take_results(self) -> list[CallResult]:
        """What came back since the last look."""
        found: list[CallResult] = []
        while True:
            try:
                found.append(self._answers.get_nowait())
            except queue.Empty:
                return found

    def request(self, order: Order, provider: str) -> None:
        def call() -> CallResult:
            self.providers[provider].request(order)
            return CallResult(
                call=CallKind.REQUEST, provider=provider, started_at=began, slices=order.slices
            )

        began = self._clock.now()
        self._start((CallKind.REQUEST, order.id), provider, call, order.slices)

    def release(self, slice_id: SliceId, zone: str, provider: str) -> None:
        def call() -> CallResult:
            self.providers[provider].release(slice_id, zone)
            return CallResult(
                call=CallKind.RELEASE, provider=provider, started_at=began, slices=(slice_id,)
            )

        began = self._clock.now()
        self._start((CallKind.RELEASE, slice_id), provider, call, (slice_id,))
        self._not_before[(CallKind.RELEASE, slice_id)] = began + RELEASE_RETRY_INTERVAL

    def list(self, provider: str) -> None:
        def call() -> CallResult:
            return CallResult(
                call=CallKind.LISTING,
                provider=provider,
                started_at=began,
                listing=self.providers[provider].listing(),
            )

        began = self._clock.now()
        self._start((CallKind.LISTING, provider), provider, call, ())

    def inject_fault(self, tpu_slice: TpuSlice, fault: str, host_index: int | None) -> None:
        def call() -> CallResult:
            try:
                kind = Fault(fault)
            except ValueError as error:
                raise BadRequest(f"no fault is called {fault!r}") from error
            self.providers[tpu_slice.provider].inject(tpu_slice.id, kind, host_index)
            return CallResult(
                call=CallKind.FAULT,
                provider=tpu_slice.provider,
                started_at=began,
                slices=(tpu_slice.id,),
            )

        began = self._clock.now()
        self._start((CallKind.FAULT, tpu_slice.id), tpu_slice.provider, call, (tpu_slice.id,))

    def may_start(self, call: CallKind, key: str, now: datetime) -> bool:
        if (call, key) in self._under_way:
            return False
        after = self._not_before.get((call, key))
        return after is None or after <= now

    def back_off(self, call: CallKind, key: str, now: datetime) -> None:
        """It failed in a way that usually passes: try again a little later."""
        tries = self._tries[(call, key)] = self._tries.get((call, key), 0) + 1
        self._not_before[(call, key)] = now + retry_delay.retry_delay(
            tries, initial=INITIAL_BACKOFF, maximum=MAX_BACKOFF, key=key
        )

    def reset(self, call: CallKind, key: str) -> None:
        self._tries.pop((call, key), None)
        self._not_before.pop((call, key), None)

    def _start(
        self,
        key: tuple[CallKind, str],
        provider: str,
        call: Callable[[], CallResult],
        slices: tuple[SliceId, ...],
    ) -> None:
        began = self._clock.now()

        def run() -> None:
            try:
                result = call()
            except FleetError as error:
                result = CallResult(
                    call=key[0], provider=provider, started_at=began, slices=slices, error=error
                )
            except Exception as error:  # a provider's own fault must not stop the others
                wrapped = FleetError(f"{provider} failed unexpectedly: {error!r}")
                wrapped.__cause__ = error
                result = CallResult(
                    call=key[0], provider=provider, started_at=began, slices=slices, error=wrapped
                )
            self._under_way.discard(key)
            self._answers.put(result)
            self._wake()

        self._under_way.add(key)
        self._executor.submit(run)
