"""A cloud in memory, on a clock that the caller moves. For journeys, benchmarks and simulations.

It keeps the promises of a real provider, and can be told to break each of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tpufleet.clocks import Clock
from tpufleet.errors import BadRequest, NoCapacity, ProviderError
from tpufleet.model import topology
from tpufleet.model.cloud_slices import CloudSlice, CloudState
from tpufleet.model.hosts import NoticeKind
from tpufleet.model.slices import SliceId
from tpufleet.providers.base import Fault, Order


@dataclass(slots=True)
class FakeSlice:
    """A slice that this cloud has."""

    order: Order
    requested_at: datetime
    up_at: datetime
    state: CloudState | None = None  # None: creating or up, by the clock
    notice: NoticeKind | None = None
    preempt_at: datetime | None = None  # when the notice runs out
    lost_hosts: tuple[int, ...] = ()
    gone_at: datetime | None = None  # deletion takes a while


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
        self.stock: dict[tuple[str, str], int] = {}  # (zone, accelerator) → slices; absent: plenty
        self.errors: list[ProviderError] = []  # raised by the next requests, one each
        self.requested: list[tuple[datetime, SliceId]] = []
        self._clock = clock
        self._machines: dict[SliceId, FakeSlice] = {}
        self._wake: Callable[[], None] = lambda: None
        self._lock = threading.RLock()

    def request(self, order: Order) -> None:
        with self._lock:
            wanted = [slice_id for slice_id in order.slices if slice_id not in self._machines]
            if not wanted:
                return
            if self.errors:
                raise self.errors.pop(0)
            try:
                topology.find(order.accelerator)
            except Exception as error:
                raise BadRequest(str(error)) from error
            left = self.stock.get((order.zone, order.accelerator))
            if left is not None and left - self._in_use(order) < len(wanted):
                raise NoCapacity(f"no {order.accelerator} in {order.zone}")
            now = self._clock.now()
            for slice_id in wanted:
                self.requested.append((now, slice_id))
                self._machines[slice_id] = FakeSlice(order, now, now + self.boot)

    def release(self, slice_id: SliceId, zone: str) -> None:
        with self._lock:
            machine = self._machines.get(slice_id)
            if machine is not None and machine.gone_at is None:
                machine.gone_at = self._clock.now() + self.deletion
                machine.state = CloudState.STOPPING

    def listing(self) -> Sequence[CloudSlice]:
        with self._lock:
            now = self._clock.now()
            return [
                CloudSlice(
                    id=slice_id,
                    zone=machine.order.zone,
                    state=self._state(machine, now),
                    lost_hosts=machine.lost_hosts,
                    notice=machine.notice,
                )
                for slice_id, machine in self._machines.items()
                if not self._is_gone(machine, now)
            ]

    def inject(self, slice_id: SliceId, fault: Fault, host_index: int | None = None) -> None:
        with self._lock:
            machine = self._machines.get(slice_id)
            if machine is None:
                raise BadRequest(f"there is no slice {slice_id}")
            match fault:
                case Fault.PREEMPT:
                    machine.state = CloudState.PREEMPTED
                case Fault.PREEMPT_NOTICE:
                    self._give_notice(machine, NoticeKind.PREEMPTED)
                case Fault.MAINTENANCE:
                    self._give_notice(machine, NoticeKind.MAINTENANCE)
                case Fault.KILL_HOST:
                    machine.lost_hosts = (*machine.lost_hosts, host_index or 0)
                case Fault.STALL_HOST:
                    pass  # the cloud sees nothing of it
        self._wake()

    def vanish(self, slice_id: SliceId) -> None:
        """Deleted by the cloud without a word."""
        with self._lock:
            self._machines[slice_id].gone_at = self._clock.now()
        self._wake()

    def on_change(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def close(self) -> None:
        self._wake = lambda: None

    def is_up(self, slice_id: SliceId) -> bool:
        """Its hosts run: agents and programs on them do."""
        with self._lock:
            machine = self._machines.get(slice_id)
            now = self._clock.now()
            return (
                machine is not None
                and not self._is_gone(machine, now)
                and self._state(machine, now) is CloudState.UP
            )

    def find(self, slice_id: SliceId) -> FakeSlice | None:
        return self._machines.get(slice_id)

    def existing(self) -> list[SliceId]:
        """What is being paid for now."""
        with self._lock:
            now = self._clock.now()
            return [
                slice_id
                for slice_id, machine in self._machines.items()
                if not self._is_gone(machine, now)
            ]

    def _give_notice(self, machine: FakeSlice, notice: NoticeKind) -> None:
        machine.notice = notice
        machine.preempt_at = self._clock.now() + self.notice_period

    def _state(self, machine: FakeSlice, now: datetime) -> CloudState:
        if machine.state is not None:
            return machine.state
        if machine.preempt_at is not None and machine.preempt_at <= now:
            return CloudState.PREEMPTED
        return CloudState.UP if machine.up_at <= now else CloudState.CREATING

    def _is_gone(self, machine: FakeSlice, now: datetime) -> bool:
        return machine.gone_at is not None and machine.gone_at <= now

    def _in_use(self, order: Order) -> int:
        now = self._clock.now()
        return sum(
            1
            for machine in self._machines.values()
            if not self._is_gone(machine, now)
            and machine.order.zone == order.zone
            and machine.order.accelerator == order.accelerator
        )
