"""The store contract for one client. Concurrent clients are in test_store_concurrency."""

from __future__ import annotations

import contextlib
import functools
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest

from tests import postgres
from tests.contract import store_builders as a
from tests.contract.fake_store import FakeStore
from tpufleet.errors import BadInput, Conflict
from tpufleet.model.fleet.agent_protocol import Heartbeat
from tpufleet.model.fleet.host_commands import (
    HostCommand,
    HostCommandKind,
    HostCommandResult,
    SentHostCommand,
)
from tpufleet.model.fleet.hosts import Exit, HostLiveness, Phase, Progress
from tpufleet.model.fleet.slices import SliceState
from tpufleet.model.inbox import InboxMessageKind
from tpufleet.model.job.attempts import AttemptState
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import Job, JobState, ParentRelation
from tpufleet.model.people.audit import AuditAction, AuditEntry
from tpufleet.model.people.preferences import Preferences
from tpufleet.model.people.users import Role
from tpufleet.stores.base import ChangeSet, EventQuery, FileKind, JobQuery, LiveState, Usage
from tpufleet.stores.open_store import open_store
from tpufleet.stores.sql import sql_rows

NASTY = "naïve 量子 🦉 'single' \"double\" ; -- DROP TABLE jobs\n%s ? {x} \\ $text \t end"


@pytest.fixture(params=["fake", "memory", "sqlite", "postgres"])
def store(request, tmp_path):
    if request.param == "fake":
        return FakeStore()
    urls = {
        "memory": lambda: "memory:",
        "sqlite": lambda: f"sqlite:///{tmp_path}/fleet.db",
        "postgres": postgres.fresh_url,
    }
    store = open_store(urls[request.param]())
    request.addfinalizer(store.close)
    return store


def everything(store):
    """All that can be read, to see whether anything changed."""
    return (
        store.jobs(JobQuery(limit=10_000)),
        [store.attempts(job.id) for job in store.jobs(JobQuery(limit=10_000))],
        store.slices(live_only=False),
        [store.hosts(each.id) for each in store.slices(live_only=False)],
        store.events(EventQuery()),
        store.inbox(),
        store.live(),
        store.pools(),
        store.refusals(),
        store.users(),
        store.tokens(),
        store.last_event(),
    )


def ids(jobs):
    return [job.id for job in jobs]


# Reading back what was written.


def test_a_new_store_is_empty_and_says_so(store):
    assert store.job("j1") is None
    assert store.jobs(JobQuery()) == []
    assert store.count_jobs() == {}
    assert store.attempt("j1.0") is None
    assert store.slice("s1") is None
    assert store.host("s1/0") is None
    assert store.last_event() == 0
    assert store.live() == LiveState(
        jobs=[], attempts=[], slices=[], hosts=[], pools=[], refusals=[]
    )
    assert store.metadata("fleet") is None
    assert store.last_heartbeats(["s1/0"]) == {}


def test_everything_committed_is_read_back_as_it_was_written(store):
    job = a.job(
        tags=("x",),
        pool="spot",
        parent="j0",
        parent_relation=ParentRelation.RESUME,
        not_before=a.later(1.000001),
    )
    attempt = a.ended_attempt(message="host 2 lost", start_step=3, checkpoint_step=7)
    tpu_slice = a.tpu_slice(pool="spot", job_id="j1", state=SliceState.READY, ready_at=a.later(2))
    host = a.host(phase=Phase.EXITED, exit=Exit(at=a.later(3), signal=9, oom_killed=True))
    pool, refusal = a.pool(idle_after=timedelta(minutes=3)), a.refusal(streak=4)
    store.commit(
        ChangeSet(
            new_jobs=[job],
            attempts=[attempt],
            slices=[tpu_slice],
            hosts=[host],
            pools=[pool],
            refusals=[refusal],
        )
    )
    assert store.job("j1") == job
    assert store.attempt("j1.0") == attempt
    assert store.slice("s1") == tpu_slice
    assert store.host("s1/0") == host
    assert store.pool("spot") == pool
    assert store.refusals() == [refusal]


def test_quotes_unicode_and_statements_in_any_text_are_only_text(store):
    job = a.job(
        NASTY, owner=NASTY, called=NASTY, tags=(NASTY,), pool=NASTY, reason=NASTY, parent=NASTY
    )
    attempt = replace(a.attempt(NASTY), message=NASTY)
    tpu_slice = a.tpu_slice(NASTY, pool=NASTY, job_id=NASTY, reason=NASTY)
    host = a.host(NASTY, address=NASTY)
    event = a.event(NASTY, job_id=NASTY, slice_id=NASTY, data={NASTY: NASTY})
    store.commit(
        ChangeSet(
            new_jobs=[job],
            attempts=[attempt],
            slices=[tpu_slice],
            hosts=[host],
            pools=[a.pool(NASTY)],
            refusals=[replace(a.refusal(NASTY), message=NASTY)],
            events=[event],
            messages=[a.message(NASTY, by=NASTY)],
        )
    )
    store.put_user(a.user(NASTY))
    store.put_token(a.token(NASTY, of=NASTY, digest=NASTY))
    store.put_metadata(NASTY, NASTY)
    store.record_heartbeats(
        [
            HostLiveness(
                host_id=host.id,
                seen_at=a.NOW,
                attempt_id=attempt.id,
                progress=Progress(message=NASTY),
            )
        ]
    )
    assert store.job(NASTY) == job
    for query in (
        {"owner": NASTY},
        {"name": NASTY},
        {"tag": NASTY},
        {"pool": NASTY},
        {"parent": NASTY},
    ):
        assert store.jobs(JobQuery(**query)) == [job]
    assert store.jobs_like(NASTY[:9]) == [job]
    assert store.attempts(NASTY) == [attempt]
    assert store.slices(pool=NASTY, job_id=NASTY) == [tpu_slice]
    assert store.hosts(NASTY) == [host]
    assert store.pool(NASTY) == a.pool(NASTY)
    assert store.refusals()[0].message == NASTY
    assert store.events(EventQuery(job_id=NASTY, slice_id=NASTY)) == [replace(event, seq=1)]
    assert store.inbox()[0].by == NASTY
    assert store.user(NASTY) == a.user(NASTY)
    assert store.token_by_hash(NASTY) == a.token(NASTY, of=NASTY, digest=NASTY)
    assert store.metadata(NASTY) == NASTY
    assert store.last_heartbeats([host.id])[host.id].progress == Progress(message=NASTY)
    assert store.acquire_lease(NASTY, NASTY, timedelta(1), a.NOW).holder == NASTY
    store.commit(ChangeSet(deleted_pools=[NASTY]))
    assert store.pools() == []


