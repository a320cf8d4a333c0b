"""Pools, slices, faults and the client's errors."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from tests.polling import wait_until
from tests.service.harness import ServiceHarness
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import BadInput, Conflict, Forbidden, NotFound, Unreachable
from tpufleet.model.fleet.host_commands import MAX_TIMEOUT, HostCommandKind, HostCommandRequest
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.slices import SliceState
from tpufleet.model.inbox import InboxMessageKind
from tpufleet.service.hosts.host_commands import MAX_PENDING_PER_HOST
from tpufleet.stores.base import ChangeSet

POOL = Pool(name="lab", provider="local", accelerator="v5e-16", largest=4)


def test_a_pool_is_made_changed_and_dropped_and_the_controller_hears_of_it(service):
    admin = service.client("ada")
    assert admin.put_pool(POOL).accelerator == "v5litepod-16"
    admin.put_pool(replace(POOL, largest=8))
    assert [pool.largest for pool in service.client("vic").pools()] == [8]
    assert service.client("vic").pool("lab").largest == 8
    admin.delete_pool("lab")
    assert admin.pools() == ()
    kinds = [message.kind for message in service.store.inbox()]
    assert kinds == [InboxMessageKind.POOL_CHANGED] * 3
    assert [event.state for event in admin.events().events] == ["changed", "changed", "dropped"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Lab!"}, "lab"),
        ({"provider": "locl"}, "did you mean local"),
        ({"largest": 0}, "smallest"),
        ({"smallest": 9}, "smallest"),
        ({"accelerator": "v5e-17"}, "v5e-16"),
        ({"slices_per_user": 0}, "slices_per_user"),
        ({"capacity": ()}, "capacity"),
        ({"members": ("a b",)}, "user name"),
        ({"members": ("mell",)}, "unknown user 'mell'; did you mean mel"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_pool_that_makes_no_sense_is_refused_in_words(shared_service, changes, message):
    with pytest.raises((BadInput, NotFound), match=message):
        shared_service.client("ada").put_pool(replace(POOL, **changes))
    assert shared_service.client("ada").pools() == ()


def test_a_pool_that_a_live_job_uses_stays(service):
    service.client("ada").put_pool(POOL)
    service.submit("job-1", pool="lab")
    service.submit("job-2", pool="lab")
    with pytest.raises(Conflict, match="in use by 2 jobs"):
        service.client("ada").delete_pool("lab")
    service.end_job("job-2")
    with pytest.raises(Conflict, match="job-1"):
        service.client("ada").delete_pool("lab")
    service.end_job("job-1")
    service.client("ada").delete_pool("lab")
    with pytest.raises(NotFound):
        service.client("ada").pool("lab")


def test_slices_are_listed_by_pool_and_job_and_gone_ones_on_request(service):
    service.submit("job-1")
    service.add_slice("s1", "job-1")
    service.add_slice("s2", None, pool="lab")
    service.add_slice("s3", None, state=SliceState.GONE)
    client = service.client("vic")
    assert {row.id for row in client.slices()} == {"s1", "s2"}
    assert [row.id for row in client.slices(pool="lab")] == ["s2"]
    assert [row.id for row in client.slices(job="job-1")] == ["s1"]
    assert {row.id for row in client.slices(include_released=True)} == {"s1", "s2", "s3"}


def test_a_fault_goes_to_the_controller(service):
    service.add_slice("s1", None)
    service.client("ada").inject_fault("s1", "kill-host", host=2)
    message = service.store.inbox()[-1]
    assert (message.kind, message.slice_id, message.fault, message.host_index) == (
        InboxMessageKind.FAULT,
        "s1",
        "kill-host",
        2,
    )


@pytest.mark.parametrize(
    ("slice_id", "fault", "host", "error", "message"),
    [
        ("s1", "kill-hots", 0, BadInput, "did you mean kill-host"),
        ("s9", "preempt", None, NotFound, "did you mean s1"),
        ("s1", "kill-host", 4, BadInput, "hosts 0 to 3"),
        ("s3", "preempt", None, Conflict, "is gone"),
    ],
)
def test_a_fault_that_cannot_be_is_refused_in_words(service, slice_id, fault, host, error, message):
    service.add_slice("s1", None)
    service.add_slice("s3", None, state=SliceState.GONE)
    with pytest.raises(error, match=message):
        service.client("ada").inject_fault(slice_id, fault, host)
    assert service.store.inbox() == []


def test_an_unknown_parameter_names_the_nearest(shared_service):
    with shared_service.http(shared_service.tokens["vic"]) as http:
        answer = http.get("/jobs", params={"stat": "running"})
    assert answer.status_code == 400
    assert "did you mean state" in answer.json()["error"]["message"]


def test_a_server_that_is_not_there_is_named_with_what_to_do():
    with (
        FleetClient("http://127.0.0.1:9", "tpf_x") as client,
        pytest.raises(Unreachable, match=r"http://127\.0\.0\.1:9.*tpu serve"),
    ):
        client.me()


def test_me_tells_who_and_what_version(service: ServiceHarness):
    me = service.client("vic").me()
    assert (me.name, me.role) == ("vic", "viewer")
    assert me.version


ON_SLICES = {
    "fault": lambda client, slice_id: client.inject_fault(slice_id, "preempt"),
    "exec": lambda client, slice_id: client.send_host_command(
        slice_id, HostCommandRequest(id="c1", command=("date",))
    ),
    "results": lambda client, slice_id: client.host_command(slice_id, "c0"),
}


@pytest.mark.parametrize("action", ON_SLICES)
@pytest.mark.parametrize(
    ("caller", "slice_id", "allowed"),
    [
        pytest.param("mel", "s1", True, id="owner of the job on it"),
        pytest.param("ada", "s1", True, id="admin"),
        pytest.param("mo", "s1", False, id="another member"),
        pytest.param("vic", "s1", False, id="viewer"),
        pytest.param("mel", "s2", False, id="slice without a job"),
        pytest.param("ada", "s2", True, id="admin, slice without a job"),
    ],
)
def test_a_slice_is_open_to_admins_and_to_the_owner_of_its_job(
    service, action, caller, slice_id, allowed
):
    service.submit("job-1")
    service.add_slice("s1", "job-1", provider="tpu-vm")
    service.add_slice("s2", None, pool="lab", provider="tpu-vm")
    service.client("ada").send_host_command(
        slice_id, HostCommandRequest(id="c0", command=("date",))
    )
    if allowed:
        ON_SLICES[action](service.client(caller), slice_id)
    else:
        with pytest.raises(Forbidden):
            ON_SLICES[action](service.client(caller), slice_id)


def test_members_run_no_commands_where_agents_run_as_the_server(service):
    """Agents of simulated slices are the server's user: a command could read its state folder."""
    service.submit("job-1")
    service.add_slice("s1", "job-1")
    with pytest.raises(Forbidden, match="admin role"):
        ON_SLICES["exec"](service.client("mel"), "s1")
    service.client("mel").send_host_command(
        "s1", HostCommandRequest(id="d1", kind=HostCommandKind.DIAGNOSE)
    )
    ON_SLICES["exec"](service.client("ada"), "s1")


