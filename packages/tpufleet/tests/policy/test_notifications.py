"""Who hears of which event, and when a failed message is tried again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tpufleet.model.events import Event, EventKind
from tpufleet.model.job.attempts import Attempt, AttemptState, attempt_id
from tpufleet.model.job.jobs import Job, JobId, JobSpec, JobState
from tpufleet.model.people.notifications import (
    DEFAULT_EVENTS,
    ChannelKind,
    Delivery,
    DeliveryState,
    NotificationChannel,
    NotificationSettings,
    NotifyOn,
)
from tpufleet.model.people.users import Role, User
from tpufleet.policy import notifications

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def job(*notify: str) -> Job:
    spec = JobSpec(
        name="train", command=("python", "x.py"), accelerator="v5litepod-16", notify=notify
    )
    return Job(id=JobId("job-1"), spec=spec, owner="mel", submitted_at=NOW)


def channel(name: str, *on: NotifyOn) -> NotificationChannel:
    return NotificationChannel(
        name=name, kind=ChannelKind.SLACK, target="x", on=on or DEFAULT_EVENTS, sealed=""
    )


def settings(*channels: NotificationChannel, owner: str = "mel") -> NotificationSettings:
    return NotificationSettings(owner=owner, channels={each.name: each for each in channels})


def event(state: str, kind: EventKind = EventKind.JOB, **more: object) -> Event:
    job_id = None if kind is EventKind.BUDGET else JobId("job-1")
    return Event(at=NOW, kind=kind, state=state, message="why", job_id=job_id, seq=7, **more)  # type: ignore[arg-type]


def lost_attempts(*minutes_ago: int) -> list[Attempt]:
    return [
        Attempt(
            id=attempt_id(JobId("job-1"), number),
            job_id=JobId("job-1"),
            number=number,
            slices=(),
            created_at=NOW - timedelta(hours=5),
            ended_at=NOW - timedelta(minutes=minutes),
            state=AttemptState.ENDED,
        )
        for number, minutes in enumerate(minutes_ago)
    ]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (JobState.SUCCEEDED, {NotifyOn.END}),
        (JobState.FAILED, {NotifyOn.END, NotifyOn.FAILURE}),
        (JobState.CANCELLED, {NotifyOn.END}),
        (JobState.RUNNING, set()),
        (JobState.RECOVERING, set()),
    ],
)
def test_what_a_change_of_state_is(state, expected):
    assert notifications.reasons(event(state), job(), lost_attempts(1)) == expected


@pytest.mark.parametrize(
    ("minutes_ago", "loops"),
    [
        ((1, 2), False),
        ((1, 2, 3), True),
        ((1, 2, 3, 4), False),
        ((1, 2, 3, 4, 5, 6), True),
        ((1, 2, 3, 4, 5, 6, 7, 8), False),
        ((1, 90, 200), False),
    ],
    ids=["two", "three", "four", "six", "eight", "slow"],
)
def test_a_loop_is_three_lost_attempts_in_an_hour_and_said_again_at_each_doubling(
    minutes_ago, loops
):
    found = notifications.reasons(event(JobState.RECOVERING), job(), lost_attempts(*minutes_ago))
    assert found == ({NotifyOn.RECOVERY} if loops else set())


@pytest.mark.parametrize(
    ("notify", "state", "expected"),
    [
        ((), "failed", ["all", "failures"]),
        ((), "succeeded", ["all"]),
        (("failures",), "succeeded", []),
        (("failures",), "failed", ["failures"]),
        (("failures:end",), "succeeded", ["failures"]),
        (("all:failure",), "succeeded", []),
        (("none",), "failed", []),
        (("deleted", "all"), "failed", ["all"]),
    ],
)
def test_the_list_of_a_job_replaces_what_its_owner_set(notify, state, expected):
    known = settings(channel("all"), channel("failures", NotifyOn.FAILURE))
    queued = notifications.deliveries(event(state), job(*notify), [], [], {"mel": known}, NOW)
    assert [each.channel for each in queued] == expected


def test_only_the_owner_of_a_job_is_told():
    known = {"mo": settings(channel("all"), owner="mo")}
    assert not notifications.deliveries(event("failed"), job(), [], [], known, NOW)


@pytest.mark.parametrize(
    ("scope", "name", "told"), [("user", "mel", ["mel"]), ("pool", "lab", ["ada"])]
)
def test_a_budget_is_told_to_its_user_and_that_of_a_pool_to_admins(scope, name, told):
    users = [
        User(name="ada", role=Role.ADMIN, created_at=NOW),
        User(name="mel", role=Role.MEMBER, created_at=NOW),
    ]
    known = {owner: settings(channel("all"), owner=owner) for owner in ("ada", "mel", "mo")}
    spent = event("warning", EventKind.BUDGET, data={"scope": scope, "name": name})
    queued = notifications.deliveries(spent, None, [], users, known, NOW)
    assert [each.owner for each in queued] == told
    assert "tpu cost budget" in queued[0].text


def test_a_message_says_what_happened_and_the_next_command():
    (queued,) = notifications.deliveries(
        event("failed"), job(), [], [], {"mel": settings(channel("all"))}, NOW
    )
    assert queued.text == "train failed: why\n  next: tpu why job-1"
    assert queued.payload["event"] == "job.failed" and queued.payload["job"] == "job-1"


def test_retries_back_off_and_end():
    tried = Delivery(
        id="x", owner="mel", channel="all", subject="s", text="t", payload={},
        created_at=NOW, due_at=NOW,
    )  # fmt: skip
    delays, now = [], NOW
    while tried.state is DeliveryState.PENDING:
        tried = notifications.after_failure(tried, "down", now, retry=True)
        delays.append(tried.due_at - now)
        now = tried.due_at
    assert delays[:3] == [timedelta(seconds=30), timedelta(minutes=1), timedelta(minutes=2)]
    assert max(delays) == timedelta(hours=2) and now - NOW > timedelta(hours=8)
    assert tried.state is DeliveryState.FAILED and tried.tries == notifications.MAX_TRIES