def test_reading_changes_nothing(store):
    store.commit(
        ChangeSet(
            new_jobs=[a.job("j1"), a.job("j2", state=JobState.FAILED)],
            attempts=[a.attempt()],
            slices=[a.tpu_slice()],
            hosts=[a.host()],
            messages=[a.message()],
            events=[a.event()],
        )
    )
    before = everything(store)
    for _ in range(2):
        store.jobs_like("j")
        store.count_jobs()
        store.heartbeats_outside(a.later(100), a.later(200))
        store.token_by_hash("nobody")
        store.inbox(after=0, limit=1)
    assert everything(store) == before


# Commits.


def test_a_taken_job_id_is_a_conflict_that_names_it_and_nothing_is_written(store):
    store.commit(ChangeSet(new_jobs=[a.job("j1")], events=[a.event()]))
    before = everything(store)
    with pytest.raises(Conflict, match="'j1'"):
        store.commit(
            ChangeSet(
                new_jobs=[a.job("j2"), a.job("j1")],
                jobs=[a.job("j1", reason="changed")],
                attempts=[a.attempt("j2")],
                slices=[a.tpu_slice()],
                hosts=[a.host()],
                pools=[a.pool()],
                refusals=[a.refusal()],
                messages=[a.message("j2")],
                events=[a.event()],
            )
        )
    assert everything(store) == before


def test_an_id_twice_in_one_change_is_a_conflict(store):
    with pytest.raises(Conflict, match="'j1'"):
        store.commit(ChangeSet(new_jobs=[a.job("j1"), a.job("j1", at=1)], events=[a.event()]))
    assert store.job("j1") is None
    assert store.last_event() == 0


def test_a_rejected_commit_uses_no_numbers(store):
    store.commit(ChangeSet(new_jobs=[a.job()], events=[a.event()], messages=[a.message()]))
    with pytest.raises(Conflict):
        store.commit(ChangeSet(new_jobs=[a.job()], events=[a.event()], messages=[a.message()]))
    store.commit(ChangeSet(events=[a.event()], messages=[a.message()]))
    assert [event.seq for event in store.events(EventQuery())] == [1, 2]
    assert [message.seq for message in store.inbox()] == [1, 2]


def test_jobs_and_live_attempts_can_be_written_again(store):
    store.commit(ChangeSet(new_jobs=[a.job()], attempts=[a.attempt()]))
    running = replace(a.attempt(), state=AttemptState.RUNNING, running_at=a.later(1))
    store.commit(ChangeSet(jobs=[a.job(state=JobState.RUNNING)], attempts=[running]))
    assert store.job("j1").state is JobState.RUNNING
    assert store.attempts("j1") == [running]
    assert store.count_jobs() == {JobState.RUNNING: 1}


def test_an_ended_attempt_never_changes(store):
    store.commit(ChangeSet(new_jobs=[a.job()], attempts=[a.ended_attempt()], events=[a.event()]))
    before = everything(store)
    for changed in (a.attempt(), a.ended_attempt(message="something else")):
        with pytest.raises(Conflict, match=r"j1\.0"):
            store.commit(
                ChangeSet(
                    jobs=[a.job(reason="changed")],
                    attempts=[a.attempt("j1", 1), changed],
                    events=[a.event()],
                )
            )
        assert everything(store) == before


TRANSITIONS = {
    "a job that ended": (
        ChangeSet(new_jobs=[a.job(state=JobState.FAILED)]),
        ChangeSet(jobs=[a.job(state=JobState.RUNNING)]),
        "job 'j1' cannot go from failed to running",
    ),
    "a job back to the queue": (
        ChangeSet(new_jobs=[a.job(state=JobState.RUNNING)]),
        ChangeSet(jobs=[a.job(state=JobState.QUEUED)]),
        "job 'j1' cannot go from running to queued",
    ),
    "an attempt that was stopping": (
        ChangeSet(attempts=[a.attempt(state=AttemptState.STOPPING)]),
        ChangeSet(attempts=[a.attempt(state=AttemptState.RUNNING)]),
        "attempt 'j1.0' cannot go from stopping to running",
    ),
    "a slice that is gone": (
        ChangeSet(slices=[a.tpu_slice(state=SliceState.GONE)]),
        ChangeSet(slices=[a.tpu_slice(state=SliceState.READY)]),
        "slice 's1' cannot go from gone to ready",
    ),
}


@pytest.mark.parametrize(
    ("stored", "change", "message"), TRANSITIONS.values(), ids=TRANSITIONS.keys()
)
def test_a_transition_that_the_lifecycle_forbids_is_a_conflict(store, stored, change, message):
    store.commit(stored)
    before = everything(store)
    with pytest.raises(Conflict, match=re.escape(message)):
        store.commit(replace(change, events=[a.event()]))
    assert everything(store) == before


