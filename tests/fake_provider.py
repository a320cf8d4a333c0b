"""An in-memory provider on a manual clock, for journey tests, benchmarks and simulations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tpufleet.clocks import Clock
from tpufleet.errors import BadRequest, NoCapacity, ProviderError
from tpufleet.model.fleet.bootstrap import BootstrapReport
from tpufleet.model.fleet.cloud_slices import CloudSlice, CloudState, ExpectedSlice
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.model.fleet.slices import SliceId, settings_digest
from tpufleet.model.job.pod_settings import PodSettings
from tpufleet.providers.base import Fault, Order, find_type, refuse_adoption

_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class FakeSlice:
    """A slice in this cloud."""

    order: Order
    requested_at: datetime
    up_at: datetime
    state: CloudState | None = None  # None: creating or up, depending on the time
    notice: NoticeKind | None = None
    preempt_at: datetime | None = None  # when the notice period ends
    lost_hosts: tuple[int, ...] = ()
    gone_at: datetime | None = None  # when its deletion completes
    bootstrap: tuple[BootstrapReport, ...] = ()
    settings: str = ""


class FakeProvider:
    exposes_tokens = False

    def __init__(
        self,
        clock: Clock,
        *,
        name: str = "fake",
        zones: Sequence[str] = ("zone-a",),
        boot: timedelta = timedelta(seconds=10),
        deletion: timedelta = timedelta(0),
        notice_period: timedelta = timedelta(seconds=30),
    ) -> None:
        self.name = name
        self.zones = tuple(zones)
        self.boot = boot
        self.deletion = deletion
        self.notice_period = notice_period
        self.stock: dict[
            tuple[str, str], int
        ] = {}  # (zone, accelerator) → slices; absent: unlimited
        self.errors: list[ProviderError] = []  # raised by the next requests, one each
        self.outage: ProviderError | None = None  # raised by every call while set
        self.requested: list[tuple[datetime, SliceId]] = []
        self._clock = clock
        self._slices: dict[SliceId, FakeSlice] = {}
        self._wake: Callable[[], None] = lambda: None
        self._lock = threading.RLock()
        self.runtime = "v1"  # software version of new slices

    def _now(self) -> datetime:
        """A cloud has a clock of its own: it does not step with that of a server."""
        return _EPOCH + self._clock.uptime()

    def slice_settings(self, accelerator: str, pod: PodSettings) -> str:
        return settings_digest(self.runtime, pod)

    def created_with(self, slice_id: SliceId) -> str | None:
        """The settings of a slice that exists."""
        known = self._slices.get(slice_id)
        return None if known is None else known.settings

    def request(self, order: Order) -> None:
        refuse_adoption(order, self.name)
        with self._lock:
            self._check_outage()
            wanted = [slice_id for slice_id in order.slices if slice_id not in self._slices]
            if not wanted:
                return
            if self.errors:
                raise self.errors.pop(0)
            find_type(order.accelerator)
            available = self.stock.get((order.zone, order.accelerator))
            if available is not None and (
                available < len(wanted) or available - self._in_use(order) < len(wanted)
            ):
                raise NoCapacity(f"no {order.accelerator} in {order.zone}")
            now = self._now()
            for slice_id in wanted:
                self.requested.append((now, slice_id))
                self._slices[slice_id] = FakeSlice(
                    order,
                    now,
                    now + self.boot,
                    settings=self.slice_settings(order.accelerator, order.pod),
                )

    def release(self, slice_id: SliceId, zone: str) -> None:
        with self._lock:
            self._check_outage()
            fake_slice = self._slices.get(slice_id)
            if fake_slice is not None and fake_slice.gone_at is None:
                fake_slice.gone_at = self._now() + self.deletion
                fake_slice.state = CloudState.STOPPING

    def listing(self, expected: Collection[ExpectedSlice] = ()) -> Sequence[CloudSlice]:
        with self._lock:
            self._check_outage()
            now = self._now()
            return [
                CloudSlice(
                    id=slice_id,
                    zone=fake_slice.order.zone,
                    state=self._state(fake_slice, now),
                    lost_hosts=fake_slice.lost_hosts,
                    notice=fake_slice.notice,
                    bootstrap=fake_slice.bootstrap,
                    fenced=self._state(fake_slice, now) is CloudState.PREEMPTED,
                )
                for slice_id, fake_slice in self._slices.items()
                if not self._is_gone(fake_slice, now)
            ]

    def inject(self, slice_id: SliceId, fault: Fault, host_index: int | None = None) -> None:
        with self._lock:
            fake_slice = self._slices.get(slice_id)
            if fake_slice is None:
                raise BadRequest(f"no slice {slice_id}")
            match fault:
                case Fault.PREEMPT:
                    fake_slice.state = CloudState.PREEMPTED
                case Fault.PREEMPT_NOTICE:
                    self._give_notice(fake_slice, NoticeKind.PREEMPTED)
                case Fault.MAINTENANCE:
                    self._give_notice(fake_slice, NoticeKind.MAINTENANCE)
                case Fault.KILL_HOST:
                    fake_slice.lost_hosts = (*fake_slice.lost_hosts, host_index or 0)
                case Fault.STALL_HOST:
                    pass  # invisible to the provider
        self._wake()

    def vanish(self, slice_id: SliceId) -> None:
        """Delete it, as the cloud would without notice."""
        with self._lock:
            self._slices[slice_id].gone_at = self._now()
        self._wake()

    def on_change(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def close(self) -> None:
        self._wake = lambda: None

    def is_up(self, slice_id: SliceId) -> bool:
        """Whether its hosts run, and with them agents and workloads."""
        with self._lock:
            fake_slice = self._slices.get(slice_id)
            now = self._now()
            return (
                fake_slice is not None
                and not self._is_gone(fake_slice, now)
                and self._state(fake_slice, now) is CloudState.UP
            )

    def find(self, slice_id: SliceId) -> FakeSlice | None:
        return self._slices.get(slice_id)

    def existing(self) -> list[SliceId]:
        """Slices that exist and cost money now."""
        with self._lock:
            now = self._now()
            return [
                slice_id
                for slice_id, fake_slice in self._slices.items()
                if not self._is_gone(fake_slice, now)
            ]

    def _check_outage(self) -> None:
        if self.outage is not None:
            raise self.outage

    def _give_notice(self, fake_slice: FakeSlice, notice: NoticeKind) -> None:
        fake_slice.notice = notice
        fake_slice.preempt_at = self._now() + self.notice_period

    def _state(self, fake_slice: FakeSlice, now: datetime) -> CloudState:
        if fake_slice.state is not None:
            return fake_slice.state
        if fake_slice.preempt_at is not None and fake_slice.preempt_at <= now:
            return CloudState.PREEMPTED
        return CloudState.UP if fake_slice.up_at <= now else CloudState.CREATING

    def _is_gone(self, fake_slice: FakeSlice, now: datetime) -> bool:
        return fake_slice.gone_at is not None and fake_slice.gone_at <= now

    def _in_use(self, order: Order) -> int:
        now = self._now()
        return sum(
            1
            for fake_slice in self._slices.values()
            if not self._is_gone(fake_slice, now)
            and fake_slice.order.zone == order.zone
            and fake_slice.order.accelerator == order.accelerator
        )


class InlineExecutor(Executor):
    """Runs each call immediately in the caller's thread: for tests and simulations."""

    def submit(self, fn, /, *args, **kwargs):
        future: Future[object] = Future()
        future.set_result(fn(*args, **kwargs))
        return future
