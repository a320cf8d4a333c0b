"""One look at everything outside: the inbox, silent hosts, and what the providers said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from tpufleet.controller.act import Result
from tpufleet.model.attempts import AttemptId
from tpufleet.model.hosts import HostId, Progress, Pulse
from tpufleet.model.jobs import Job, JobId
from tpufleet.model.messages import Message, MessageKind
from tpufleet.model.pools import Pool
from tpufleet.stores.base import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    at: datetime
    messages: Sequence[Message] = ()
    new_jobs: Sequence[Job] = ()
    pools: Sequence[Pool] | None = None  # None: unchanged
    silent: Sequence[HostId] = ()
    due: Sequence[JobId] = ()  # jobs whose time has come
    results: Sequence[Result] = ()
    progress: dict[AttemptId, Progress] = field(default_factory=dict)


def read_inbox(store: Store, after: int) -> tuple[list[Message], list[Job], list[Pool] | None]:
    """New messages, the jobs they announce, and the pools if those changed."""
    messages = store.inbox(after)
    submitted = [
        message.job_id
        for message in messages
        if message.kind is MessageKind.SUBMITTED and message.job_id
    ]
    jobs = [job for job_id in submitted if (job := store.job(job_id)) is not None]
    changed = any(message.kind is MessageKind.POOL_CHANGED for message in messages)
    return messages, jobs, store.pools() if changed else None


def newest_progress(pulses: Sequence[Pulse]) -> dict[AttemptId, Progress]:
    """Per attempt, the newest step and checkpoint that any of its hosts reported."""
    newest: dict[AttemptId, Progress] = {}
    for pulse in pulses:
        if pulse.attempt_id is None or pulse.progress is None:
            continue
        newest[pulse.attempt_id] = merge(newest.get(pulse.attempt_id), pulse.progress)
    return newest


def merge(one: Progress | None, other: Progress) -> Progress:
    if one is None:
        return other
    later = other if _key(other) > _key(one) else one
    steps = [
        step for step in (one.checkpoint_step, other.checkpoint_step) if step is not None
    ]
    moments = [moment for moment in (one.at, other.at) if moment is not None]
    return Progress(
        step=later.step,
        total=later.total,
        checkpoint_step=max(steps, default=None),
        at=max(moments, default=None),
        message=later.message,
        metrics=later.metrics,
    )


def _key(progress: Progress) -> float:
    return progress.at.timestamp() if progress.at else 0.0