def test_one_commit_may_hold_several_transitions(store):
    store.commit(ChangeSet(new_jobs=[a.job()], slices=[a.tpu_slice()]))
    ended = a.job(state=JobState.SUCCEEDED)
    gone = a.tpu_slice(state=SliceState.GONE)
    store.commit(ChangeSet(jobs=[ended], slices=[gone]))
    assert store.job("j1") == ended and store.slice("s1") == gone


def test_writing_the_same_ended_attempt_again_is_no_change(store):
    store.commit(ChangeSet(attempts=[a.ended_attempt()]))
    store.commit(ChangeSet(attempts=[a.ended_attempt()], events=[a.event()]))
    assert store.attempts("j1") == [a.ended_attempt()]
    assert store.last_event() == 1


def test_an_ended_attempt_cannot_be_revived_within_one_change_set(store):
    store.commit(ChangeSet(attempts=[a.attempt(), a.ended_attempt()]))
    assert store.attempt("j1.0") == a.ended_attempt()
    with pytest.raises(Conflict):
        store.commit(ChangeSet(attempts=[a.ended_attempt("j2"), a.attempt("j2")]))
    assert store.attempt("j2.0") is None


def test_an_empty_change_is_fine(store):
    before = everything(store)
    store.commit(ChangeSet())
    assert everything(store) == before


# Finding jobs.


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, ["j5", "j4", "j3", "j2", "j1"]),
        ({"owner": "bob"}, ["j5", "j3"]),
        ({"states": frozenset({JobState.RUNNING, JobState.FAILED})}, ["j4", "j2"]),
        ({"pool": "spot"}, ["j4"]),
        ({"tag": "big"}, ["j3", "j1"]),
        ({"tag": "bi"}, []),
        ({"tag": "BIG"}, []),
        ({"name": "evaluate"}, ["j5"]),
        ({"name": "eval"}, []),
        ({"parent": "j1"}, ["j2"]),
        ({"tag": "big", "owner": "ada", "states": frozenset({JobState.QUEUED})}, ["j1"]),
        ({"limit": 2}, ["j5", "j4"]),
        ({"limit": 2, "before": "j4"}, ["j3", "j2"]),
        ({"owner": "bob", "before": "j5"}, ["j3"]),
        ({"owner": "bob", "before": "j4"}, ["j3"]),
        ({"before": "nosuch"}, []),
    ],
    ids=[
        "nothing",
        "owner",
        "states",
        "pool",
        "tag",
        "part-of-tag",
        "tag-in-capitals",
        "name",
        "part-of-name",
        "parent",
        "three-at-once",
        "limit",
        "second-page",
        "owner-after",
        "owner-after-anothers-job",
        "after-no-such-job",
    ],
)
def test_jobs_are_found_newest_first_by(store, query, expected):
    store.commit(
        ChangeSet(
            new_jobs=[
                a.job("j1", at=1, tags=("big", "blue")),
                a.job("j2", at=2, state=JobState.RUNNING, parent="j1"),
                a.job("j3", at=3, owner="bob", tags=("big",)),
                a.job("j4", at=4, state=JobState.FAILED, pool="spot"),
                a.job("j5", at=5, owner="bob", called="evaluate"),
            ]
        )
    )
    assert ids(store.jobs(JobQuery(**query))) == expected


def test_archived_jobs_are_listed_only_on_request(store):
    ended = {"state": JobState.FAILED}
    store.commit(ChangeSet(new_jobs=[a.job(f"j{n}", at=n, **ended) for n in range(1, 5)]))
    store.archive(["j1", "j3"])
    store.archive(["j3"])
    assert ids(store.jobs(JobQuery())) == ["j4", "j2"]
    assert ids(store.jobs(JobQuery(limit=1, before="j3"))) == ["j2"]
    assert ids(store.jobs(JobQuery(archived=True))) == ["j3", "j1"]
    assert ids(store.jobs(JobQuery(archived=None))) == ["j4", "j3", "j2", "j1"]
    assert ids(store.jobs(JobQuery(states=frozenset(JobState)))) == ["j4", "j2"]
    store.unarchive(["j3", "j4"])
    assert ids(store.jobs(JobQuery())) == ["j4", "j3", "j2"]
    assert store.job("j1").state is JobState.FAILED, "all that is known of it stays"


def test_jobs_whose_files_are_deleted_are_archived_too(store):
    ended = {"state": JobState.FAILED}
    store.commit(ChangeSet(new_jobs=[a.job(f"j{n}", at=n, **ended) for n in range(1, 4)]))
    store.archive(["j2"])
    store.mark_files_deleted(["j1"], a.later(60))
    store.mark_files_deleted(["j1"], a.later(3600))
    assert [store.files_deleted_at(f"j{n}") for n in range(1, 4)] == [a.later(60), None, None]
    assert ids(store.jobs(JobQuery())) == ["j3"]
    assert ids(store.jobs(JobQuery(archived=None, having=FileKind.FILES))) == ["j3", "j2"]


def test_jobs_of_one_moment_are_ordered_by_id_by_code_point(store):
    names = ["a", "B", "_", "é", "z", "Z", "10", "9", "\U0001f989", "\uffee"]
    store.commit(ChangeSet(new_jobs=[a.job(name) for name in names]))
    assert ids(store.jobs(JobQuery())) == sorted(names, reverse=True)


