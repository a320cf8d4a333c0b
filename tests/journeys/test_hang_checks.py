"""Every running job is checked for a hang once in an interval, and never all in one tick."""

from __future__ import annotations

from datetime import timedelta

from tests.contract import store_builders as a
from tpufleet.clocks import ManualClock
from tpufleet.controller.host_silence import HostSilence
from tpufleet.controller.observe import HANG_CHECK_INTERVAL, Observer
from tpufleet.controller.working_set import WorkingSet
from tpufleet.model.attempts import AttemptState
from tpufleet.model.jobs import JobState
from tpufleet.stores.base import ChangeSet
from tpufleet.stores.memory import MemoryStore

JOBS = 300


def test_the_checks_are_spread_over_the_interval():
    store, clock = MemoryStore(), ManualClock()
    names = [f"j{number}" for number in range(JOBS)]
    store.commit(
        ChangeSet(
            new_jobs=[a.job(name, state=JobState.RUNNING) for name in names],
            attempts=[
                a.attempt(name, state=AttemptState.RUNNING, running_at=a.NOW) for name in names
            ],
        )
    )
    working_set = WorkingSet(store.live())
    observer = Observer(store, working_set, HostSilence(store, clock, 20), clock.now())
    seconds = int(HANG_CHECK_INTERVAL.total_seconds())
    checked: list[str] = []
    most = 0
    for _ in range(seconds):
        clock.advance(timedelta(seconds=1))
        working_set.dirty_jobs.clear()
        observer.observe([], clock.now())
        checked += working_set.dirty_jobs
        most = max(most, len(working_set.dirty_jobs))
    assert sorted(checked) == sorted(names)
    assert most <= JOBS / seconds + 1