@pytest.mark.parametrize(
    ("timeout", "accepted"),
    [
        pytest.param(MAX_TIMEOUT, True, id="the longest"),
        pytest.param(MAX_TIMEOUT + timedelta(seconds=1), False, id="longer"),
        pytest.param(timedelta(days=3000), False, id="years"),
        pytest.param(timedelta(0), False, id="zero"),
        pytest.param(timedelta(seconds=-1), False, id="negative"),
    ],
)
def test_the_timeout_of_a_host_command_is_limited(service, timeout, accepted):
    service.submit("job-1")
    service.add_slice("s1", "job-1")
    request = HostCommandRequest(id="d1", kind=HostCommandKind.DIAGNOSE, timeout=timeout)
    if accepted:
        service.client("mel").send_host_command("s1", request)
    else:
        with pytest.raises(BadInput, match=r"timeout: must be from 1s to 1h"):
            service.client("mel").send_host_command("s1", request)


def test_a_burst_of_host_commands_is_refused_with_a_time_to_retry(service):
    service.submit("job-1")
    service.add_slice("s1", "job-1")
    with service.http(service.tokens["mel"]) as http:
        answers = [
            http.post("/slices/s1/commands", json={"id": f"g{number}", "kind": "diagnose"})
            for number in range(MAX_PENDING_PER_HOST + 1)
        ]
    assert [answer.status_code for answer in answers] == [*[200] * MAX_PENDING_PER_HOST, 429]
    assert answers[-1].headers["Retry-After"]
    assert "20 host commands without a result" in answers[-1].json()["error"]["message"]


def test_a_command_of_an_owner_is_withdrawn_when_the_slice_changes_hands(service):
    service.submit("job-1")
    service.submit("job-2", by="mo")
    held = service.add_slice("s1", "job-1", provider="tpu-vm")
    service.client("mel").send_host_command("s1", HostCommandRequest(id="mine", command=("a",)))
    service.client("ada").send_host_command("s1", HostCommandRequest(id="any", command=("b",)))
    sent = lambda: [command.id for command in service.send_heartbeat("s1/0").host_commands]
    assert sorted(sent()) == ["any", "mine"]
    service.store.commit(ChangeSet(slices=[replace(held, job_id="job-2")]))
    wait_until(lambda: sent() == ["any"])