def test_pages_have_no_gaps_or_repeats_while_jobs_are_added(store):
    first = [f"j{number:02}" for number in range(25)]
    # Several share a moment, so that a page can end among equals.
    store.commit(
        ChangeSet(new_jobs=[a.job(name, at=number // 4) for number, name in enumerate(first)])
    )
    seen, before = [], None
    while page := store.jobs(JobQuery(limit=4, before=before)):
        seen += ids(page)
        before = page[-1].id
        store.commit(ChangeSet(new_jobs=[a.job(f"n{len(seen)}", at=100 + len(seen))]))
    assert seen == sorted(first, reverse=True)


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("ab", ["ab2", "ab1", "x1"]),
        ("ab1", ["ab1"]),
        ("", ["zz", "ab2", "ab1", "x1"]),
        ("a%", []),
        ("a_", []),
        ("AB", []),
        ("zz\U0010ffff", ["zz"]),
    ],
    ids=ascii,
)
def test_jobs_like_matches_the_start_of_id_or_name(store, prefix, expected):
    store.commit(
        ChangeSet(
            new_jobs=[
                a.job("x1", at=1, called="abacus"),
                a.job("ab1", at=2),
                a.job("ab2", at=3),
                a.job("zz", at=4, called="zz\U0010ffffz"),
            ]
        )
    )
    assert ids(store.jobs_like(prefix)) == expected
    assert ids(store.jobs_like(prefix, limit=1)) == expected[:1]


def test_jobs_are_counted_by_state(store):
    states = [JobState.QUEUED, JobState.QUEUED, JobState.FAILED]
    store.commit(
        ChangeSet(new_jobs=[a.job(f"j{n}", state=state) for n, state in enumerate(states)])
    )
    assert store.count_jobs() == {JobState.QUEUED: 2, JobState.FAILED: 1}


def test_jobs_listed_twice_show_what_changed_in_between(store):
    store.commit(ChangeSet(new_jobs=[a.job(f"j{n}") for n in range(4)]))
    store.jobs(JobQuery())
    store.commit(ChangeSet(jobs=[a.job("j2", reason="changed")], new_jobs=[a.job("j4")]))
    reasons = [job.reason for job in store.jobs(JobQuery())]
    assert reasons == ["submitted", "submitted", "changed", "submitted", "submitted"]


def test_more_rows_than_the_cache_holds_are_decoded():
    decode = sql_rows.CachingDecoder(Job, max_size=3)
    jobs = [a.job(f"j{number}") for number in range(5)]
    for size in (2, 5, 3, 5, 0):
        assert decode([(sql_rows.to_text(job),) for job in jobs[:size]]) == jobs[:size]


# Attempts, slices, hosts, pools.


def test_attempts_are_listed_by_number(store):
    store.commit(ChangeSet(attempts=[a.attempt(number=n) for n in (10, 2, 0)]))
    store.commit(ChangeSet(attempts=[a.attempt("other")]))
    assert [each.number for each in store.attempts("j1")] == [0, 2, 10]


def test_the_newest_attempt_of_many_jobs_is_found_at_once(store):
    names = [f"j{number}" for number in range(2_000)]
    store.commit(ChangeSet(attempts=[a.attempt(name, n) for name in names[::2] for n in (1, 0)]))
    store.commit(ChangeSet(attempts=[a.attempt("j0", 10), a.attempt("j0", 9)]))
    expected = store.newest_attempts(names)
    assert expected == {name: a.attempt(name, 1) for name in names[::2]} | {
        "j0": a.attempt("j0", 10)
    }
    assert store.newest_attempts([]) == {}


def test_many_jobs_and_all_of_their_attempts_are_found_at_once(store):
    names = [f"j{number}" for number in range(2_000)]
    store.commit(ChangeSet(new_jobs=[a.job(name) for name in names[:-1]]))
    store.commit(ChangeSet(attempts=[a.attempt(name, n) for name in names[::2] for n in (1, 0)]))
    assert store.find_jobs(names) == {name: a.job(name) for name in names[:-1]}
    assert store.attempts_of(names) == {
        name: [a.attempt(name, 0), a.attempt(name, 1)] for name in names[::2]
    }
    assert store.find_jobs([]) == {} and store.attempts_of([]) == {}


def test_slices_are_listed_oldest_first_without_those_that_are_gone(store):
    store.commit(
        ChangeSet(
            slices=[
                a.tpu_slice("s3", at=3, pool="spot"),
                a.tpu_slice("s1", at=1, job_id="j1", state=SliceState.RELEASING),
                a.tpu_slice("s2", at=2, job_id="j1", pool="spot", state=SliceState.GONE),
            ]
        )
    )
    assert [each.id for each in store.slices()] == ["s1", "s3"]
    assert [each.id for each in store.slices(live_only=False)] == ["s1", "s2", "s3"]
    assert [each.id for each in store.slices(live_only=False, pool="spot")] == ["s2", "s3"]
    assert [each.id for each in store.slices(job_id="j1")] == ["s1"]


def test_hosts_are_listed_by_index(store):
    store.commit(ChangeSet(hosts=[a.host(index=n) for n in (10, 2, 0)] + [a.host("s2")]))
    assert [each.index for each in store.hosts("s1")] == [0, 2, 10]


def test_pools_are_put_changed_and_deleted(store):
    store.commit(ChangeSet(pools=[a.pool("b"), a.pool("a")]))
    store.commit(ChangeSet(pools=[a.pool("b", smallest=2)]))
    assert store.pools() == [a.pool("a"), a.pool("b", smallest=2)]
    store.commit(ChangeSet(deleted_pools=["b", "nosuch"]))
    assert store.pools() == [a.pool("a")]


def test_a_refusal_replaces_the_one_for_the_same_capacity(store):
    store.commit(ChangeSet(refusals=[a.refusal("z1"), a.refusal("z2")]))
    store.commit(ChangeSet(refusals=[a.refusal("z1", streak=2)]))
    assert store.refusals() == [a.refusal("z1", streak=2), a.refusal("z2")]


def test_the_live_state_holds_exactly_what_has_not_ended(store):
    live_job, done_job = (
        a.job("j1", state=JobState.RECOVERING),
        a.job("j2", state=JobState.SUCCEEDED),
    )
    store.commit(
        ChangeSet(
            new_jobs=[live_job, done_job],
            attempts=[a.ended_attempt("j1", 0), a.attempt("j1", 1), a.ended_attempt("j2", 0)],
            slices=[
                a.tpu_slice("s1"),
                a.tpu_slice("s2", state=SliceState.GONE),
                a.tpu_slice("s3", at=1, state=SliceState.RELEASING),
            ],
            hosts=[a.host("s1", 1), a.host("s1", 0), a.host("s2"), a.host("s3")],
            pools=[a.pool()],
            refusals=[a.refusal()],
        )
    )
    assert store.live() == LiveState(
        jobs=[live_job],
        attempts=[a.ended_attempt("j1", 0), a.attempt("j1", 1)],
        slices=[a.tpu_slice("s1"), a.tpu_slice("s3", at=1, state=SliceState.RELEASING)],
        hosts=[a.host("s1", 0), a.host("s1", 1), a.host("s3")],
        pools=[a.pool()],
        refusals=[a.refusal()],
    )


def test_ended_objects_leave_the_live_state(store):
    store.commit(
        ChangeSet(
            new_jobs=[a.job()], attempts=[a.attempt()], slices=[a.tpu_slice()], hosts=[a.host()]
        )
    )
    store.commit(
        ChangeSet(
            jobs=[a.job(state=JobState.CANCELLED)],
            attempts=[a.ended_attempt()],
            slices=[a.tpu_slice(state=SliceState.GONE)],
        )
    )
    live = store.live()
    assert (live.jobs, live.attempts, live.slices, live.hosts) == ([], [], [], [])


# Events and the inbox.


def test_old_events_are_deleted_except_those_of_live_jobs(store):
    live, ended = a.job("live"), a.job("ended", state=JobState.FAILED, ended_at=a.NOW)
    store.commit(ChangeSet(new_jobs=[live, ended]))
    for number in range(3):
        at = a.NOW + timedelta(days=number)
        events = [replace(a.event(job_id=job_id), at=at) for job_id in ("live", "ended", None)]
        store.commit(ChangeSet(events=events))
    assert store.delete_events(a.NOW) == 0
    assert store.delete_events(a.NOW + timedelta(days=1)) == 2
    assert [event.seq for event in store.events(EventQuery())] == [1, 4, 5, 6, 7, 8, 9]
    assert [event.seq for event in store.events(EventQuery(after=3, limit=2))] == [4, 5]
    assert store.delete_events(a.NOW + timedelta(days=9)) == 4
    assert [event.seq for event in store.events(EventQuery())] == [1, 4, 7]
    store.commit(ChangeSet(events=[a.event()]))
    assert store.last_event() == 10


def test_events_are_numbered_from_one_in_the_order_of_commits(store):
    store.commit(ChangeSet(events=[a.event("one"), a.event("two")]))
    store.commit(ChangeSet(events=[a.event("three")]))
    assert [(each.seq, each.message) for each in store.events(EventQuery())] == [
        (1, "one"),
        (2, "two"),
        (3, "three"),
    ]
    assert store.last_event() == 3


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"after": 4}, [5, 6]),
        ({"after": 6}, []),
        ({"limit": 2}, [1, 2]),
        ({"limit": 2, "newest": True}, [5, 6]),
        ({"limit": 9, "newest": True}, [1, 2, 3, 4, 5, 6]),
        ({"job_id": "j1"}, [1, 3, 5]),
        ({"job_id": "j1", "after": 1, "limit": 1}, [3]),
        ({"job_id": "j1", "limit": 2, "newest": True}, [3, 5]),
        ({"slice_id": "s1"}, [2, 3]),
        ({"job_id": "j1", "slice_id": "s1"}, [3]),
        ({"pool": "lab"}, [4, 6]),
        ({"pool": "lab", "limit": 1, "newest": True}, [6]),
        ({"pool": "none"}, []),
        ({"by": "ada"}, [5]),
        ({"by": "ada", "job_id": "j2"}, []),
        ({"reservation": "r1"}, [6]),
        ({"reservation": "r2"}, []),
    ],
    ids=str,
)
def test_events_are_found_oldest_first_by(store, query, expected):
    store.commit(
        ChangeSet(
            events=[
                a.event(job_id="j1"),
                a.event(slice_id="s1"),
                a.event(job_id="j1", slice_id="s1"),
                a.event(job_id="j2", pool="lab"),
                a.event(job_id="j1", by="ada"),
                a.event(pool="lab", data={"reservation": "r1"}),
            ]
        )
    )
    assert [event.seq for event in store.events(EventQuery(**query))] == expected


