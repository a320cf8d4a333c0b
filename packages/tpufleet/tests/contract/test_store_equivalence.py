"""SQLite gives the same results as plain Python for any sequence of operations."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from datetime import timedelta

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.contract import store_builders as a
from tests.contract.fake_store import FakeStore
from tpufleet.errors import FleetError
from tpufleet.model.fleet.hosts import HostLiveness, Progress
from tpufleet.model.fleet.slices import SliceState
from tpufleet.model.job.attempts import AttemptState
from tpufleet.model.job.job_edits import JobEdit
from tpufleet.model.job.job_search import parse_search
from tpufleet.model.job.jobs import JobState
from tpufleet.model.job.metric_points import MetricPoint
from tpufleet.stores.base import ChangeSet, EventQuery, JobQuery
from tpufleet.stores.open_store import open_store

names = st.sampled_from(["a", "ab", "B", "é", "'", "🦉"])
moments = st.integers(0, 3)
people = st.sampled_from(["ada", "bob"])
maybe = lambda strategy: st.none() | strategy
few = lambda strategy: st.lists(strategy, max_size=3)

jobs = st.builds(
    # All that never changes follows from the id.
    lambda name, state: a.job(
        name,
        at=len(name),
        owner="ada" if name < "b" else "bob",
        called=name[::-1],
        tags=(name, "all"),
        state=state,
    ),
    names,
    st.sampled_from(JobState),
)
attempts = st.builds(
    lambda name, number, state, message: replace(
        a.attempt(name, number), state=state, message=message
    ),
    names,
    st.integers(0, 2),
    st.sampled_from(AttemptState),
    st.sampled_from(["", "x"]),
)
slices = st.builds(
    lambda name, at, state, job: a.tpu_slice(name, at=at, state=state, job_id=job),
    names,
    moments,
    st.sampled_from(SliceState),
    maybe(names),
)
hosts = st.builds(a.host, names, st.integers(0, 2))
events = st.builds(
    lambda job, tpu_slice: a.event(job_id=job, slice_id=tpu_slice), maybe(names), maybe(names)
)
edits = st.builds(
    JobEdit,
    job_id=names,
    name=maybe(st.sampled_from(["x", "y_%"])),
    tags=maybe(st.sampled_from([(), ("T", "all"), ("é",)])),
    notes=maybe(st.sampled_from(["", "100% Ünïcode"])),
    held_by=maybe(st.sampled_from(["", "ada"])),
)
terms = st.sampled_from(
    ["owner:me", "owner:B*", "tag:all", "tag:t", "tag:?", "-tag:*", "x", "100%", "_", "ünï", "é",
     "state:live", "-state:ended,queued", "name:y*", "-name:x", "loss<1", "-loss>=1", "step!=2",
     "since:2026-01-01T00:00:02", "until:2026-01-01T00:00:02", "pool:lab", "-pool:lab", "id:a*",
     "train", "hon tr", "0% ünï", "TRAINS", "owner:ada,bob", "state:ended", "state:failed,running"]
)  # fmt: skip
searches = st.lists(terms, min_size=1, max_size=3).map(
    lambda parts: parse_search(" ".join(parts), caller="ada", now=a.NOW)
)
points = st.builds(
    MetricPoint,
    job_id=names,
    at=moments.map(a.later),
    step=maybe(moments),
    values=st.dictionaries(st.just("loss"), st.sampled_from([0.5, 1.0])),
)
changes = st.builds(
    ChangeSet,
    edits=few(edits),
    new_jobs=few(jobs),
    jobs=few(jobs),
    attempts=few(attempts),
    slices=few(slices),
    hosts=few(hosts),
    refusals=few(st.builds(a.refusal, names, streak=moments)),
    pools=few(st.builds(a.pool, names)),
    deleted_pools=few(names),
    messages=few(st.builds(a.message, names)),
    consumed=few(st.integers(1, 9)),
    events=few(events),
)
heartbeats = st.builds(
    lambda host, at, attempt, step: HostLiveness(
        host_id=host.id,
        seen_at=a.later(at),
        attempt_id=attempt,
        progress=None if step is None else Progress(step=step),
    ),
    hosts,
    moments,
    maybe(names),
    maybe(moments),
)


class Alike(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.stores = (FakeStore(), open_store(f"sqlite:///{self.folder.name}/fleet.db"))
        self.leases = {}

    def teardown(self):
        for store in self.stores:
            store.close()
        self.folder.cleanup()

    def same(self, ask):
        def answer(store):
            try:
                return ask(store)
            except FleetError as error:
                return type(error), str(error)

        one, two = (answer(store) for store in self.stores)
        assert one == two
        return one

    @rule(change=changes)
    def commit(self, change):
        self.same(lambda store: store.commit(change))

    @rule(change=changes, holder=people)
    def commit_with_a_lease(self, change, holder):
        if holder in self.leases:
            self.same(lambda store: store.commit(change, fence=self.leases[holder]))

    @rule(holder=people, at=st.integers(0, 30))
    def acquire(self, holder, at):
        lease = self.same(
            lambda store: store.acquire_lease("c", holder, timedelta(seconds=9), a.later(at))
        )
        if lease:
            self.leases[holder] = lease

    @rule(holder=people)
    def release(self, holder):
        if holder in self.leases:
            self.same(lambda store: store.release_lease(self.leases[holder]))

    @rule(some=few(heartbeats), forgotten=few(hosts))
    def report(self, some, forgotten):
        self.same(lambda store: store.record_heartbeats(some))
        self.same(lambda store: store.delete_heartbeats([host.id for host in forgotten]))

    @rule(name=people, digest=names, drop=st.booleans())
    def people_come_and_go(self, name, digest, drop):
        self.same(lambda store: store.put_user(a.user(name)))
        self.same(lambda store: store.put_token(a.token(digest, of=name, digest=digest)))
        if drop:
            self.same(lambda store: store.delete_user(name))
        self.same(
            lambda store: (
                store.users(),
                store.tokens(),
                store.tokens(name),
                store.token_by_hash(digest),
                store.token_and_user(digest),
            )
        )

    @rule(
        query=st.builds(
            JobQuery,
            owner=maybe(people),
            states=st.frozensets(st.sampled_from(JobState)),
            tag=maybe(names),
            name=maybe(names),
            limit=st.integers(1, 4),
            before=maybe(names),
        ),
        prefix=st.sampled_from(["", "a", "b", "é"]),
    )
    def find_jobs(self, query, prefix):
        self.same(lambda store: (store.jobs(query), store.jobs_like(prefix, 2)))

    @rule(
        search=searches,
        limit=st.integers(1, 4),
        before=maybe(names),
        archived=maybe(st.booleans()),
        owner=maybe(people),
    )
    def search_jobs(self, **query):
        self.same(lambda store: store.jobs(JobQuery(**query)))

    @rule(some=few(points), dropped=few(points))
    def report_metrics(self, some, dropped):
        self.same(lambda store: store.record_metrics(some))
        self.same(lambda store: store.delete_metric_points(dropped))
        self.same(lambda store: [store.metric_points(name) for name in ("a", "ab")])

    @rule(
        query=st.builds(
            EventQuery,
            after=st.integers(0, 9),
            job_id=maybe(names),
            slice_id=maybe(names),
            limit=st.integers(1, 4),
            newest=st.booleans(),
        )
    )
    def find_events(self, query):
        self.same(lambda store: store.events(query))

    @rule(name=names, at=moments)
    def look_up(self, name, at):
        self.same(
            lambda store: (
                store.job(name),
                store.attempts(name),
                store.newest_attempts([name, "a"]),
                store.slice(name),
                store.hosts(name),
                store.pool(name),
                store.slices(live_only=False, job_id=name),
                store.heartbeats_outside(a.later(at), a.later(at + 2)),
                store.count_seen_hosts(a.later(at)),
                store.last_heartbeats([f"{name}/{index}" for index in range(3)]),
            )
        )

    @invariant()
    def all_that_lives_is_alike(self):
        self.same(
            lambda store: (store.live(), store.inbox(), store.last_event(), store.count_jobs())
        )


TestAlike = Alike.TestCase
TestAlike.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
