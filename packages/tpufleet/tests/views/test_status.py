"""`tpu status` against a real server."""

from __future__ import annotations

import dataclasses
import threading
from datetime import timedelta

import pytest
from msgspec.structs import replace

from tests.contract.store_builders import NOW
from tpufleet.model.fleet.hosts import HostLiveness
from tpufleet.model.fleet.server_status import (
    CONTROLLER_REPORT,
    ControllerReport,
    LocalJobs,
    LoggedError,
    ProviderHealth,
    ProviderProblem,
    SeenServer,
    ServerStatus,
)
from tpufleet.model.fleet.slices import SliceId, SliceState
from tpufleet.model.job.jobs import JobState
from tpufleet.model.values import encoding
from tpufleet.service.operations import server_status
from tpufleet.stores.base import ChangeSet
from tpufleet.views.cli.operators.status import lines


def test_status_shows_what_fails_and_exits_with_1(world, tpu):
    result = tpu("status")
    assert result.exit_code == 1 and "leader     none" in result.stdout
    now = world.clock.now()
    problem = ProviderProblem(
        call="listing", message="run `gcloud auth login`", since=now, last_at=now
    )
    for problems, code in (((problem,), 1), ((), 0)):
        report = ControllerReport(
            holder="server-1",
            leader_since=now,
            reported_at=now,
            providers=(ProviderHealth(name="tpu-vm", answered_at=now, problems=problems),),
        )
        world.store.put_metadata(CONTROLLER_REPORT, encoding.to_json(report).decode())
        result = tpu("status")
        assert result.exit_code == code, result.stdout
        assert "leader     server-1" in result.stdout and "provider   tpu-vm" in result.stdout
        assert ("gcloud auth login" in result.stdout) == bool(problems)
    assert tpu.json("status")["controller"]["holder"] == "server-1"


def test_hosts_of_deleted_slices_do_not_count_as_reporting(world, tpu):
    now = world.clock.now()
    for name in ("s-1", "s-2"):
        world.add_slice(name, None)
        hosts = world.store.hosts(SliceId(name))
        world.store.record_heartbeats(
            [HostLiveness(host_id=host.id, seen_at=now) for host in hosts]
        )
    assert "slices     2, 8 hosts reporting" in tpu("status").stdout
    gone = world.store.slice(SliceId("s-1"))
    world.store.commit(ChangeSet(slices=[dataclasses.replace(gone, state=SliceState.GONE)]))
    assert "slices     1, 4 hosts reporting" in tpu("status").stdout


def test_servers_of_one_store_are_listed_until_they_stop(world, tpu):
    now, stopping = world.clock.now(), threading.Event()
    server_status.announce(world.store, "one", now - timedelta(minutes=70))
    server_status.announce(world.store, "two", now)
    shown = tpu("status").stdout
    assert "other      two, version" in shown and "other      one" not in shown
    assert [each.name for each in world.store.objects("servers/")] == ["servers/two"]
    stopping.set()
    server_status.announce_until(stopping, world.store, "two", world.clock)
    assert "other" not in tpu("status").stdout


MINUTE = timedelta(minutes=1)
HEALTHY = ServerStatus(
    version="1.2.0",
    now=NOW,
    controller=ControllerReport(
        holder="server-1", leader_since=NOW - 5 * MINUTE, reported_at=NOW, version="1.2.0"
    ),
    controller_stale=False,
    jobs={JobState.QUEUED: 2, JobState.RUNNING: 1},
    slices=1,
    hosts=4,
    started_at=NOW - 60 * MINUTE,
)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, "server     1.2.0, up 1 h"),
        ({"server": "server-2"}, "server     server-2, version 1.2.0, up 1 h"),
        ({"server": "server-2"}, "leader     server-1, for 5 min"),
        (
            {"servers": (SeenServer(name="server-3", version="1.1.0", seen_at=NOW - MINUTE),)},
            "other      server-3, version 1.1.0, seen 1 min ago",
        ),
        ({"server": "server-1"}, "leader     server-1 (this server), for 5 min"),
        ({}, "leader     server-1, for 5 min"),
        ({}, "jobs       2 queued, 1 running"),
        (
            {"controller": replace(HEALTHY.controller, version="1.1.0")},
            "leader     server-1, for 5 min, version 1.1.0",
        ),
        (
            {"oldest_queued_at": NOW - 3 * MINUTE},
            "queue      oldest job waits for 3 min; see `tpu jobs state:queued`",
        ),
        (
            {"errors": (LoggedError(at=NOW - MINUTE, level="WARNING", message="slow", count=3),)},
            "WARNING    1 min ago (3 times): slow",
        ),
        (
            {"local_jobs": LocalJobs(description="as nobody", isolated=True)},
            "local      jobs on local: as nobody",
        ),
        (
            {"local_jobs": LocalJobs(description="jobs can read the state", isolated=False)},
            "warning    jobs on local: jobs can read the state",
        ),
    ],
)  # fmt: skip
def test_status_shows_versions_queue_errors_and_what_jobs_on_this_machine_can_see(change, line):
    assert line in lines(replace(HEALTHY, **change))