def test_the_inbox_holds_messages_in_order_until_they_are_consumed(store):
    heartbeat = Heartbeat(
        host_id="s1/0",
        boot="b",
        at=a.NOW,
        address="h0",
        coordinator_port=1,
        progress=Progress(step=3, metrics={"loss": 0.5}),
    )
    store.commit(ChangeSet(messages=[a.message("j1"), a.message("j2")]))
    store.commit(
        ChangeSet(messages=[a.message(kind=InboxMessageKind.HEARTBEAT, heartbeat=heartbeat)])
    )
    assert [(each.seq, each.job_id) for each in store.inbox()][:2] == [(1, "j1"), (2, "j2")]
    assert store.inbox(after=2)[0].heartbeat == heartbeat
    assert [each.seq for each in store.inbox(limit=2)] == [1, 2]
    store.commit(ChangeSet(consumed=[2, 99]))
    assert [each.seq for each in store.inbox()] == [1, 3]


def test_a_number_in_the_inbox_is_never_used_again(store):
    store.commit(ChangeSet(messages=[a.message(), a.message()]))
    store.commit(ChangeSet(consumed=[1, 2]))
    store.commit(ChangeSet(messages=[a.message()]))
    assert [each.seq for each in store.inbox()] == [3]


def test_a_rejected_change_consumes_nothing(store):
    store.commit(ChangeSet(new_jobs=[a.job()], messages=[a.message()]))
    with pytest.raises(Conflict):
        store.commit(ChangeSet(new_jobs=[a.job()], consumed=[1]))
    assert [each.seq for each in store.inbox()] == [1]


