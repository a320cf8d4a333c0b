"""The provider `local`: slices simulated on this machine by real agent processes.

All state is in files, so a new provider object continues where an old one died. Boots, planned
faults and deletions happen in `advance`, called by the thread that `start` creates. Listing only
reads.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from msgspec.structs import replace

from tpufleet.clocks import Clock, SystemClock
from tpufleet.errors import BadRequest, ProviderUnavailable, invalid, unexpected
from tpufleet.model.fleet.cloud_slices import CloudSlice, CloudState, ExpectedSlice
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.model.fleet.server_status import LocalJobs
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.pod_settings import PodSettings
from tpufleet.model.tpu import type_lookup
from tpufleet.providers.base import (
    Fault,
    Order,
    find_type,
    no_such_slice,
    out_of_capacity,
    refuse_adoption,
)
from tpufleet.providers.local import processes, stock
from tpufleet.providers.local.fault_plan import NO_FAULTS, FaultPlan
from tpufleet.providers.local.simulated_hosts import SimulatedHosts
from tpufleet.providers.local.slice_records import RootRecord, SliceRecord, SliceRecords
from tpufleet.providers.local.stock import UNLIMITED, Stock

log = logging.getLogger(__name__)

AGENT = (sys.executable, "-m", "tpufleet", "agent")
POLL_EVERY = timedelta(seconds=1)
STOP_WITHIN = timedelta(seconds=20)
ZONE = re.compile(r"[a-z]+(-[a-z0-9]+)+")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class LocalProvider:
    name = "local"
    exposes_tokens = False

    def __init__(
        self,
        root: Path,
        *,
        clock: Clock | None = None,
        agent: Sequence[str] = AGENT,
        stock: Stock = UNLIMITED,
        plan: FaultPlan = NO_FAULTS,
        notice_period: timedelta = timedelta(seconds=30),
        hidden: Sequence[Path] = (),
        job_user: str | None = None,
        member_job_user: str | None = None,
        containers: bool = False,
        inherit: Collection[str] = (),
        jobs: LocalJobs | None = None,
    ) -> None:
        """`hidden` are folders and files of the server that jobs must not see. `job_user`: the
        user that they run as, if the server runs as root; `member_job_user`: that of jobs whose
        owner is no admin. `containers`: jobs may use images. `inherit`: variables of the server's
        environment that they get. `jobs`: what holds for them, for people."""
        self.jobs = jobs
        self.zones: Sequence[str] = ("local-a",)
        self._records = SliceRecords(Path(root))
        self._clock = clock or SystemClock()
        self._hosts = SimulatedHosts(
            self._records,
            agent,
            notice_period,
            hidden,
            job_user,
            member_job_user,
            containers=containers,
            inherit=inherit,
        )
        self._stock = stock
        self._plan = plan
        self._listeners: list[Callable[[], None]] = []
        self._last_listing: list[CloudSlice] = []
        self._wakeup = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    # The Provider interface.

    def slice_settings(self, accelerator: str, pod: PodSettings) -> str:
        return ""

    def request(self, order: Order) -> None:
        refuse_adoption(order, self.name)
        now = self._clock.now()
        with self._records.lock():
            self._records.recover()
            held = self._records.all()
            known = {record.id for record in held}
            wanted = [name for name in dict.fromkeys(order.slices) if name not in known]
            if not wanted:
                return
            root = self._records.root_record(now)
            records = self._prepare(order, wanted, held, root, now)
            self._stock.check(records, held)
            next_number = root.next_number + len(records)
            self._records.save_root(replace(root, next_number=next_number))
            self._records.add(records, order.tokens)
        self._wakeup.set()

    def release(self, slice_id: SliceId, zone: str) -> None:
        with self._records.lock():
            self._records.recover()
            record = self._find(slice_id)
            if record is None:
                return
            if not record.released:
                self._records.save(replace(record, released=True, swept=False))
        self._wakeup.set()
        if self._thread is None:
            self.advance()

    def listing(self, expected: Collection[ExpectedSlice] = ()) -> Sequence[CloudSlice]:
        return [self._cloud_slice(record) for record in self._records.all()]

    def inject(self, slice_id: SliceId, fault: Fault, host_index: int | None = None) -> None:
        with self._records.lock():
            self._records.recover()
            record = self._find(slice_id)
            if record is None:
                raise no_such_slice(slice_id)
            self._hosts.inject(record, fault, host_index, self._clock.now())
            self._hosts.sweep()
        self._notify()

    def on_change(self, wake: Callable[[], None]) -> None:
        self._listeners.append(wake)

    def close(self) -> None:
        """Stop watching. The slices keep running; another provider object finds them."""
        self._closing.set()
        self._wakeup.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # Specific to simulated slices.

    def start(self) -> None:
        """Boot slices, inject planned faults and detect deaths in the background. Idempotent."""
        if self._thread is None:
            self._closing.clear()
            self._thread = threading.Thread(target=self._watch, name="local-slices", daemon=True)
            self._thread.start()

    def advance(self, now: datetime | None = None) -> None:
        """Do everything that is due by now."""
        now = now or self._clock.now()
        with self._records.lock():
            self._records.recover()
            for record in self._records.all():
                if not record.over:
                    self._hosts.advance(record, now)
            self._hosts.sweep()
        self._notify()

    def release_all(self, within: timedelta = STOP_WITHIN) -> None:
        """Release every slice, and return when no process is left."""
        for record in self._records.all():
            self.release(record.id, record.zone)
        self._sweep_until(lambda: not self._records.all(), within)

    def stop_all(self, reason: str) -> int:
        """Kill the processes of every slice, and return how many slices had any. The records stay,
        for the next server to read why: then it releases them."""
        with self._records.lock():
            self._records.recover()
            remaining = [record for record in self._records.all() if not record.over]
            with_processes = self._with_processes(remaining)
            for record in remaining:
                self._records.save(replace(record, failed=reason, swept=False))
        self._sweep_until(lambda: all(each.swept for each in self._records.all()), STOP_WITHIN)
        return len(with_processes)

    def _with_processes(self, records: Sequence[SliceRecord]) -> list[SliceRecord]:
        root = self._records.root
        markers = {each.marker for each in processes.leftovers(root)}
        return [
            record
            for record in records
            if set(record.agents) - set(self._hosts.dead_hosts(record))
            or any(each.startswith(processes.slice_marker(root, record.id)) for each in markers)
        ]

    def _sweep_until(self, done: Callable[[], bool], within: timedelta) -> None:
        deadline = time.monotonic() + within.total_seconds()
        while not done():
            if time.monotonic() > deadline:
                left = processes.leftovers(self._records.root)
                raise ProviderUnavailable(f"cannot kill these processes: {left}")
            self.advance()
            time.sleep(0.01)

    def _prepare(
        self,
        order: Order,
        wanted: Sequence[SliceId],
        held: Sequence[SliceRecord],
        root: RootRecord,
        now: datetime,
    ) -> list[SliceRecord]:
        """The records of an order's slices, or an error."""
        accelerator = _validate(order)
        if not self._plan.in_stock(order.zone, now - root.opened_at):
            detail = "by the fault plan"
            raise out_of_capacity(order.accelerator, order.capacity, order.zone, detail)
        begin = int(processes.root_marker(self._records.root), 16) + root.next_number * 7
        taken = {record.port for record in held}
        ports = stock.free_ports(len(wanted), taken, begin)
        records = []
        for offset, (slice_id, port) in enumerate(zip(wanted, ports, strict=True)):
            number = root.next_number + offset
            fate = self._plan.schedule_for(number, accelerator.hosts)
            record = SliceRecord(
                id=slice_id,
                number=number,
                order=order.id,
                accelerator=accelerator.name,
                zone=order.zone,
                capacity=order.capacity,
                server_url=order.server_url,
                fleet=order.fleet,
                job_id=order.job_id,
                pool=order.pool,
                hosts=accelerator.hosts,
                chips_per_host=accelerator.chips_per_host,
                port=port,
                boot_at=now + fate.boot_time,
                missing=fate.missing,
                planned=fate.faults,
            )
            records.append(record)
        return records

    def _find(self, slice_id: SliceId) -> SliceRecord | None:
        return self._records.get(slice_id) if NAME.fullmatch(slice_id) else None

    def _cloud_slice(self, record: SliceRecord) -> CloudSlice:
        dead = self._hosts.dead_hosts(record)
        state, message = _state(record, dead)
        return CloudSlice(
            id=record.id,
            zone=record.zone,
            state=state,
            message=message,
            lost_hosts=dead if state is CloudState.UP else (),
            notice=record.notice,
        )

    def _notify(self) -> None:
        listing = list(self.listing())
        if listing != self._last_listing:
            self._last_listing = listing
            for wake in self._listeners:
                wake()

    def _watch(self) -> None:
        while not self._closing.is_set():
            try:
                self.advance()
            except Exception:
                log.exception(unexpected("advancing simulated slices"))
            self._wakeup.wait(POLL_EVERY.total_seconds())
            self._wakeup.clear()


def _validate(order: Order) -> type_lookup.Accelerator:
    for slice_id in order.slices:
        if not NAME.fullmatch(slice_id):
            name = "a name of letters, digits, dots and dashes"
            raise BadRequest(str(invalid(slice_id, name, "slice-1")))
    if not ZONE.fullmatch(order.zone):
        raise BadRequest(str(invalid(order.zone, "a zone", "us-central1-a or local-a")))
    return find_type(order.accelerator)


def _state(record: SliceRecord, dead: tuple[int, ...]) -> tuple[CloudState, str]:
    if record.released:
        return CloudState.STOPPING, "released"
    if record.taken:
        maintenance = record.notice is NoticeKind.MAINTENANCE
        return CloudState.PREEMPTED, "stopped for maintenance" if maintenance else "preempted"
    if record.failed:
        return CloudState.FAILED, record.failed
    if dead and len(dead) + len(record.missing) >= record.hosts:
        return CloudState.FAILED, "all hosts are dead"
    if not record.booted:
        return CloudState.CREATING, "booting"
    return CloudState.UP, f"host {', '.join(map(str, dead))} is dead" if dead else ""
