"""Builders of objects to store, with only the fields that a test needs."""

from __future__ import annotations

import random
import string
from datetime import UTC, datetime, timedelta
from typing import Any

from tpufleet.model.events import Event, EventKind
from tpufleet.model.fleet.hosts import Host, host_id
from tpufleet.model.fleet.pools import CapacityRefusal, Pool
from tpufleet.model.fleet.slices import SliceId, TpuSlice
from tpufleet.model.inbox import InboxMessage, InboxMessageKind
from tpufleet.model.job.attempts import Attempt, AttemptState, attempt_id
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import Capacity, Job, JobId, JobSpec
from tpufleet.model.people.users import Role, Token, User

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def job(
    name: str = "j1",
    *,
    at: float = 0,
    tags: tuple[str, ...] = (),
    pool: str | None = None,
    called: str = "train",
    **more: Any,
) -> Job:
    spec = JobSpec(
        name=called,
        command=("python", "train.py"),
        accelerator="v5litepod-16",
        tags=tags,
        pool=pool,
        env={"LR": "0.01"},
        timeout=timedelta(hours=2),
    )
    return Job(id=JobId(name), spec=spec, submitted_at=later(at), **{"owner": "ada", **more})


def attempt(job_name: str = "j1", number: int = 0, **more: Any) -> Attempt:
    job_id = JobId(job_name)
    return Attempt(
        id=attempt_id(job_id, number),
        job_id=job_id,
        number=number,
        slices=(SliceId("s1"),),
        created_at=NOW,
        **more,
    )


def random_text(length: int) -> str:
    """Without repetition, so that no index can compress it."""
    return "".join(random.Random(1).choices(string.ascii_letters + string.digits, k=length))


def ended_attempt(job_name: str = "j1", number: int = 0, **more: Any) -> Attempt:
    return attempt(
        job_name,
        number,
        state=AttemptState.ENDED,
        ended_at=later(9),
        end_reason=EndReason.PREEMPTED,
        **more,
    )


def tpu_slice(name: str = "s1", *, at: float = 0, **more: Any) -> TpuSlice:
    return TpuSlice(
        id=SliceId(name),
        provider="local",
        accelerator="v5litepod-16",
        zone="local-a",
        capacity=Capacity.SPOT,
        request_group="o1",
        requested_at=later(at),
        **more,
    )


def host(slice_name: str = "s1", index: int = 0, **more: Any) -> Host:
    slice_id = SliceId(slice_name)
    return Host(id=host_id(slice_id, index), slice_id=slice_id, index=index, **more)


def event(message: str = "submitted", **more: Any) -> Event:
    return Event(
        **{"at": NOW, "kind": EventKind.JOB, "state": "queued", "message": message, **more}
    )


def message(job_name: str = "j1", **more: Any) -> InboxMessage:
    return InboxMessage(
        **{"kind": InboxMessageKind.SUBMITTED, "at": NOW, "job_id": JobId(job_name), **more}
    )


def pool(name: str = "spot", **more: Any) -> Pool:
    return Pool(name=name, provider="local", accelerator="v5litepod-16", largest=4, **more)


def refusal(zone: str = "local-a", **more: Any) -> CapacityRefusal:
    return CapacityRefusal(
        provider="local",
        zone=zone,
        accelerator="v5litepod-16",
        capacity=Capacity.SPOT,
        message="out of stock",
        refused_at=NOW,
        until=later(60),
        **more,
    )


def user(name: str = "ada", role: Role = Role.MEMBER) -> User:
    return User(name=name, role=role, created_at=NOW)


def token(name: str = "t1", *, of: str = "ada", digest: str = "d1", at: float = 0) -> Token:
    return Token(id=name, user=of, hash=digest, created_at=later(at))