# Signs of life.


def report(at, attempt=None, step=None, host="s1/0"):
    progress = None if step is None else Progress(step=step, at=a.later(at))
    return HostLiveness(host_id=host, seen_at=a.later(at), attempt_id=attempt, progress=progress)


def test_the_last_liveness_report_wins(store):
    store.record_heartbeats([report(1, "j1.0", 5), report(1, host="s1/1")])
    store.record_heartbeats([report(2.000001, "j1.0", 6)])
    assert store.last_heartbeats(["s1/0", "s1/1", "s1/2"]) == {
        "s1/0": report(2.000001, "j1.0", 6),
        "s1/1": report(1, host="s1/1"),
    }


def test_a_report_without_progress_keeps_that_of_the_same_attempt(store):
    store.record_heartbeats([report(1, "j1.0", 5), report(2, "j1.0")])
    assert store.last_heartbeats(["s1/0"])["s1/0"] == replace(
        report(1, "j1.0", 5), seen_at=a.later(2)
    )


@pytest.mark.parametrize("attempt", ["j1.1", None])
def test_a_report_for_another_attempt_clears_the_progress(store, attempt):
    store.record_heartbeats([report(1, "j1.0", 5)])
    store.record_heartbeats([report(2, attempt)])
    assert store.last_heartbeats(["s1/0"])["s1/0"] == report(2, attempt)


def test_the_last_liveness_report_wins_after_a_clock_was_set_back(store):
    store.record_heartbeats([report(5, "j1.0", 5)])
    store.record_heartbeats([report(3, "j1.0")])
    assert store.last_heartbeats(["s1/0"])["s1/0"].seen_at == a.later(3)


def test_liveness_of_a_host_that_reports_any_text_is_readable(store):
    """What one host reports must not keep the liveness of others from being read."""
    reports = [
        HostLiveness(host_id=f"s1/{index}", seen_at=a.NOW, attempt_id=text)
        for index, text in enumerate(
            ["\x1e", "\x1f\x1f", "a\x1eb\x1fc", "'\"\\", None, "j1.0", "a\0b"]
        )
    ]
    store.record_heartbeats(reports)
    found = store.last_heartbeats([report.host_id for report in reports])
    assert found.keys() == {report.host_id for report in reports}
    assert found["s1/5"].attempt_id == "j1.0" and found["s1/4"].attempt_id is None


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_name_that_no_index_holds_is_not_taken_for_an_outage(kind, tmp_path):
    url = f"sqlite:///{tmp_path}/fleet.db" if kind == "sqlite" else postgres.fresh_url()
    with contextlib.closing(open_store(url)) as store:
        with contextlib.suppress(BadInput):
            store.put_object(a.random_text(20_000), b"", a.NOW)
        store.put_object("short", b"", a.NOW)


def test_usage_is_what_was_there_at_some_time_of_a_span(store):
    gone = {"state": SliceState.GONE}
    ended = {"state": AttemptState.ENDED, "end_reason": EndReason.FINISHED}
    store.commit(
        ChangeSet(
            new_jobs=[a.job("j1"), a.job("j2"), a.job("j3")],
            slices=[
                a.tpu_slice("before", at=1, gone_at=a.later(5), **gone),
                a.tpu_slice("lost", at=2, lost_at=a.later(15), **gone),
                a.tpu_slice("after", at=21, job_id="j3"),
                a.tpu_slice("across", at=3, gone_at=a.later(90), **gone),
                a.tpu_slice("there", at=4, job_id="j2"),
                a.tpu_slice("never", at=5, **gone),
            ],
            attempts=[
                a.attempt("j1", 0, ended_at=a.later(9), **ended),
                a.attempt("j1", 1, ended_at=a.later(10), **ended),
                a.attempt("j1", 2),
            ],
        )
    )
    found = store.usage(a.later(10), a.later(20))
    assert [each.id for each in found.slices] == ["lost", "across", "there"]
    assert [each.id for each in found.attempts] == ["j1.1", "j1.2"]
    assert found.job_ids == ["j1", "j2"]
    assert [each.id for each in store.usage(None, a.later(2)).slices] == ["before", "lost"]
    assert len(store.usage(None, a.later(100)).slices) == 6
    assert store.usage(None, a.later(-1)).attempts == []
    assert store.first_slice_at() == a.later(1)


def test_without_slices_nothing_was_used(store):
    assert store.first_slice_at() is None
    assert store.usage(None, a.NOW) == Usage(slices=[], attempts=[])


def test_liveness_outside_a_period_is_that_of_slices_still_there(store):
    store.commit(
        ChangeSet(
            slices=[
                a.tpu_slice("s1"),
                a.tpu_slice("s2", state=SliceState.GONE),
                a.tpu_slice("s3", state=SliceState.DOOMED),
            ],
            hosts=[a.host("s1", 0), a.host("s1", 1), a.host("s1", 2), a.host("s2"), a.host("s3")],
        )
    )
    store.record_heartbeats(
        [
            report(1, host="s1/0"),
            report(5, host="s1/1"),
            report(1, host="s2/0"),
            report(2, host="s3/0"),
            report(1, host="unknown/0"),
        ]
    )  # and s1/2 never called: it may still be booting
    one, two, five = a.later(1), a.later(2), a.later(5)
    assert store.heartbeats_outside(five, five) == {"s1/0": one, "s3/0": two}
    assert store.heartbeats_outside(a.later(6), a.later(7)) == {
        "s1/0": one,
        "s1/1": five,
        "s3/0": two,
    }
    assert store.heartbeats_outside(one, two) == {"s1/1": five}
    assert store.heartbeats_outside(one, five) == {}


