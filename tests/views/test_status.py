"""`tpu status` against a real server."""

from __future__ import annotations

from tpufleet.model import encoding
from tpufleet.model.hosts import HostLiveness
from tpufleet.model.records import replace
from tpufleet.model.server_status import (
    CONTROLLER_REPORT,
    ControllerReport,
    ProviderHealth,
    ProviderProblem,
)
from tpufleet.model.slices import SliceId, SliceState
from tpufleet.stores.base import ChangeSet


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
        world.store.record_liveness([HostLiveness(host_id=host.id, seen_at=now) for host in hosts])
    assert "slices     2, 8 hosts reporting" in tpu("status").stdout
    gone = world.store.slice(SliceId("s-1"))
    world.store.commit(ChangeSet(slices=[replace(gone, state=SliceState.GONE)]))
    assert "slices     1, 4 hosts reporting" in tpu("status").stdout
