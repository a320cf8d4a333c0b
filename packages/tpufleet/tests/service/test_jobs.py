"""Jobs over HTTP: submit, list, find, cancel, resume, rerun, why."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from msgspec import structs

from tests.service.harness import SPEC, ServiceHarness
from tpufleet.errors import BadInput, Conflict, Forbidden, NotFound
from tpufleet.model.api_types import JobChanges, NewJob
from tpufleet.model.fleet.hosts import HostId, HostLiveness, Progress
from tpufleet.model.fleet.pools import CapacityRefusal, Pool
from tpufleet.model.inbox import InboxMessageKind
from tpufleet.model.job.attempts import AttemptState
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import Capacity, JobId, JobState, ParentRelation
from tpufleet.model.people.users import Role, User
from tpufleet.policy.scheduling import placement
from tpufleet.stores.base import ChangeSet


def new(job_id: str, snapshot: str | None = None, **spec) -> NewJob:
    return NewJob(id=JobId(job_id), spec={**SPEC, **spec}, snapshot=snapshot)


def kinds(service: ServiceHarness) -> list[InboxMessageKind]:
    return [message.kind for message in service.store.inbox()]


def test_a_submitted_job_belongs_to_its_sender_and_reaches_the_controller(service):
    row = service.client("mel").submit([new("job-1", tags=["a"], priority=3)])[0]
    assert (row.owner, row.state, row.name, row.priority) == ("mel", JobState.QUEUED, "train", 3)
    job = service.store.job(JobId("job-1"))
    assert job.checkpoint == f"{service.folder}/checkpoints/job-1"
    assert kinds(service) == [InboxMessageKind.SUBMITTED]
    assert service.woken == 1
    events = service.client("vic").events("job-1").events
    assert [(event.state, event.by) for event in events] == [("queued", "mel")]


def test_sending_the_same_job_twice_is_one_job(service):
    first = service.client("mel").submit([new("job-1")])
    assert service.client("mel").submit([new("job-1")]) == first
    assert kinds(service) == [InboxMessageKind.SUBMITTED]


@pytest.mark.parametrize(
    ("by", "spec"), [("mel", {"priority": 9}), ("mo", {})], ids=["another spec", "another owner"]
)
def test_an_id_that_is_taken_by_another_job_is_a_conflict(service, by, spec):
    service.submit("job-1")
    with pytest.raises(Conflict, match="job-1 is in use"):
        service.client(by).submit([new("job-1", **spec)])


def test_a_job_cannot_use_a_provider_that_is_not_enabled(service):
    with pytest.raises(BadInput, match=r"gke is not allowed .*: local"):
        service.client("mel").submit([new("job-1", providers=["tpu-vm", "gke"])])
    service.submit("job-2")
    service.end_job("job-2")
    with pytest.raises(BadInput, match="gke is not allowed"):
        service.client("mel").rerun("job-2", changes={"providers": ["gke"]})
    assert service.store.job(JobId("job-1")) is None


def test_a_bulk_submit_is_all_or_nothing(service):
    bad = [new("job-1"), new("job-2", accelerator="v5e-17"), new("job-3")]
    with pytest.raises(BadInput, match=r"jobs\[1\]\.accelerator.*v5e-16"):
        service.client("mel").submit(bad)
    assert service.client("mel").jobs().jobs == ()
    assert service.store.inbox() == []


def test_a_bulk_submit_with_a_taken_id_adds_nothing(service):
    service.submit("job-2", by="mo")
    with pytest.raises(Conflict):
        service.client("mel").submit([new("job-1"), new("job-2")])
    assert service.store.job(JobId("job-1")) is None


def test_a_bulk_submit_that_was_half_known_is_completed(service):
    service.submit("job-2")
    rows = service.client("mel").submit([new("job-1"), new("job-2"), new("job-3")])
    assert [row.id for row in rows] == ["job-1", "job-2", "job-3"]
    assert kinds(service) == [InboxMessageKind.SUBMITTED] * 3


def test_the_same_id_twice_in_one_call_is_refused(service):
    with pytest.raises(BadInput, match="duplicate id"):
        service.client("mel").submit([new("job-1"), new("job-1")])


@pytest.mark.parametrize("job_id", ["", "../x", "a/b", "A", "a.b", "x" * 65, "-a", "a\0", "é"])
def test_an_id_that_could_not_be_a_folder_is_refused(shared_service, job_id):
    with pytest.raises(BadInput, match="job id"):
        shared_service.client("mel").submit([new(job_id)])


def test_a_snapshot_must_be_here_before_the_job_is(service):
    with pytest.raises(NotFound, match="upload it first"):
        service.client("mel").submit([new("job-1", snapshot="0" * 64)])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pool": "labs"}, BadInput, "did you mean lab"),
        ({"pool": "lab", "accelerator": "v5e-8"}, BadInput, "has v5e-16"),
        ({"pool": "lab", "slices": 3}, BadInput, "at most 2"),
        ({"pool": "theirs"}, Forbidden, "not a member"),
        ({"secrets": {"KEY": "hff"}}, BadInput, "did you mean hf"),
    ],
    ids=["unknown pool", "another type", "too many slices", "not a member", "unknown secret"],
)
def test_a_job_that_can_never_run_is_refused_with_the_reason(service, changes, error, message):
    pool = Pool(name="lab", provider="local", accelerator="v5litepod-16", largest=2)
    theirs = Pool(
        name="theirs", provider="local", accelerator="v5litepod-16", largest=2, members=("mo",)
    )
    service.store.commit(ChangeSet(pools=[pool, theirs]))
    service.client("mel").put_secret("hf", "x")
    with pytest.raises(error, match=message):
        service.client("mel").submit([new("job-1", **changes)])


def test_an_admin_cannot_rerun_a_job_in_a_pool_that_its_owner_may_not_use(service):
    service.submit("job-1")
    service.end_job("job-1")
    lab = Pool(name="lab", provider="local", accelerator="v5litepod-16", largest=2, members=("mo",))
    service.store.commit(ChangeSet(pools=[lab]))
    with pytest.raises(Forbidden, match="mel is not a member of pool lab"):
        service.client("ada").rerun("job-1", {"pool": "lab"})


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("owner:me", ["job-1"]),
        ("owner:mel", ["job-1"]),
        ("owner:Mel", ["job-2"]),
        ("owner:MEL", ["job-1", "job-2"]),
    ],
    ids=["me", "own name", "the other", "neither"],
)
def test_the_name_of_a_user_means_no_other_that_differs_in_case(service, query, found):
    service.submit("job-1", by="mel")
    other = User(name="Mel", role=Role.MEMBER, created_at=service.clock.now())
    service.store.put_user(other)  # an older server allowed it
    theirs = replace(service.store.job("job-1"), id="job-2", owner="Mel")
    service.store.commit(ChangeSet(new_jobs=[theirs]))
    rows = service.client("mel").jobs(query=query).jobs
    assert sorted(row.id for row in rows) == found


def test_listing_filters_and_pages(service):
    for number in range(5):
        service.clock.advance(timedelta(seconds=1))
        service.submit(f"job-{number}", tags=["odd"] if number % 2 else [])
    service.end_job("job-0")
    client = service.client("vic")
    assert [row.id for row in client.jobs(tag="odd").jobs] == ["job-3", "job-1"]
    assert [row.id for row in client.jobs(state="failed,running").jobs] == ["job-0"]
    assert len(client.jobs(state="live").jobs) == 4
    first = client.jobs(limit=2)
    assert [row.id for row in first.jobs] == ["job-4", "job-3"]
    second = client.jobs(limit=2, before=first.next)
    assert [row.id for row in second.jobs] == ["job-2", "job-1"]
    assert [row.id for row in client.all_jobs(limit=2)] == [f"job-{n}" for n in (4, 3, 2, 1, 0)]
    with pytest.raises(BadInput, match="did you mean running"):
        client.jobs(state="runing")


def test_a_row_shows_the_progress_of_process_zero_of_the_live_attempt(service):
    service.submit("job-1")
    service.add_slice("s1", "job-1")
    service.add_attempt("job-1", 0, "s1", state=AttemptState.ENDED)
    old = HostLiveness(
        host_id=HostId("s1/0"),
        seen_at=service.clock.now(),
        attempt_id="job-1.0",
        progress=Progress(step=9),
    )
    service.store.record_heartbeats([old])
    service.add_attempt("job-1", 1, "s1")
    row = service.client("vic").jobs().jobs[0]
    assert (row.attempts, row.progress) == (2, None)
    service.send_heartbeat("s1/0", attempt_id="job-1.1", progress=Progress(step=4, total=8))
    service.send_heartbeat("s1/1", attempt_id="job-1.1", progress=Progress(step=5, total=8))
    service.stop()
    service.start()
    row = service.client("vic").jobs().jobs[0]
    assert row.progress == Progress(step=4, total=8)


def test_a_job_is_found_by_name_and_by_a_unique_prefix_of_its_id(service):
    service.submit("abcd-1", name="one")
    service.submit("abce-2", name="two")
    client = service.client("vic")
    assert client.job("abcd").job.id == "abcd-1"
    assert client.job("one").job.id == "abcd-1"
    with pytest.raises(Conflict, match=r"abcd-1.*abce-2|abce-2.*abcd-1"):
        client.job("abc")
    with pytest.raises(NotFound, match="did you mean one"):
        client.job("on")


def test_jobs_of_one_call_are_queued_in_the_order_given(service):
    ids = ["zz", "mm", "aa", "qq"]
    service.client("mel").submit([new(job_id) for job_id in ids])
    pending = [
        placement.PendingJob(job=job, missing=1, sources=()) for job in service.store.live().jobs
    ]
    assert [each.job.id for each in placement.queue_order(pending)] == ids
    assert [row.id for row in service.client("mel").jobs().jobs] == ids[::-1]
    assert [service.client("mel").why(job_id).ahead for job_id in ids] == [0, 1, 2, 3]


def test_a_wait_is_counted_from_the_end_of_the_last_attempt(service):
    service.submit("job-1")
    service.clock.advance(timedelta(hours=5))
    assert service.client("mel").why("job-1").message.startswith("queued for 5 h")
    attempt = service.add_attempt("job-1", 0, "s1")
    service.clock.advance(timedelta(hours=20))
    ended = replace(
        attempt, state=AttemptState.ENDED, ended_at=service.clock.now(),
        end_reason=EndReason.PREEMPTED,
    )  # fmt: skip
    service.store.commit(ChangeSet(attempts=[ended]))
    service.change_job("job-1", state=JobState.RECOVERING, reason="preempted")
    service.clock.advance(timedelta(minutes=2))
    assert service.client("mel").why("job-1").message == "recovering for 2 min: preempted"


def test_progress_and_metrics_are_kept_after_the_end(service):
    service.submit("job-1")
    attempt = service.add_attempt("job-1", 0, "s1")
    ended = replace(
        attempt, state=AttemptState.ENDED, ended_at=service.clock.now(), last_step=120,
        end_reason=EndReason.FINISHED, total_steps=120, metrics={"loss": 0.25},
    )  # fmt: skip
    service.store.commit(ChangeSet(attempts=[ended]))
    service.end_job("job-1", JobState.SUCCEEDED)
    progress = service.client("mel").job("job-1").row.progress
    assert (progress.step, progress.total, progress.metrics) == (120, 120, {"loss": 0.25})
    assert service.client("mel").jobs().jobs[0].progress == progress


REFERENCES = [
    pytest.param("mel", "train", "mel-new", id="my newest, although it has ended"),
    pytest.param("mo", "train", "mo-1", id="mine, although another user has a newer one"),
    pytest.param("vic", "mel/train", "mel-new", id="newest of another user"),
    pytest.param("mel", "mo/train", "mo-1", id="of another user"),
    pytest.param("mel", "mel-o", "mel-old", id="beginning of an id"),
    pytest.param("mel", "@last", "mel-new", id="my last job"),
    pytest.param("mo", "@last", "mo-2", id="the last job of another user"),
    pytest.param("mel", "eval", "mo-2", id="the only one of that name"),
    pytest.param("mel", "sweep", "mel-hid", id="archived, if there is no other"),
]


@pytest.mark.parametrize(("caller", "ref", "expected"), REFERENCES)
def test_a_reference_means_my_newest_job_of_that_name(service, caller, ref, expected):
    for job_id, owner, name in (
        ("mel-hid", "mel", "sweep"), ("mel-old", "mel", "train"), ("mo-1", "mo", "train"),
        ("mel-new", "mel", "train"), ("mo-2", "mo", "eval"),
    ):  # fmt: skip
        service.submit(job_id, by=owner, name=name)
        service.clock.advance(timedelta(seconds=1))
    for ended in ("mel-hid", "mel-new"):
        service.end_job(ended)
    service.client("mel").archive(["mel-hid"])
    client = service.client(caller)
    assert client.job(ref).job.id == expected
    assert client.why(ref).job_id == expected


def test_a_name_of_several_other_users_is_ambiguous(service):
    service.submit("a", by="mo")
    service.submit("b", by="mel")
    with pytest.raises(Conflict, match="use one of mel/train, mo/train"):
        service.client("ada").job("train")
    with pytest.raises(NotFound, match="ada has no jobs"):
        service.client("ada").job("@last")


def test_a_job_is_found_by_its_id_whatever_others_name_theirs(service):
    service.submit("x1", by="mel", name="train")
    service.submit("x2", by="mel", name="train")
    service.submit("other", by="mo", name="eval")
    service.client("mo").change_job("other", JobChanges(name="x1"))
    with pytest.raises(Conflict, match="use one of mo/x1, @x1"):
        service.client("ada").job("x1")
    assert service.client("ada").job("@x1").job.id == "x1"
    assert service.client("ada").job("mo/x1").job.id == "other"
    assert service.client("mel").job("x1").job.id == "x1"
    with pytest.raises(NotFound):
        service.client("ada").job("@x")


def test_a_default_name_is_found_without_its_suffix(service):
    service.submit("k3f9aaaa", name="train-k3f9")
    service.clock.advance(timedelta(seconds=1))
    service.submit("zzzzaaaa", name="train-big")
    client = service.client("mel")
    assert client.job("train").job.id == "k3f9aaaa", "a name that a user chose does not match"
    service.end_job("k3f9aaaa")
    service.clock.advance(timedelta(seconds=1))
    child = client.resume("train").id
    assert client.job("train").job.id == child, "a resumed job keeps the name"


def test_a_rerun_of_a_job_with_a_default_name_gets_its_own(service):
    service.submit("k3f9aaaa", name="train-k3f9")
    service.submit("abcdaaaa", name="baseline")
    client = service.client("mel")
    for job in ("k3f9aaaa", "abcdaaaa"):
        service.end_job(job)
    rerun = client.rerun("k3f9aaaa")
    assert rerun.name == f"train-{rerun.id[:4]}"
    service.end_job(rerun.id)
    again = client.rerun(client.resume(rerun.id).parent)
    assert again.name == f"train-{again.id[:4]}"
    assert client.rerun("abcdaaaa").name == "baseline", "a name that a user chose is kept"
    assert client.rerun("k3f9aaaa", {"name": "other"}).name == "other"


@pytest.mark.parametrize("ref", ["../../etc/passwd", "..", "a/b", "%00", "\0", "", " ", "%2e%2e"])
def test_a_reference_that_names_nothing_is_not_found(shared_service, ref):
    with pytest.raises((NotFound, BadInput)):
        shared_service.client("vic").job(ref)


def test_detail_shows_attempts_slices_hosts_and_children(service):
    service.submit("job-1", slices=2)
    service.add_slice("s1", "job-1")
    service.add_slice("s2", "job-1")
    service.add_attempt("job-1", 0, "s1", "s2")
    service.send_heartbeat("s2/1", attempt_id="job-1.0", progress=Progress(step=1))
    service.stop()
    service.start()
    detail = service.client("vic").job("job-1")
    assert [attempt.number for attempt in detail.attempts] == [0]
    assert [(row.id, row.hosts, row.hosts_seen) for row in detail.slices] == [
        ("s1", 4, 0),
        ("s2", 4, 1),
    ]
    assert [row.process for row in detail.hosts] == list(range(8))
    assert detail.hosts[5].progress.step == 1


def test_a_cancel_is_asked_for_once_and_by_the_owner_or_an_admin(service):
    service.submit("job-1")
    for stranger in ("mo", "vic"):
        with pytest.raises(Forbidden):
            service.client(stranger).cancel("job-1")
    service.client("mel").cancel("job-1")
    service.change_job("job-1", cancel_requested_by="mel")
    service.client("ada").cancel("job-1")
    assert kinds(service) == [InboxMessageKind.SUBMITTED, InboxMessageKind.CANCEL]
    service.end_job("job-1", JobState.CANCELLED)
    service.client("mel").cancel("job-1")
    assert kinds(service).count(InboxMessageKind.CANCEL) == 1


def test_a_job_that_has_ended_cannot_be_cancelled(service):
    service.submit("job-1")
    service.end_job("job-1", JobState.SUCCEEDED)
    with pytest.raises(Conflict, match="already succeeded"):
        service.client("mel").cancel("job-1")


def test_resume_keeps_the_checkpoints_and_rerun_gets_new_ones(service):
    service.submit("job-1", timeout="1h")
    service.end_job("job-1")
    resumed = service.client("mel").resume("job-1", {"timeout": "2h", "zones": ["us-central1-a"]})
    again = service.client("mel").rerun("job-1")
    parent, child, other = (
        service.store.job(JobId(job_id)) for job_id in ("job-1", resumed.id, again.id)
    )
    assert (child.parent, child.parent_relation, child.checkpoint) == (
        "job-1",
        ParentRelation.RESUME,
        parent.checkpoint,
    )
    assert (child.spec.timeout, child.spec.zones) == (timedelta(hours=2), ("us-central1-a",))
    assert (other.parent, other.parent_relation) == ("job-1", ParentRelation.RERUN)
    assert other.spec == parent.spec
    assert other.checkpoint not in (parent.checkpoint, "")
    detail = service.client("vic").job("job-1")
    assert {row.id for row in detail.children} == {resumed.id, again.id}


def test_resuming_a_job_that_started_over_goes_on_from_its_newer_checkpoints(service):
    service.submit("job-1")
    service.add_slice("s1", "job-1")
    service.change_job("job-1", fresh_from=1)
    service.add_attempt("job-1", 1, "s1")
    place = service.send_heartbeat("s1/0").assignment.checkpoint
    service.add_attempt("job-1", 1, "s1", state=AttemptState.ENDED)
    service.end_job("job-1")
    resumed = service.client("mel").resume("job-1")
    assert service.store.job(resumed.id).checkpoint == place


def test_a_rerun_of_a_job_with_its_own_location_does_not_find_the_old_checkpoints(service):
    service.submit("job-1", checkpoint="gs://bucket/run")
    service.end_job("job-1")
    again = service.client("mel").rerun("job-1", job_id=JobId("job-2"))
    assert service.store.job(again.id).checkpoint == "gs://bucket/run-job-2"
    moved = service.client("mel").rerun("job-1", {"checkpoint": "gs://bucket/other"})
    assert service.store.job(moved.id).checkpoint == "gs://bucket/other"


def test_only_an_ended_job_is_resumed_and_only_by_its_owner_or_an_admin(service):
    service.submit("job-1")
    with pytest.raises(Conflict, match="is queued"):
        service.client("mel").resume("job-1")
    with pytest.raises(Conflict, match="is queued"):
        service.client("mel").rerun("job-1")
    service.end_job("job-1")
    with pytest.raises(Forbidden):
        service.client("mo").resume("job-1")
    assert service.store.job(service.client("ada").resume("job-1").id).owner == "mel"


def test_sending_a_resume_twice_is_one_job(service):
    service.submit("job-1")
    service.end_job("job-1")
    first = service.client("mel").resume("job-1", job_id=JobId("job-2"))
    assert service.client("mel").resume("job-1", job_id=JobId("job-2")).id == first.id
    assert len(service.client("mel").jobs().jobs) == 2


def test_two_jobs_never_go_on_from_the_same_checkpoints_at_once(service):
    service.submit("job-1")
    service.end_job("job-1")
    child = service.client("mel").resume("job-1")
    with pytest.raises(Conflict, match=f"tpu cancel {child.id}"):
        service.client("mel").resume("job-1")
    service.end_job(child.id)
    grandchild = service.client("mel").resume(child.id)
    with pytest.raises(Conflict, match=grandchild.id):
        service.client("mel").resume("job-1")


def test_a_bad_change_names_the_field(service):
    service.submit("job-1")
    service.end_job("job-1")
    with pytest.raises(BadInput, match=r"accelerator.*v5e-16"):
        service.client("mel").resume("job-1", {"accelerator": "v5e-17"})


def test_why_tells_a_waiting_job_who_is_ahead_what_was_refused_and_until_when(service):
    service.submit("first")
    service.submit("small", accelerator="v5e-8", priority=9)
    service.clock.advance(timedelta(seconds=1))
    service.submit("vip", priority=5)
    service.clock.advance(timedelta(seconds=1))
    service.submit("mine")
    now = service.clock.now()
    refusal = CapacityRefusal(
        provider="tpu-vm",
        zone="us-central1-a",
        accelerator="v5litepod-16",
        capacity=Capacity.SPOT,
        message="no stock",
        refused_at=now,
        until=now + timedelta(minutes=2),
    )
    service.store.commit(ChangeSet(refusals=[refusal]))
    service.change_job("mine", not_before=now + timedelta(seconds=30), reason="backing off")
    explanation = service.client("vic").why("mine")
    assert explanation.ahead == 2
    assert explanation.until == refusal.until
    assert "backing off" in explanation.message
    text = " / ".join(explanation.details)
    assert "2 jobs ahead" in text
    assert "no stock" in text
    assert "retry in 2 min" in text
    assert "in backoff for another 30 s" in text


def test_why_tells_the_next_job_of_a_full_pool_when_it_can_start_at_the_latest(service):
    pool = Pool(name="lab", provider="local", accelerator="v5litepod-16", largest=2)
    service.store.commit(ChangeSet(pools=[pool]))
    for number, limit in enumerate(["1h", "3h"]):
        service.submit(f"busy-{number}", pool="lab", timeout=limit, grace="5m")
        service.add_slice(f"s{number}", f"busy-{number}", pool="lab")
        service.add_attempt(f"busy-{number}", 0, f"s{number}", running_at=service.clock.now())
        service.change_job(f"busy-{number}", state=JobState.RUNNING, reason="runs")
    service.clock.advance(timedelta(minutes=9))
    service.submit("next", pool="lab")
    service.clock.advance(timedelta(minutes=1))
    service.submit("after", pool="lab")
    service.submit("pair", pool="lab", slices=2, priority=-1)
    explanation = service.client("vic").why("next")
    assert explanation.until == service.clock.now() + timedelta(minutes=55)
    assert "starts in 55 min at the latest" in explanation.details[0]
    (ahead,) = service.client("vic").why("after").details
    assert ahead == "1 job ahead in the queue for pool lab; starts in 2 h 55 min at the latest"
    service.end_job("next", reason="done")
    service.end_job("after", reason="done")
    assert "starts in 2 h 55 min" in " ".join(service.client("vic").why("pair").details)
    service.change_job("busy-1", state=JobState.RUNNING, spec=structs.replace(
        service.store.job("busy-1").spec, timeout=None
    ))  # fmt: skip
    assert service.client("vic").why("pair").until is None, "unknown"


def test_why_tells_what_a_running_job_does(service):
    service.submit("job-1", timeout="1h")
    service.add_slice("s1", "job-1")
    service.add_attempt("job-1", 0, "s1", running_at=service.clock.now())
    service.change_job("job-1", state=JobState.RUNNING, reason="every host runs the command")
    service.send_heartbeat("s1/0", attempt_id="job-1.0", progress=Progress(step=4, total=8))
    service.stop()
    service.start()
    service.clock.advance(timedelta(minutes=5))
    explanation = service.client("vic").why("job-1")
    text = " / ".join(explanation.details)
    assert "attempt 0: running for 5 min on s1" in text
    assert "step 4 of 8" in text
    assert "time limit expires in 55 min" in text


def test_why_tells_every_reason_of_a_job_that_ended_and_what_to_do(service):
    service.submit("job-1")
    for number, reason in enumerate([EndReason.PREEMPTED, EndReason.OUT_OF_HBM]):
        service.add_attempt(
            "job-1", number, "s1", state=AttemptState.ENDED, end_reason=reason, message=reason
        )
    service.end_job("job-1", reason="out of memory", end_reason=EndReason.OUT_OF_HBM)
    explanation = service.client("vic").why("job-1")
    assert [each.end_reason for each in explanation.attempts] == [
        EndReason.PREEMPTED,
        EndReason.OUT_OF_HBM,
    ]
    assert "out_of_hbm" in explanation.details[0]
    assert "smaller batch" in explanation.advice


def test_why_tells_a_recovering_job_why_its_last_attempt_ended(service):
    service.submit("job-1")
    service.add_attempt(
        "job-1",
        0,
        "s1",
        state=AttemptState.ENDED,
        end_reason=EndReason.PREEMPTED,
        message="s1 was preempted",
    )
    service.change_job("job-1", state=JobState.RECOVERING, reason="requesting a new slice")
    explanation = service.client("vic").why("job-1")
    assert "attempt 0 ended: s1 was preempted" in explanation.details


@pytest.mark.parametrize("priority", [101, -101])
def test_a_priority_outside_the_range_of_members_requires_the_admin_role(service, priority):
    client = service.client("mel")
    service.submit("job-1", by="mel", priority=100)
    with pytest.raises(Forbidden, match="not from -100 to 100"):
        service.submit("job-2", by="mel", priority=priority)
    with pytest.raises(Forbidden, match="not from -100 to 100"):
        client.change_job("job-1", JobChanges(priority=priority))
    service.end_job("job-1")
    with pytest.raises(Forbidden, match="not from -100 to 100"):
        client.rerun("job-1", changes={"priority": priority})
    admin = service.client("ada")
    assert admin.change_job("job-1", JobChanges(priority=priority)).priority == priority
    assert client.change_job("job-1", JobChanges(notes="kept")).priority == priority
    assert admin.rerun("job-1").priority == priority
    with pytest.raises(Forbidden):
        client.rerun("job-1")