def test_liveness_is_counted_and_deleted(store):
    store.record_heartbeats([report(n, host=f"s1/{n}") for n in range(1200)])
    assert store.count_seen_hosts(a.later(1000)) == 200
    hosts = [f"s1/{n}" for n in range(1200)]
    assert len(store.last_heartbeats(hosts)) == 1200
    store.delete_heartbeats([*hosts[:1100], "nosuch"])
    assert sorted(store.last_heartbeats(hosts)) == sorted(hosts[1100:])
    store.record_heartbeats([])
    store.delete_heartbeats([])


# Who speaks for a host.


def test_the_first_agent_stays_bound_until_liveness_is_deleted(store):
    assert store.register_agent("s1/0", "first") == "first"
    assert store.register_agent("s1/0", "second") == "first"
    assert store.register_agent("s1/1", "second") == "second"
    store.delete_heartbeats(["s1/0", "nosuch/0"])
    assert store.register_agent("s1/0", "third") == "third"
    assert store.register_agent("s1/1", "third") == "second"


# Errands.


def sent(command_id, at=0, command=("date",)):
    return SentHostCommand(
        host_command=HostCommand(id=command_id, kind=HostCommandKind.COMMAND, command=command),
        slice_id="s1",
        hosts=("s1/0", "s1/1"),
        sent_at=a.later(at),
    )


def answered(host, output="", at=0):
    return HostCommandResult(host_id=host, status=0, output=output, at=a.later(at))


def test_a_host_command_is_inserted_once(store):
    assert store.put_host_command(sent("e1")) == sent("e1")
    assert store.put_host_command(sent("e1", command=("rm",))) == sent("e1")
    assert store.host_command("e1") == sent("e1")
    assert store.host_command("e2") is None


def test_host_commands_are_listed_oldest_first_with_their_results(store):
    for each in (sent("e1", at=2), sent("e3", at=1), sent("e2", at=1)):
        store.put_host_command(each)
    assert [each.host_command.id for each in store.host_commands()] == ["e2", "e3", "e1"]
    assert store.host_command_results(["e1", "e2"]) == {}
    store.put_host_command_result("e1", answered("s1/1"))
    store.put_host_command_result("e1", answered("s1/0", "first"))
    store.put_host_command_result("e1", answered("s1/0", "second"))
    store.put_host_command_result("e3", answered("s1/0"))
    assert store.host_command_results(["e1", "e2"]) == {
        "e1": [answered("s1/0", "first"), answered("s1/1")]
    }


def test_deleting_a_host_command_deletes_its_results_and_no_others(store):
    for each in ("e1", "e2"):
        store.put_host_command(sent(each))
        store.put_host_command_result(each, answered("s1/0"))
    store.delete_host_commands(["e1", "nosuch"])
    assert store.host_commands() == [sent("e2")]
    assert store.host_command_results(["e1", "e2"]) == {"e2": [answered("s1/0")]}


# People and facts.


def test_users_are_put_changed_and_listed_by_name(store):
    store.put_user(a.user("bob"))
    store.put_user(a.user("ada"))
    store.put_user(a.user("bob", Role.ADMIN))
    assert store.users() == [a.user("ada"), a.user("bob", Role.ADMIN)]
    assert store.user("bob").role is Role.ADMIN
    assert store.user("eve") is None


def test_deleting_a_user_deletes_their_tokens_and_no_others(store):
    store.put_user(a.user("ada"))
    store.put_user(a.user("bob"))
    store.put_token(a.token("t1", of="ada", digest="d1"))
    store.put_token(a.token("t2", of="bob", digest="d2"))
    store.delete_user("ada")
    store.delete_user("nosuch")
    assert store.users() == [a.user("bob")]
    assert store.token_by_hash("d1") is None
    assert store.tokens() == [a.token("t2", of="bob", digest="d2")]


@pytest.mark.parametrize("jobs", [0, 1, 2000])
def test_a_change_that_requires_a_user_is_refused_once_they_are_deleted(store, jobs):
    store.put_user(a.user("ada"))
    first, second = ([a.job(f"{name}{n}") for n in range(jobs)] for name in "ab")
    store.commit(ChangeSet(new_jobs=first, events=[a.event()], required_user="ada"))
    store.delete_user("ada")
    with pytest.raises(Conflict, match="user ada was deleted"):
        store.commit(ChangeSet(new_jobs=second, events=[a.event()], required_user="ada"))
    assert len(store.jobs(JobQuery(limit=10_000))) == jobs
    assert store.last_event() == 1


OWNED = {
    "token": lambda store: store.put_token(a.token("t1", of="ada")),
    "object": lambda store: store.put_object("x", b"new", a.NOW, required_user="ada"),
    "replaced object": lambda store: store.put_object(
        "x", b"new", a.NOW, replace=True, required_user="ada"
    ),
    "document": lambda store: store.update_document(
        Preferences, "ada", lambda _: Preferences(owner="ada"), required_user="ada"
    ),
}


