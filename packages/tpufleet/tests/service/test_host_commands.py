"""Errands: each host is asked once, answers once, and only for itself, whichever server it asks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from tests.contract.store_builders import tpu_slice
from tpufleet.errors import BadInput, Conflict, NotFound
from tpufleet.model.fleet.host_commands import (
    FILE_CHUNK_BYTES,
    HEARTBEAT_ALLOWANCE,
    MAX_FILE_BYTES,
    MAX_TIMEOUT,
    HostCommand,
    HostCommandKind,
    HostCommandRequest,
    HostCommandResult,
    SentHostCommand,
)
from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.fleet.slices import SliceId, SliceState
from tpufleet.service.hosts.host_commands import (
    MAX_KEPT_PER_HOST,
    MAX_PENDING_PER_HOST,
    RETENTION,
    HostCommandQueue,
)
from tpufleet.service.transport.limits import TooManyRequests
from tpufleet.stores.base import ChangeSet
from tpufleet.stores.memory import MemoryStore

HOSTS = (HostId("a/0"), HostId("a/1"))
NOW = datetime(2026, 1, 1, tzinfo=UTC)
DATE = HostCommandRequest(id="e1", command=("date",), timeout=timedelta(minutes=1))


def result(host: str, output: str = "") -> HostCommandResult:
    return HostCommandResult(host_id=HostId(host), status=0, output=output)


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    store.commit(ChangeSet(slices=[tpu_slice("a", state=SliceState.READY)]))
    return store


@pytest.fixture
def commands(store: MemoryStore) -> HostCommandQueue:
    commands = HostCommandQueue(store)
    commands.send(DATE, SliceId("a"), HOSTS, NOW)
    return commands


def test_a_host_is_asked_until_it_has_answered(commands):
    assert [errand.id for errand in commands.pending_for(HOSTS[0])] == ["e1"]
    commands.record_result("e1", result("a/0"), NOW)
    assert commands.pending_for(HOSTS[0]) == ()
    assert [errand.command for errand in commands.pending_for(HOSTS[1])] == [("date",)]
    assert commands.pending_for(HostId("b/0")) == ()


def test_the_first_answer_of_a_host_counts(commands):
    commands.record_result("e1", result("a/0", "first"), NOW)
    commands.record_result("e1", result("a/0", "second"), NOW)
    report = commands.report("e1", "a", NOW)
    assert [result.output for result in report.results] == ["first"] and not report.done


def test_sending_the_same_errand_twice_is_one_and_another_under_its_id_is_refused(commands):
    commands.send(DATE, SliceId("a"), HOSTS, NOW + timedelta(seconds=1))
    assert len(commands.pending_for(HOSTS[0])) == 1
    with pytest.raises(Conflict):
        commands.send(HostCommandRequest(id="e1", command=("rm",)), SliceId("a"), HOSTS, NOW)


def test_a_host_cannot_answer_for_an_errand_that_it_was_not_given(commands):
    with pytest.raises(NotFound):
        commands.record_result("e1", result("b/0"), NOW)
    with pytest.raises(NotFound):
        commands.record_result("e2", result("a/0"), NOW)
    with pytest.raises(NotFound, match="slice b has no host command"):
        commands.report("e1", "b", NOW)


def test_what_one_server_took_another_hands_out_and_a_third_reports(commands, store):
    second, third = HostCommandQueue(store), HostCommandQueue(store)
    second.refresh(NOW)
    assert [errand.id for errand in second.pending_for(HOSTS[1])] == ["e1"]
    for host in HOSTS:
        second.record_result("e1", result(host, f"from {host}"), NOW)
    report = third.report("e1", "a", NOW)
    assert report.done and [result.output for result in report.results] == ["from a/0", "from a/1"]
    commands.refresh(NOW)
    assert commands.pending_for(HOSTS[0]) == ()


def test_an_errand_and_its_results_are_forgotten_when_nobody_can_wait_for_it(commands, store):
    commands.record_result("e1", result("a/0", "private"), NOW)
    end = NOW + DATE.timeout + RETENTION
    commands.refresh(end)
    assert commands.report("e1", "a", end).results
    commands.refresh(end + timedelta(seconds=1))
    assert store.host_commands() == [] and store.host_command_results(["e1"]) == {}
    assert commands.pending_for(HOSTS[1]) == ()
    with pytest.raises(NotFound, match="no host command"):
        commands.report("e1", "a", end)


# Files that belong to a result


def test_the_parts_of_a_file_are_read_in_order_by_another_server(commands, store):
    chunk = b"a" * FILE_CHUNK_BYTES
    for offset, part in ((FILE_CHUNK_BYTES, b"def"), (0, chunk), (0, chunk)):  # one is sent twice
        commands.append_file("e1", HOSTS[0], offset, part, NOW)
    commands.append_file("e1", HOSTS[1], 0, b"other", NOW)
    assert b"".join(HostCommandQueue(store).read_file("e1", "a", HOSTS[0])) == chunk + b"def"


def test_a_file_is_taken_and_given_only_for_its_command(commands):
    with pytest.raises(NotFound):
        commands.append_file("e1", HostId("b/0"), 0, b"x", NOW)
    with pytest.raises(NotFound, match="host a/0 sent no file"):
        commands.read_file("e1", "a", HOSTS[0])
    commands.append_file("e1", HOSTS[0], 0, b"x", NOW)
    with pytest.raises(NotFound):
        commands.read_file("e1", "b", HOSTS[0])
    with pytest.raises(BadInput, match="offset: must be from 0"):
        commands.append_file("e1", HOSTS[0], MAX_FILE_BYTES, b"x", NOW)
    with pytest.raises(BadInput, match="offset: must be a multiple"):
        commands.append_file("e1", HOSTS[0], 1, b"x", NOW)


def test_a_file_is_forgotten_with_its_command(commands, store):
    commands.append_file("e1", HOSTS[0], 0, b"x", NOW)
    commands.refresh(NOW + DATE.timeout + RETENTION + timedelta(seconds=1))
    assert store.objects("") == []


# Limits


def diagnose(number: int) -> HostCommandRequest:
    return HostCommandRequest(id=f"d{number}", kind=HostCommandKind.DIAGNOSE)


def test_a_host_has_a_limited_number_of_commands_without_a_result(commands, store):
    for number in range(1, MAX_PENDING_PER_HOST):
        commands.send(diagnose(number), SliceId("a"), HOSTS[:1], NOW)
    with pytest.raises(TooManyRequests, match="host a/0 has 20 host commands"):
        commands.send(diagnose(20), SliceId("a"), HOSTS, NOW)
    assert store.host_command("d20") is None
    commands.send(diagnose(1), SliceId("a"), HOSTS[:1], NOW)  # a resend is the same command
    commands.send(diagnose(21), SliceId("a"), HOSTS[1:], NOW)  # another host
    commands.record_result("d1", result("a/0"), NOW)
    commands.send(diagnose(20), SliceId("a"), HOSTS, NOW)
    assert len(commands.pending_for(HOSTS[0])) == MAX_PENDING_PER_HOST


def test_a_command_is_not_sent_to_hosts_after_its_sender_has_stopped_waiting(commands):
    end = NOW + DATE.timeout + HEARTBEAT_ALLOWANCE
    commands.refresh(end)
    assert len(commands.pending_for(HOSTS[0])) == 1
    commands.refresh(end + timedelta(seconds=1))
    assert commands.pending_for(HOSTS[0]) == ()
    commands.record_result("e1", result("a/0"), end)  # of a host that started it before
    assert len(commands.report("e1", "a", end).results) == 1


def test_more_commands_than_may_be_pending_are_sent_in_part_and_expire(store):
    """Several servers may accept some at the same time."""
    for number in range(MAX_PENDING_PER_HOST + 5):
        command = HostCommand(id=f"d{number}", kind=HostCommandKind.DIAGNOSE, timeout=MAX_TIMEOUT)
        store.put_host_command(
            SentHostCommand(host_command=command, slice_id=SliceId("a"), hosts=HOSTS, sent_at=NOW)
        )
    queue = HostCommandQueue(store)
    queue.refresh(NOW)
    assert len(queue.pending_for(HOSTS[0])) == MAX_PENDING_PER_HOST
    queue.refresh(NOW + MAX_TIMEOUT + RETENTION + timedelta(seconds=1))
    assert store.host_commands() == []


def test_commands_of_a_slice_that_is_gone_are_deleted_with_their_files(commands, store):
    long = HostCommandRequest(id="long", command=("date",), timeout=MAX_TIMEOUT)
    commands.send(long, SliceId("a"), HOSTS, NOW)
    commands.append_file("long", HOSTS[0], 0, b"x", NOW)
    gone = tpu_slice("a", state=SliceState.GONE, gone_at=NOW)
    store.commit(ChangeSet(slices=[gone]))
    commands.refresh(NOW + RETENTION)
    assert commands.pending_for(HOSTS[0]) == ()
    assert b"".join(commands.read_file("long", "a", HOSTS[0])) == b"x"  # a download may be running
    commands.refresh(NOW + RETENTION + timedelta(seconds=1))
    assert store.host_commands() == [] and store.objects("") == []


def test_the_newest_results_of_a_host_are_kept(commands, store):
    """Otherwise quick commands with a long timeout fill the store, which is read every second."""
    for number in range(MAX_KEPT_PER_HOST + 2):
        request = replace(diagnose(number), timeout=MAX_TIMEOUT)
        at = NOW + timedelta(seconds=number)
        commands.send(request, SliceId("a"), HOSTS[:1], at)
        commands.append_file(request.id, HOSTS[0], 0, b"x", at)
        commands.record_result(request.id, result("a/0"), at)
    ids = [sent.host_command.id for sent in store.host_commands()]
    # Both hosts still have to answer the first one.
    assert ids == ["e1", *(f"d{number}" for number in range(2, MAX_KEPT_PER_HOST + 2))]
    assert len(store.objects("")) == MAX_KEPT_PER_HOST


def test_commands_of_an_unknown_slice_are_deleted(commands, store):
    commands.send(diagnose(1), SliceId("unknown"), (HostId("unknown/0"),), NOW)
    commands.refresh(NOW)
    assert [sent.host_command.id for sent in store.host_commands()] == ["e1"]
