"""Which hosts have fallen silent, over all leadership terms of one controller.

Silence is measured on the controller's own clock that never steps, and only while the controller
ticks: its own absence is not the hosts' silence.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from datetime import datetime, timedelta

from tpufleet.clocks import Clock
from tpufleet.controller.working_set import WorkingSet
from tpufleet.model.fleet.hosts import HostId, slice_id_of
from tpufleet.model.fleet.server_status import SERVERS_PREFIX
from tpufleet.model.fleet.slices import SliceId
from tpufleet.policy.recovery import liveness
from tpufleet.stores.base import Store

log = logging.getLogger("tpufleet.controller")

CHECK_INTERVAL = timedelta(seconds=2)


class HostSilence:
    def __init__(self, store: Store, clock: Clock, max_lost_percent: int) -> None:
        self._store = store
        self._clock = clock
        self._max_lost_percent = max_lost_percent
        self._presence: liveness.Presence | None = None  # at the last tick that succeeded
        self._current: liveness.Presence | None = None  # in this tick
        self._silences: dict[HostId, liveness.Silence] = {}
        self._checked_at = clock.uptime()
        self._lost: dict[SliceId, tuple[timedelta, int]] = {}  # when, and how many hosts
        self._warned_at: timedelta | None = None
        self._servers = deque([(clock.uptime(), 1)])  # since when how many
        self.hosts = 0  # of all slices that are up, at the last check

    def tick_started(self) -> datetime:
        """Returns since when hosts could report without a gap."""
        self._current = liveness.continue_presence(
            self._presence, self._clock.now(), self._clock.uptime()
        )
        return self._current.since

    def clock_step(self) -> timedelta:
        """By how much the clock was set since the last tick that succeeded."""
        if self._presence is None:
            return timedelta(0)
        return liveness.clock_step(self._presence, self._clock.now(), self._clock.uptime())

    def tick_succeeded(self) -> None:
        self._presence = self._current

    def check(self, working_set: WorkingSet, heard: Iterable[HostId] = ()) -> list[HostId]:
        """Hosts that count as lost now; not those `heard`: the time of a report is stored a moment
        after the news in it."""
        for host in heard:
            self._silences.pop(host, None)
        uptime, now = self._clock.uptime(), self._clock.now()
        if self._current is None or uptime - self._checked_at < CHECK_INTERVAL:
            return []
        self._checked_at = uptime
        by_slice = working_set.hosts_by_slice()
        hosts = self.hosts = sum(by_slice.values())
        limit = liveness.lost_after(hosts, self._fewest_servers(hosts, uptime, now))
        margin = liveness.watched_after(limit)
        # A report from the future is as suspect as an old one: a clock was set back.
        old_reports = self._store.heartbeats_outside(now - margin, now + margin)
        self._silences = liveness.update_silences(self._silences, old_reports, uptime)
        silent = [
            host
            for host in liveness.silent_hosts(self._silences, self._current, limit, uptime)
            if slice_id_of(host) in by_slice and working_set.is_up(host)
        ]
        return self._within_limit(silent, by_slice, uptime) if silent else []

    def _fewest_servers(self, hosts: int, uptime: timedelta, now: datetime) -> int:
        """In the time in which every host learns how often to report: the fewer servers there are,
        the less often. One until that time has passed."""
        announced = [each.at for each in self._store.objects(SERVERS_PREFIX)]
        servers = liveness.count_servers(announced, self._store.time() or now)
        if servers != self._servers[-1][1]:
            self._servers.append((uptime, servers))
        learned = liveness.lost_after(hosts)
        while len(self._servers) > 1 and uptime - self._servers[1][0] > learned:
            self._servers.popleft()
        return min(count for _, count in self._servers)

    def _within_limit(
        self, silent: list[HostId], by_slice: dict[SliceId, int], uptime: timedelta
    ) -> list[HostId]:
        self._lost = {
            slice_id: (at, hosts)
            for slice_id, (at, hosts) in self._lost.items()
            if uptime - at < liveness.LOSS_PERIOD
        }
        recently_lost = {slice_id: hosts for slice_id, (_, hosts) in self._lost.items()}
        chosen = liveness.slices_to_give_up(
            [slice_id_of(host) for host in silent], by_slice, recently_lost, self._max_lost_percent
        )
        for slice_id in chosen:
            self._lost.setdefault(slice_id, (uptime, by_slice[slice_id]))
        lost = [host for host in silent if slice_id_of(host) in chosen]
        if len(lost) < len(silent) and (
            self._warned_at is None or uptime - self._warned_at >= liveness.LOSS_PERIOD
        ):
            self._warned_at = uptime
            log.warning(
                "%s of %s hosts send no heartbeat; declaring at most %s %% lost per minute; "
                "check the network between hosts and server",
                len(silent),
                sum(by_slice.values()),
                self._max_lost_percent,
            )
        return lost