@pytest.mark.parametrize("write", OWNED.values(), ids=OWNED)
def test_what_belongs_to_a_user_is_refused_once_they_are_deleted(store, write):
    store.put_user(a.user("ada"))
    store.put_user(a.user("bob"))
    write(store)
    store.delete_user("ada")
    store.delete_objects(["x"])
    store.update_document(Preferences, "ada", lambda _: None)
    with pytest.raises(Conflict, match="user ada was deleted"):
        write(store)
    assert (store.tokens(), store.objects("x"), store.documents(Preferences)) == ([], [], [])


def test_a_new_object_above_the_limit_of_its_prefix_is_refused(store):
    store.put_user(a.user("ada"))
    put = functools.partial(
        store.put_object, at=a.NOW, replace=True, required_user="ada", limit=("own/ada/", 2)
    )
    assert put("own/ada/1", b"1") and put("own/ada/2", b"2")
    assert not put("own/ada/3", b"3")
    assert put("own/ada/2", b"changed")
    assert [each.name for each in store.objects("own/")] == ["own/ada/1", "own/ada/2"]
    assert store.read_objects(["own/ada/2"]) == {"own/ada/2": b"changed"}
    store.delete_objects(["own/ada/1"])
    assert put("own/ada/3", b"3")


def test_tokens_are_found_by_hash_listed_oldest_first_and_deleted(store):
    first, second = a.token("t2", digest="d1", at=1), a.token("t1", digest="d2", at=2)
    other = a.token("t0", of="bob", digest="d3", at=3)
    for name in ("ada", "bob"):
        store.put_user(a.user(name))
    for each in (other, second, first):
        store.put_token(each)
    used = replace(first, last_used_at=a.later(9))
    store.put_token(used)
    assert store.token_by_hash("d1") == used
    assert store.tokens() == [used, second, other]
    assert store.tokens("ada") == [used, second]
    assert store.token_and_user("d3") == (other, a.user("bob"))
    store.delete_token("t2")
    assert store.token_by_hash("d1") is None
    assert store.token_and_user("d1") is None


def test_metadata_is_kept_if_it_is_not_to_be_replaced(store):
    store.put_metadata("key", "first", replace=False)
    store.put_metadata("key", "second", replace=False)
    assert store.metadata("key") == "first"


def test_metadata_is_stored_and_replaced(store):
    store.put_metadata("fleet", "one")
    store.put_metadata("fleet", "two")
    assert store.metadata("fleet") == "two"


# Opening.


@pytest.mark.parametrize(
    "url", ["", "memory", "sqlite://", "sqlite:///", "mysql://root:pw@host/db", "/tmp/fleet.db"]
)
def test_an_unknown_store_url_is_rejected_without_showing_its_password(url):
    with pytest.raises(BadInput, match="postgresql://") as refusal:
        open_store(url)
    assert "pw" not in str(refusal.value)


def test_audit_entries_are_numbered_and_read_newest_first(store):
    def entry(actor: str, target: str) -> AuditEntry:
        return AuditEntry(
            at=a.later(1), actor=actor, token_id=f"token-of-{actor}", address="10.0.0.1",
            action=AuditAction.PUT_USER, target=target,
        )  # fmt: skip

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: store.append_audit(entry("ada", f"u{n}")), range(20)))
    store.append_audit(entry("bob", "last"))
    entries = store.audit(limit=100)
    assert [each.seq for each in entries] == list(range(21, 0, -1))
    assert {each.target for each in entries[1:]} == {f"u{n}" for n in range(20)}
    assert [each.target for each in store.audit(actor="bob")] == ["last"]
    assert [each.seq for each in store.audit(before=4, limit=2)] == [3, 2]
    store.append_audit(entry("ada", "token-of-bob"))
    assert [each.seq for each in store.audit(token="token-of-bob")] == [22, 21]
    assert [each.seq for each in store.audit(token="token-of-bob", before=22)] == [21]


def test_objects_are_created_once_replaced_and_listed_by_prefix(store):
    assert store.put_object("logs/a/02", b"\0two\xff", a.later(2))
    assert store.put_object("logs/a/01", b"one", a.later(1))
    assert store.put_object("logs/b/01", b"", a.NOW)
    assert not store.put_object("logs/a/01", b"other", a.later(9))
    listed = [(each.name, each.size, each.at) for each in store.objects("logs/a/")]
    assert listed == [("logs/a/01", 3, a.later(1)), ("logs/a/02", 5, a.later(2))]
    assert store.read_objects(["logs/a/01", "logs/a/02", "none"]) == {
        "logs/a/01": b"one",
        "logs/a/02": b"\0two\xff",
    }
    assert store.put_object("logs/a/01", b"new", a.later(3), replace=True)
    assert store.read_objects(["logs/a/01"]) == {"logs/a/01": b"new"}
    store.delete_objects(["logs/a/01", "none"])
    assert [each.name for each in store.objects("logs/")] == ["logs/a/02", "logs/b/01"]


@pytest.mark.parametrize(
    ("since", "expected"),
    [("l/0", ["l/1", "l/3", "l/5"]), ("l/1", ["l/1", "l/3", "l/5"]), ("l/4", ["l/3", "l/5"]),
     ("l/9", ["l/5"]), ("z", ["l/5"])],
)  # fmt: skip
def test_objects_are_listed_from_the_one_that_contains_a_position(store, since, expected):
    for name in ("k/9", "l/1", "l/3", "l/5", "m/1"):
        store.put_object(name, b"x", a.NOW)
    assert [each.name for each in store.objects("l/", since)] == expected


def test_one_of_several_writers_creates_an_object(store):
    with ThreadPoolExecutor(8) as threads:
        created = list(
            threads.map(
                lambda writer: store.put_object("x", str(writer).encode(), a.NOW), range(16)
            )
        )
    assert created.count(True) == 1
    assert store.read_objects(["x"])["x"] == str(created.index(True)).encode()
