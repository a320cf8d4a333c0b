"""Every running job is checked for a hang once in an interval, and never all in one tick."""

from __future__ import annotations

from datetime import timedelta

from tests.contract import store_builders as a
from tests.contract.fake_store import FakeStore
from tpufleet.clocks import ManualClock
from tpufleet.controller.host_silence import CHECK_INTERVAL, HostSilence
from tpufleet.controller.observe import HANG_CHECK_INTERVAL, Observer
from tpufleet.controller.working_set import WorkingSet
from tpufleet.model.fleet.slices import SliceState
from tpufleet.model.job.attempts import AttemptState
from tpufleet.model.job.jobs import JobState
from tpufleet.policy.recovery import liveness
from tpufleet.stores.base import ChangeSet

JOBS = 300
NAMES = [f"j{number}" for number in range(JOBS)]


class Fleet:
    """Running jobs, observed every second."""

    def __init__(self, hosts: int = 0) -> None:
        self._store, self._clock = running_jobs(), ManualClock()
        self._working_set = WorkingSet(self._store.live())
        large = a.tpu_slice("large", state=SliceState.READY)
        self._working_set.put_slice(large)
        self._working_set.hosts[large.id] = {index: a.host(large.id) for index in range(hosts)}
        silence = HostSilence(self._store, self._clock, 20)
        self._observer = Observer(self._store, self._working_set, silence, self._clock.now())

    def checked_in(self, interval: timedelta) -> list[set[str]]:
        """The jobs that each second of it checked."""
        return [self._checked_now() for _ in range(int(interval.total_seconds()))]

    def _checked_now(self) -> set[str]:
        self._clock.advance(timedelta(seconds=1))
        self._working_set.dirty_jobs.clear()
        self._observer.observe([], self._clock.now())
        return set(self._working_set.dirty_jobs)


def running_jobs() -> FakeStore:
    store = FakeStore()
    store.commit(
        ChangeSet(
            new_jobs=[a.job(name, state=JobState.RUNNING) for name in NAMES],
            attempts=[
                a.attempt(name, state=AttemptState.RUNNING, running_at=a.NOW) for name in NAMES
            ],
        )
    )
    return store


def test_the_checks_are_spread_over_the_interval():
    checked = Fleet().checked_in(HANG_CHECK_INTERVAL)
    assert sorted(name for names in checked for name in names) == sorted(NAMES)
    assert max(map(len, checked)) <= JOBS / len(checked) + 1


def test_a_large_fleet_is_checked_as_often_as_its_hosts_report():
    hosts = 80_000
    interval = liveness.heartbeat_interval(hosts)
    fleet = Fleet(hosts)
    fleet.checked_in(CHECK_INTERVAL)  # the hosts are counted
    checked = fleet.checked_in(interval + timedelta(seconds=1))
    assert set.union(*checked) == set(NAMES)
    assert max(map(len, checked)) <= JOBS / interval.total_seconds() + 1
