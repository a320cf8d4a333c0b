"""`tpu status` against a real server."""

from __future__ import annotations

from tpufleet.model import encoding
from tpufleet.model.server_status import (
    CONTROLLER_REPORT,
    ControllerReport,
    ProviderHealth,
    ProviderProblem,
)


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
