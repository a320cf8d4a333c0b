"""Which notifications an event causes, what they say, and when a failed one is tried again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from tpufleet.model.events import Event, EventKind
from tpufleet.model.job.attempts import Attempt
from tpufleet.model.job.jobs import ENDED_STATES, Job, JobState
from tpufleet.model.people.budgets import BudgetScope
from tpufleet.model.people.notifications import (
    NO_CHANNELS,
    Delivery,
    DeliveryState,
    NotificationChannel,
    NotificationSettings,
    NotifyOn,
    parse_job_rule,
)
from tpufleet.model.people.users import Role, User
from tpufleet.model.values.records import replace

# A job that lost its attempt this often within the window recovers in a loop.
LOOP_ATTEMPTS = 3
LOOP_WINDOW = timedelta(hours=1)
# After the first one, doubling: about half a day in all.
FIRST_RETRY, LONGEST_RETRY, MAX_TRIES = timedelta(seconds=30), timedelta(hours=2), 12
# More messages of one user than this wait for nothing good: their receiver is down.
MAX_PENDING = 200
MAX_KEPT = 1000  # of one user, of those that were sent or given up
MAX_TEXT = 2000
# Users choose the receiver, who need not want them.
MAX_EMAILS_PER_HOUR = 100
MAX_TESTS_PER_HOUR = 20


_ANNOUNCED = frozenset({*ENDED_STATES, JobState.RECOVERING})


def may_matter(event: Event) -> bool:
    """Without the job: most events are of no interest to anybody."""
    if event.kind is EventKind.JOB:
        return event.job_id is not None and event.state in _ANNOUNCED
    return event.kind is EventKind.BUDGET


def reasons(event: Event, job: Job | None, attempts: Sequence[Attempt]) -> set[NotifyOn]:
    """What this event is, to those who want to hear of it."""
    if event.kind is EventKind.BUDGET:
        return {NotifyOn.BUDGET}
    if event.kind is not EventKind.JOB or job is None:
        return set()
    if event.state in set(ENDED_STATES):
        ended = {NotifyOn.END}
        return ended | {NotifyOn.FAILURE} if event.state == JobState.FAILED else ended
    if event.state == JobState.RECOVERING and is_loop(attempts, event.at):
        return {NotifyOn.RECOVERY}
    return set()


def is_loop(attempts: Sequence[Attempt], now: datetime) -> bool:
    """At the third lost attempt within an hour, then at each doubling: 3, 6, 12, …"""
    lost = sum(
        attempt.ended_at is not None and now - LOOP_WINDOW <= attempt.ended_at <= now
        for attempt in attempts
    )
    while lost > LOOP_ATTEMPTS and lost % 2 == 0:
        lost //= 2
    return lost == LOOP_ATTEMPTS


def receivers(event: Event, job: Job | None, users: Sequence[User]) -> list[str]:
    """The owner of the job; of a budget its user, or for that of a pool the admins."""
    if event.kind is EventKind.BUDGET:
        if event.data.get("scope") == BudgetScope.USER:
            return [event.data["name"]]
        return [user.name for user in users if user.role is Role.ADMIN]
    return [job.owner] if job is not None else []


def channels(
    settings: NotificationSettings, wanted: set[NotifyOn], job: Job | None
) -> list[NotificationChannel]:
    """The job's own list of channels replaces what they do by default."""
    if job is None or not job.spec.notify:
        return [each for each in settings.channels.values() if wanted & set(each.on)]
    chosen = []
    for written in job.spec.notify:
        name, events = parse_job_rule(written)
        channel = settings.channels.get(name)
        if name != NO_CHANNELS and channel is not None and wanted & set(events or channel.on):
            chosen.append(channel)
    return chosen


def deliveries(
    event: Event,
    job: Job | None,
    attempts: Sequence[Attempt],
    users: Sequence[User],
    settings: Mapping[str, NotificationSettings],
    now: datetime,
) -> list[Delivery]:
    wanted = reasons(event, job, attempts)
    if not wanted:
        return []
    return [
        delivery(event, job, owner, channel, now)
        for owner in receivers(event, job, users)
        if owner in settings
        for channel in channels(settings[owner], wanted, job)
    ]


def delivery(
    event: Event, job: Job | None, owner: str, channel: NotificationChannel, now: datetime
) -> Delivery:
    payload: dict[str, Any] = {
        "event": f"{event.kind}.{event.state}",
        "at": event.at.isoformat(),
        "message": event.message[:MAX_TEXT],
    }
    if job is None:
        subject, next_step = event.message, "tpu cost budget"
    else:
        subject = f"{job.spec.name} {event.state}: {event.message}"
        next_step = f"tpu why {job.id}"
        payload |= {
            "job": job.id,
            "name": job.spec.name,
            "owner": job.owner,
            "state": event.state,
            "accelerator": job.spec.accelerator,
            "tags": list(job.spec.tags),
        }
    text = f"{subject[:MAX_TEXT]}\n  next: {next_step}"
    return Delivery(
        id=f"{event.seq:012d}-{owner}-{channel.name}",
        owner=owner,
        channel=channel.name,
        subject=one_line(subject)[:200],
        text=text,
        payload=payload | {"text": text},
        created_at=now,
        due_at=now,
    )


def one_line(text: str) -> str:
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


def in_turns(waiting: Sequence[Delivery]) -> list[Delivery]:
    """The first of each user, then the second of each, and so on."""
    turns: dict[str, int] = {}
    numbered = []
    for each in waiting:
        turns[each.owner] = turn = turns.get(each.owner, 0) + 1
        numbered.append((turn, each))
    return [each for _, each in sorted(numbered, key=lambda pair: pair[0])]


def to_delete(known: Sequence[Delivery], now: datetime, kept_for: timedelta) -> list[Delivery]:
    """Of those that are done: old ones, and of each user all but the newest."""
    done = [each for each in known if each.state is not DeliveryState.PENDING]
    kept: dict[str, int] = {}
    chosen = []
    for each in sorted(done, key=lambda each: (each.created_at, each.id), reverse=True):
        kept[each.owner] = count = kept.get(each.owner, 0) + 1
        if count > MAX_KEPT or now - each.created_at > kept_for:
            chosen.append(each)
    return chosen


def after_failure(tried: Delivery, error: str, now: datetime, *, retry: bool) -> Delivery:
    """With backoff; given up after the last try, or at once when a retry cannot help."""
    tries = tried.tries + 1
    if not retry or tries >= MAX_TRIES:
        return replace(tried, state=DeliveryState.FAILED, tries=tries, error=error)
    delay = min(FIRST_RETRY * 2 ** (tries - 1), LONGEST_RETRY)
    return replace(tried, tries=tries, error=error, due_at=now + delay)


def after_success(tried: Delivery, now: datetime) -> Delivery:
    return replace(tried, state=DeliveryState.SENT, tries=tried.tries + 1, error="", sent_at=now)
